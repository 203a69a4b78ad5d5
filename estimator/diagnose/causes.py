"""Causes, ranked: a table of signs, each of which speaks for one cause with a weight, and their combination.

Independent signs for one cause combine as 1 - prod(1 - weight); nothing is ever certain (at most 0.99). Weights are
judgements, ordered by how often the sign has another explanation; docs/diagnosis.md measures what comes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from estimator import components
from estimator.diagnose.case import Case
from estimator.diagnose.fingerprint import cause_of_component
from estimator.diagnose.units import GIB, TIB

MOST = 0.99
LEAST = 0.03
ABSURD_BYTES = 4 * TIB
LATE_ITERATION = 10

Sign = tuple[float, str]
"""(weight, what speaks for it)."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One possible cause with all that speaks for it."""

    cause: str
    confidence: float
    evidence: str

    def as_dict(self) -> dict[str, Any]:
        return {"cause": self.cause, "confidence": round(self.confidence, 3), "evidence": self.evidence}


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def _kind(case: Case) -> Sign | None:
    weights = {"configuration": 0.97, "host": 0.95, "corrupt": 0.97, "other": 0.9, "noise": 0.7, "gpu_driver": 0.8}
    kind = case.first.kind
    weight = weights.get(kind.place)
    if weight is None:
        weight = 0.6 if kind.kind_id == "clone_oom" else 0.12
    line = f"line {case.first.span.line}: {kind.words}"
    return weight, f"{line} (rule {kind.rule_id}): {kind.fix}" if kind.rule_id else line


def _absurd(case: Case) -> Sign | None:
    requested, total = case.requested, case.total
    if requested is None or (requested < ABSURD_BYTES and (total is None or requested < 16 * total)):
        return None
    return 0.95, f"{gib(requested)} were asked for, which no card has: a shape or length is corrupt"


def _unallocated(case: Case) -> Sign | None:
    spare, requested, total = case.unallocated, case.requested, case.total
    if spare is None or requested is None or spare < requested:
        return None
    if total is not None and spare < 0.01 * total:
        return 0.25, f"{gib(spare)} are reserved and not allocated, enough for the {gib(requested)}, but in pieces"
    large = total is not None and spare > 0.06 * total
    return (0.85 if large else 0.6), (
        f"{gib(spare)} are reserved by PyTorch but not allocated, while {gib(requested)} could not be had: in pieces"
    )


def _free(case: Case) -> Sign | None:
    free, requested = case.value("free_bytes"), case.requested
    if free is None or requested is None or free <= requested or case.value("allowed_bytes") is not None:
        return None
    return 0.5, f"{gib(free)} are free, more than the {gib(requested)} asked for"


def _pressure(case: Case) -> Sign | None:
    if not case.evidence.warnings:
        return None
    first = case.evidence.warnings[0]
    return 0.3, f"line {first.span.line}: {first.kind.words}"


def _growing_reserve(case: Case) -> Sign | None:
    rank = case.first.rank
    values = [
        (r.iteration or 0, r.value("max_reserved_bytes") or 0, r.value("max_allocated_bytes") or 0)
        for r in case.evidence.readings
        if r.rank in (rank, None) and r.value("max_reserved_bytes")
    ]
    if len(values) < 2:
        return None
    low, high = min(values), max(values)
    if high[0] > low[0] and high[1] > 1.05 * low[1] and high[2] <= 1.02 * low[2] and high[2]:
        return 0.4, f"reserved memory rose from {gib(low[1])} to {gib(high[1])} at the same peak of allocated memory"
    return None


def _growing_allocation(case: Case) -> Sign | None:
    rank = case.first.rank
    values = [
        (r.iteration or 0, r.value("allocated_bytes") or 0)
        for r in case.evidence.readings
        if r.rank in (rank, None) and r.value("allocated_bytes") and (r.iteration or 0) > 1
    ]
    if len(values) < 2:
        return None
    low, high = min(values), max(values)
    if high[0] > low[0] and high[1] > 1.03 * low[1]:
        return 0.55, f"memory held between steps rose from {gib(low[1])} to {gib(high[1])}"
    return None


def _other_process(case: Case) -> Sign | None:
    others, total, requested = case.others, case.total, case.requested
    if others is None or total is None or others < max(GIB, 0.02 * total):
        return None
    enough = requested is not None and others >= requested
    weight = min(0.92, 0.4 + others / total + (0.2 if enough else 0))
    return weight, f"other processes hold {gib(others)} of the card's {gib(total)}"


def _cap(case: Case) -> Sign | None:
    allowed, total = case.value("allowed_bytes"), case.total
    if allowed is None or total is None or allowed > 0.98 * total:
        return None
    return 0.85, f"the process may use {gib(allowed)} of the card's {gib(total)}: a memory fraction is set"


def _outside(case: Case) -> Sign | None:
    process, reserved = case.value("process_bytes"), case.reserved
    if process is None or reserved is None or process - reserved < 3 * GIB:
        return None
    return 0.45, f"{gib(process - reserved)} of this process lie outside PyTorch's pool (context, NCCL, libraries)"


def _graphs(case: Case) -> Sign | None:
    pools, allocated = case.value("private_pool_bytes"), case.allocated
    if "cuda_graph" in case.first.sites[:2]:
        return 0.65, "the traceback ends in a CUDA graph capture"
    if pools and allocated and pools > 0.05 * allocated:
        return min(0.85, 0.4 + pools / allocated), f"{gib(pools)} are in private pools of CUDA graphs"
    return None


def _no_sync(case: Case) -> Sign | None:
    if any("no_sync" in frame for frame in case.first.frames):
        return 0.6, "the traceback is inside no_sync(): gradients accumulate unsharded"
    return None


def _site(site: str, weight: float, words: str, depth: int = 2) -> Callable[[Case], Sign | None]:
    def sign(case: Case) -> Sign | None:
        if site not in case.first.sites[:depth] or case.first.phase in ("model_build", "checkpoint_load"):
            return None
        lower = 0.5 if case.first.sites[0] != site else 1.0
        return weight * lower, f"the traceback ends in {words}"

    return sign


def _phase(names: Sequence[str], weight: float, words: str) -> Callable[[Case], Sign | None]:
    def sign(case: Case) -> Sign | None:
        return (weight, words) if case.first.phase in names else None

    return sign


def _first_step(case: Case) -> Sign | None:
    if case.first.phase != "optimizer_step" or not case.is_first_iteration:
        return None
    return 0.55, "it failed in the first optimizer step, where Adam's states appear"


def _later_step(case: Case) -> Sign | None:
    if case.first.phase != "optimizer_step" or case.is_first_iteration:
        return None
    return (
        0.55,
        f"it failed in the optimizer step after {case.first.iteration} iterations: states were there already",
    )


def _late(case: Case) -> Sign | None:
    iteration = case.first.iteration or 0
    if iteration < LATE_ITERATION or case.first.phase not in (None, "forward", "backward", "gradient_reduction"):
        return None
    return (
        0.3,
        f"{iteration} iterations went well before: a longer sample or a fuller batch came, or memory had fragmented",
    )


def _late_moe(case: Case) -> Sign | None:
    if "moe" not in case.first.sites or (case.first.iteration or 0) < 1:
        return None
    return (
        0.4,
        f"it failed in the experts after {case.first.iteration} iterations: routing decides a rank's tokens",
    )


def _stage(case: Case) -> Sign | None:
    if case.settings is None or case.pipeline_rank is None:
        return None
    stages = case.settings.parallel.pipeline_model_parallel_size
    failed = {f.rank for f in case.evidence.failures if f.rank is not None and f.kind.place == "gpu"}
    if stages < 2 or not failed or case.cluster is None:
        return None
    width = max(1, case.cluster.num_gpus // stages)
    hit = {rank // width for rank in failed}
    if len(hit) == 1 and len(failed) > 1:
        return 0.4, f"only ranks of pipeline stage {hit.pop()} ran out of memory"
    return None


def _states(case: Case) -> Sign | None:
    if case.step is None or case.total is None:
        return None
    share = case.step.resident_state_bytes / case.total
    if share < 0.5:
        return None
    return min(0.9, share * 0.8), (
        f"parameters, main weights, gradients and optimizer states alone are {gib(case.step.resident_state_bytes)} by "
        f"the estimate, of the card's {gib(case.total)}"
    )


SIGNS: tuple[tuple[str, Callable[[Case], Sign | None]], ...] = (
    ("corrupt_shape", _absurd),
    ("fragmentation", _unallocated),
    ("fragmentation", _free),
    ("fragmentation", _pressure),
    ("fragmentation", _growing_reserve),
    ("leak", _growing_allocation),
    ("other_process", _other_process),
    ("memory_cap", _cap),
    ("outside_pool", _outside),
    ("cuda_graphs", _graphs),
    ("gradient_accumulation", _no_sync),
    ("logits", _site("logits", 0.65, "the output layer or the cross entropy")),
    ("unfused_attention", _site("unfused_attention", 0.7, "unfused attention", 3)),
    ("fp8_copies", _site("fp8", 0.55, "FP8 quantization")),
    ("fsdp_buffers", _site("fsdp_gather", 0.65, "gathering parameters")),
    ("fsdp_buffers", _site("gradient_buckets", 0.55, "reducing gradients")),
    ("optimizer_first_step", _site("optimizer_states", 0.45, "creating optimizer states", 3)),
    ("optimizer_temporaries", _site("optimizer_temporaries", 0.3, "the optimizer's arithmetic")),
    ("activations", _site("recompute", 0.3, "recomputation", 3)),
    ("activations", _site("attention", 0.45, "attention")),
    ("activations", _site("mlp", 0.45, "the MLP")),
    ("activations", _site("layers", 0.4, "a transformer layer")),
    ("activations", _phase(("backward",), 0.25, "it failed in the backward pass")),
    ("activations", _phase(("forward",), 0.2, "it failed in the forward pass")),
    ("moe_imbalance", _site("moe", 0.4, "the experts")),
    ("moe_imbalance", _late_moe),
    ("optimizer_first_step", _first_step),
    ("optimizer_temporaries", _later_step),
    ("model_build", _phase(("model_build",), 0.8, "it failed while the model was built")),
    ("model_build", _phase(("optimizer_build",), 0.65, "it failed while the optimizer was built")),
    ("checkpoint_load", _phase(("checkpoint_load",), 0.85, "it failed while a checkpoint was loaded")),
    ("checkpoint_save", _phase(("checkpoint_save",), 0.8, "it failed while a checkpoint was saved")),
    ("evaluation", _phase(("evaluation",), 0.8, "it failed in evaluation")),
    ("longest_sample", _late),
    ("pipeline_imbalance", _stage),
    ("model_states", _states),
)
"""Cause, sign. Evaluated for failures of the GPU's memory; for others the kind alone speaks."""

MEMORY = ("gpu", "gpu_driver", "corrupt")


def rank_causes(case: Case) -> tuple[Cause, ...]:
    """All causes with something that speaks for them, the likeliest first."""
    signs: dict[str, list[Sign]] = {}
    own = _kind(case)
    if own is not None:
        signs[case.first.kind.cause] = [own]
    if case.first.kind.place in MEMORY:
        for cause, sign in SIGNS:
            found = sign(case)
            if found is not None:
                signs.setdefault(cause, []).append(found)
        for cause, found in (*_matches(case), *_shares(case)):
            signs.setdefault(cause, []).append(found)
        _weigh_expandable(case, signs)
    causes = [Cause(cause, _combine(found), "; ".join(text for _, text in found)) for cause, found in signs.items()]
    order = {cause: n for n, (cause, _) in reversed(list(enumerate(SIGNS)))}
    causes.sort(key=lambda c: (-round(c.confidence, 6), order.get(c.cause, len(SIGNS))))
    return tuple(c for c in causes if c.confidence >= LEAST)


def _combine(signs: Sequence[Sign]) -> float:
    left = 1.0
    for weight, _ in signs:
        left *= 1 - weight
    return min(MOST, 1 - left)


def _matches(case: Case) -> list[tuple[str, Sign]]:
    """The first match of each cause; several causes that match share what the match is worth."""
    first: dict[str, Any] = {}
    for match in case.matches:
        first.setdefault(match.cause, match)
    fitting = [m for m in first.values() if m.fits_phase] or list(first.values())
    worth = 0.75 if len(fitting) < 2 else 0.75 / len(fitting) + 0.1
    requested = case.requested or 0
    return [
        (m.cause, (worth, f"the {gib(requested)} asked for are the size of {m.words()}, within {m.difference:.1%}"))
        for m in fitting
    ]


def _shares(case: Case) -> list[tuple[str, Sign]]:
    """What fills the card at that moment by the estimate; weak, because it is there whatever failed."""
    peak = sum(case.components.values())
    if not peak:
        return []
    by_cause: dict[str, int] = {}
    for name, size in case.components.items():
        cause = "model_states" if name in components.STATES else cause_of_component(name)
        if cause is not None:
            by_cause[cause] = by_cause.get(cause, 0) + size
    return [
        (cause, (0.4 * size / peak, f"{gib(size)} of the {gib(peak)} at that moment by the estimate"))
        for cause, size in by_cause.items()
        if size > 0.1 * peak
    ]


def _weigh_expandable(case: Case, signs: dict[str, list[Sign]]) -> None:
    """With expandable segments on, memory in pieces is rarely the cause, whatever the message still advises."""
    fact = case.evidence.fact("allocator_setting")
    on = (fact is not None and fact.value == "expandable_segments") or (
        case.settings is not None and case.settings.runtime.expandable_segments
    )
    if on and "fragmentation" in signs:
        signs["fragmentation"] = [
            (w * 0.4, f"{text} (expandable segments are on)") for w, text in signs["fragmentation"]
        ]
