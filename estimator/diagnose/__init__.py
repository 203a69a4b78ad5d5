"""Why a job ran out of memory, from what people have: an error text, a log, a configuration, a memory snapshot."""

from estimator.diagnose.evidence import Evidence, Fact, Failure, Fragment, Reading, Span
from estimator.diagnose.parser import file_lines, parse_evidence, parse_text

__all__ = [
    "Evidence",
    "Fact",
    "Failure",
    "Fragment",
    "Reading",
    "Span",
    "file_lines",
    "parse_evidence",
    "parse_text",
]
