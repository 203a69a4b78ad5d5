"""The diagnosis: causes with evidence, facts, prediction beside observation, and what follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from estimator.cluster import Cluster, resolve_cluster
from estimator.diagnose.advice import ADVICE, NOT_GPU_MEMORY, Advice
from estimator.diagnose.case import Case
from estimator.diagnose.causes import Cause, gib, rank_causes
from estimator.diagnose.comparison import Comparison, compare, stage_of_rank
from estimator.diagnose.evidence import Evidence, Failure
from estimator.diagnose.fingerprint import Match, match_request
from estimator.diagnose.job import Missing, Proposal, job_from_evidence
from estimator.errors import EstimatorError
from estimator.job.settings import Settings
from estimator.reading import read_job, read_stack
from estimator.requests import ClusterRequest, JobRequest
from estimator.step import step_timeline
from estimator.step.compose import StepTimeline

MAX_FACTS = 200
MAX_FAILURES = 20

CAUSE_WORDS = {
    "model_states": "parameters, gradients and optimizer states fill the card",
    "activations": "activations fill the card",
    "logits": "the logits and the cross entropy need more than is left",
    "unfused_attention": "attention runs unfused and keeps its scores",
    "fsdp_buffers": "buffers of gathered weights or of gradients need more than is left",
    "optimizer_first_step": "the optimizer's states appear in the first step and do not fit",
    "optimizer_temporaries": "temporary copies of the optimizer step do not fit",
    "gradient_accumulation": "gradients accumulate without being sharded",
    "fragmentation": "memory is reserved but in pieces",
    "memory_cap": "a memory fraction caps the process",
    "other_process": "another process holds part of the card",
    "outside_pool": "something outside PyTorch's pool (NCCL, cuBLAS, Triton, NVSHMEM) could not allocate",
    "cuda_graphs": "pools of CUDA graphs hold memory",
    "fp8_copies": "FP8 copies of weights stand beside the originals",
    "moe_imbalance": "experts of this rank get more tokens than others",
    "pipeline_imbalance": "one pipeline stage holds more than the others",
    "longest_sample": "a longer sample than those before came",
    "leak": "memory grows from step to step",
    "model_build": "the model or its optimizer does not fit while it is built",
    "checkpoint_load": "loading a checkpoint needs more than training",
    "checkpoint_save": "saving a checkpoint needs more than training",
    "evaluation": "evaluation needs more than training",
    "host_memory": "the host ran out of memory, not the GPU",
    "shared_memory": "shared memory of the data loader ran out, not the GPU's",
    "corrupt_shape": "a size is corrupt: no card could hold it",
    "configuration": "Megatron FSDP refuses this configuration; memory has nothing to do with it",
    "collective_timeout": "this text shows ranks that waited for another one",
    "not_out_of_memory": "this is not an out-of-memory error",
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The answer of ``POST /diagnose``. ``outcome``: "not_gpu_memory", "gpu_memory", or "needs_input" when the text
    shows no failure."""

    outcome: str
    summary: str
    causes: tuple[Cause, ...]
    advice: Advice
    evidence: Evidence
    proposal: Proposal
    case: Case | None = None
    comparisons: tuple[Comparison, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def questions(self) -> tuple[str, ...]:
        return tuple(c.question for c in self.comparisons if c.question)

    @property
    def missing(self) -> tuple[Missing, ...]:
        return self.proposal.missing

    def brief(self) -> dict[str, Any]:
        """The ``diagnosis`` of ``POST /recommend``."""
        return {"summary": self.summary, "causes": [c.as_dict() for c in self.causes]}

    def as_dict(self) -> dict[str, Any]:
        """Plain data, JSON as it is."""
        evidence, first = self.evidence, self.evidence.first
        rule = first.kind.rule_id if first else None
        return {
            "outcome": self.outcome,
            **self.brief(),
            "failure": first.as_dict() if first else None,
            "rule": {"rule_id": rule, "fix": first.kind.fix, "source": first.kind.source} if first and rule else None,
            "other_failures": [f.as_dict() for f in evidence.failures if f is not first][:MAX_FAILURES],
            "facts": [f.as_dict() for f in evidence.all_facts()[:MAX_FACTS]],
            "counts": dict(evidence.counts),
            "matches": [_match(m) for m in self.case.matches] if self.case else [],
            "prediction": [c.as_dict() for c in self.comparisons],
            "questions": list(self.questions),
            "missing": [m.as_dict() for m in self.missing],
            "job": _job(self.proposal.job),
            "cluster": _cluster(self.proposal.cluster),
            "known_of_cluster": dict(self.proposal.known_of_cluster),
            "job_sources": list(self.proposal.sources),
            "advice": self.advice.as_dict(),
            "notes": [*self.proposal.notes, *self.notes],
            "lines": evidence.num_lines,
            "truncated": evidence.truncated,
        }


@dataclass(slots=True)
class _Job:
    cluster: Cluster | None = None
    settings: Settings | None = None
    step: StepTimeline | None = None
    pipeline_rank: int | None = None
    notes: list[str] = field(default_factory=list)


def diagnose(
    evidence: Evidence,
    job: JobRequest | None = None,
    cluster: ClusterRequest | None = None,
    stack: Mapping[str, str] | None = None,
) -> Diagnosis:
    """Why it failed. ``job`` and ``cluster`` as asked about win over what the text says. Never raises for any text; a
    job that cannot be read or is not modelled is only left out of the comparison (``notes`` say so)."""
    proposal = job_from_evidence(evidence, cluster)
    if job is not None:
        missing = tuple(m for m in proposal.missing if not m.path.startswith("job."))
        proposal = replace(proposal, job=job, missing=missing)
    first = evidence.first
    if first is None:
        words = "The text shows no failure that this version knows. " + _asks(proposal)
        return Diagnosis("needs_input", words.strip(), (), Advice(), evidence, proposal)
    known = _estimated(proposal, first, stack or {})
    case = _case(evidence, first, known)
    causes = rank_causes(case)
    top = causes[0].cause if causes else first.kind.cause
    comparisons = compare(case)
    outcome = "not_gpu_memory" if top in NOT_GPU_MEMORY else "gpu_memory"
    return Diagnosis(
        outcome=outcome,
        summary=_summary(first, case, causes, comparisons, proposal),
        causes=causes,
        advice=_advice(first, top),
        evidence=evidence,
        proposal=proposal,
        case=case,
        comparisons=comparisons,
        notes=tuple(known.notes),
    )


def predicted_components(
    job: JobRequest | None, cluster: ClusterRequest | None, stack: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Bytes by component at the estimate's peak of the worst pipeline rank; empty where the job is not known, cannot be
    laid out or is not modelled."""
    if job is None or cluster is None:
        return {}
    try:
        known = resolve_cluster(cluster)
        read = read_job(job, known, read_stack(stack or {}))
        if not read.laid_out:
            return {}
        stages = range(read.settings.parallel.pipeline_model_parallel_size)
        timelines = [step_timeline(read.settings, stage, known.gpu.family).timeline for stage in stages]
    except (EstimatorError, ValueError):
        return {}
    peaks = [(max(t.phases(), key=lambda phase: phase.peak_bytes), t) for t in timelines]
    phase, timeline = max(peaks, key=lambda pair: pair[0].peak_bytes)
    return timeline.components_at_peak(phase)


def _estimated(proposal: Proposal, first: Failure, stack: Mapping[str, str]) -> _Job:
    """The timeline of the rank that failed, as far as job and cluster are known."""
    known = _Job()
    if proposal.cluster is not None:
        try:
            known.cluster = resolve_cluster(proposal.cluster)
        except EstimatorError as error:
            known.notes.append(f"the cluster could not be read: {error}"[:300])
    if proposal.job is None or known.cluster is None:
        return known
    try:
        read = read_job(proposal.job, known.cluster, read_stack(stack))
        if not read.laid_out:
            known.notes.append("the job cannot be laid out on these GPUs, so there is no prediction")
            return known
        stage = 0
        if first.rank is not None:
            stage = stage_of_rank(first.rank, read.settings, known.cluster.num_gpus)
        known.step = step_timeline(read.settings, stage, known.cluster.gpu.family)
        known.settings, known.pipeline_rank = read.settings, stage
    except (EstimatorError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        known.notes.append(f"no prediction for this job: {error}"[:300])
    return known


def _case(evidence: Evidence, first: Failure, known: _Job) -> Case:
    matches: tuple[Match, ...] = ()
    components: dict[str, int] = {}
    requested = first.fact("requested_bytes")
    if known.settings is not None and known.step is not None:
        if requested is not None and isinstance(requested.value, int):
            matches = match_request(
                requested.value, known.settings, known.step, first.phase, requested.resolution_bytes
            )
        bare = Case(evidence, first, known.cluster, known.settings, known.step, known.pipeline_rank)
        phase = bare.timeline_phase
        if phase is not None:
            components = known.step.timeline.components_at_peak(phase)
    return Case(evidence, first, known.cluster, known.settings, known.step, known.pipeline_rank, matches, components)


def _advice(first: Failure, cause: str) -> Advice:
    if first.kind.place == "configuration":
        return Advice((first.kind.fix,), (), False)
    return ADVICE.get(cause, Advice())


def _asks(proposal: Proposal) -> str:
    if not proposal.missing:
        return ""
    return "Please say " + ", ".join(m.path for m in proposal.missing[:5]) + "."


def _summary(
    first: Failure,
    case: Case,
    causes: tuple[Cause, ...],
    comparisons: tuple[Comparison, ...],
    proposal: Proposal,
) -> str:
    who = f"Rank {first.rank}" if first.rank is not None else "The job"
    sentences = []
    if first.kind.place in ("gpu", "gpu_driver"):
        asked = f", asking for {gib(case.requested)}" if case.requested is not None else ""
        where = f" in {first.phase.replace('_', ' ')}" if first.phase else ""
        when = f" after {first.iteration} iterations" if first.iteration else ""
        sentences.append(f"{who} ran out of GPU memory{where}{when}{asked} (line {first.span.line}).")
        if case.total is not None and case.allocated is not None:
            sentences.append(f"PyTorch had {gib(case.allocated)} of {gib(case.total)} allocated.")
    else:
        sentences.append(f"{who}: {first.kind.words} (line {first.span.line}).")
    if causes:
        sure = "Most likely" if causes[0].confidence >= 0.5 else "Possibly"
        sentences.append(f"{sure}, {CAUSE_WORDS.get(causes[0].cause, causes[0].cause)}.")
    if first.kind.fix:
        sentences.append(first.kind.fix)
    sentences += [f"{c.question[0].upper()}{c.question[1:]}" for c in comparisons if c.question][:1]
    if first.kind.place in ("gpu", "gpu_driver"):
        sentences.append(_asks(proposal))
    return " ".join(s for s in sentences if s)


def _match(match: Match) -> dict[str, Any]:
    return {
        "tensor": match.name,
        "component": match.component,
        "num_bytes": match.num_bytes,
        "difference": round(match.difference, 5),
        "fits_phase": match.fits_phase,
    }


def _job(job: JobRequest | None) -> dict[str, Any] | None:
    if job is None:
        return None
    values = {"recipe": job.recipe, "module": job.module, "config": job.config, "overrides": list(job.overrides)}
    return {name: value for name, value in values.items() if value}


def _cluster(cluster: ClusterRequest | None) -> dict[str, Any] | None:
    if cluster is None:
        return None
    names = ("gpu", "num_gpus", "gpus_per_node", "memory_limit_bytes", "reserved_bytes", "total_bytes")
    return {name: getattr(cluster, name) for name in names if getattr(cluster, name) is not None}
