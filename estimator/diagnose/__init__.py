"""Why a job ran out of memory, from what people have: an error text, a log, a configuration, a memory snapshot."""

from estimator.diagnose.advice import Advice
from estimator.diagnose.diagnosis import Diagnosis, diagnose, predicted_components
from estimator.diagnose.evidence import Evidence, Fact, Failure, Fragment, Reading, Span
from estimator.diagnose.job import Missing, Proposal, job_from_evidence
from estimator.diagnose.parser import file_lines, parse_evidence, parse_text
from estimator.diagnose.snapshot.words import snapshot_summary

__all__ = [
    "Advice",
    "Diagnosis",
    "Evidence",
    "Fact",
    "Failure",
    "Fragment",
    "Missing",
    "Proposal",
    "Reading",
    "Span",
    "diagnose",
    "file_lines",
    "job_from_evidence",
    "parse_evidence",
    "parse_text",
    "predicted_components",
    "snapshot_summary",
]
