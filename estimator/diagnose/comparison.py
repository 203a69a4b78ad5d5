"""Prediction beside observation: what the estimate says for that rank and phase, and what the text says.

An allocation that failed shows a lower bound of the peak (allocated + requested); a memory report of a healthy step
shows the peak itself. A gap over 5 % is explained by the change of one setting that would close it, and asked about.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from estimator.diagnose.case import PHASES, Case
from estimator.diagnose.causes import gib
from estimator.diagnose.evidence import Reading
from estimator.job.settings import Settings
from estimator.step import step_timeline

GAP = 0.05
CLOSES = 0.02
"""A hypothesis explains a gap if it brings prediction and observation this close."""
MAX_COMPARISONS = 8


@dataclass(frozen=True, slots=True)
class Comparison:
    """One observed number beside the predicted one. ``is_lower_bound``: the true value is at least the observed."""

    quantity: str
    phase: str
    pipeline_rank: int
    observed_bytes: int
    predicted_bytes: int
    line: int
    is_lower_bound: bool
    explanation: str = ""
    question: str = ""

    @property
    def gap_bytes(self) -> int:
        return self.observed_bytes - self.predicted_bytes

    @property
    def is_gap(self) -> bool:
        share = self.gap_bytes / max(1, self.predicted_bytes)
        return share > GAP or (share < -GAP and not self.is_lower_bound)

    def as_dict(self) -> dict[str, Any]:
        return {
            "quantity": self.quantity,
            "phase": self.phase,
            "pipeline_rank": self.pipeline_rank,
            "observed_bytes": self.observed_bytes,
            "predicted_bytes": self.predicted_bytes,
            "gap_bytes": self.gap_bytes,
            "is_lower_bound": self.is_lower_bound,
            "line": self.line,
            "explanation": self.explanation,
            "question": self.question,
        }


def compare(case: Case) -> tuple[Comparison, ...]:
    """Empty when the job is not known. Hypotheses are tried for the first gap only."""
    if case.step is None or case.settings is None or case.pipeline_rank is None:
        return ()
    found = list(_observations(case))[:MAX_COMPARISONS]
    asked = False
    result = []
    for comparison in found:
        words = ("", "")
        if comparison.is_gap:
            words = ("the same gap as above", "") if asked else _explain(case, comparison)
            asked = True
        elif comparison.is_lower_bound and comparison.gap_bytes < 0:
            words = (f"it failed {gib(-comparison.gap_bytes)} before the predicted peak of this phase", "")
        result.append(replace(comparison, explanation=words[0], question=words[1]))
    return tuple(result)


def _observations(case: Case) -> Iterator[Comparison]:
    if case.step is None or case.pipeline_rank is None:
        return
    phase = case.timeline_phase
    allocated, requested = case.allocated, case.requested
    if phase is not None and allocated is not None and case.first.phase in (None, *PHASES):
        line = case.first.span.line
        observed = allocated + (requested or 0)
        yield Comparison("peak_bytes", phase.name, case.pipeline_rank, observed, phase.peak_bytes, line, True)
    phases = {p.name: p for p in case.step.timeline.phases()}
    for reading in case.evidence.readings:
        if _stage_of(case, reading.rank) != case.pipeline_rank or reading.source not in (
            "megatron",
            "bridge",
            "deepspeed",
        ):
            continue
        yield from _of_reading(case, reading, {name: (p.allocated_bytes, p.peak_bytes) for name, p in phases.items()})


def _of_reading(case: Case, reading: Reading, phases: dict[str, tuple[int, int]]) -> Iterator[Comparison]:
    if case.pipeline_rank is None:
        return
    first = reading.iteration is not None and reading.iteration <= 1
    step = "first_optimizer_step" if first else "steady_optimizer_step"
    seen = [name for name in phases if not (first and name.startswith("steady_"))]
    line = reading.facts[0].span.line
    held, peak = reading.value("allocated_bytes"), reading.value("max_allocated_bytes")
    if held is not None and step in phases:
        yield Comparison("allocated_bytes", step, case.pipeline_rank, held, phases[step][0], line, False)
    if peak is not None and seen:
        top = max(seen, key=lambda name: phases[name][1])
        yield Comparison("max_allocated_bytes", top, case.pipeline_rank, peak, phases[top][1], line, False)


def _stage_of(case: Case, rank: int | None) -> int | None:
    if rank is None or case.settings is None or case.cluster is None:
        return case.pipeline_rank
    return stage_of_rank(rank, case.settings, case.cluster.num_gpus)


def stage_of_rank(rank: int, settings: Settings, num_gpus: int) -> int:
    """Pipeline stage of a global rank in Megatron's order tp-cp-ep-dp-pp (the last changes slowest)."""
    stages = settings.parallel.pipeline_model_parallel_size
    return min(stages - 1, max(0, rank) // max(1, num_gpus // stages))


def _hypotheses(settings: Settings) -> Iterator[tuple[str, str, Settings]]:
    """(field, value in words, the settings it would be)."""
    model, batch, recompute = settings.model, settings.batch, settings.recompute

    def with_sequence(size: int) -> tuple[str, str, Settings]:
        return "seq_length", str(size), replace(settings, model=replace(model, seq_length=size))

    def with_micro_batch(size: int) -> tuple[str, str, Settings]:
        larger = replace(batch, micro_batch_size=size, global_batch_size=max(size, batch.global_batch_size))
        return "micro_batch_size", str(size), replace(settings, batch=larger)

    for factor in (2, 4, 8):
        yield with_sequence(model.seq_length * factor)
        yield with_micro_batch(batch.micro_batch_size * factor)
    if recompute.recompute_granularity is not None:
        none = replace(recompute, recompute_granularity=None, recompute_method=None, recompute_num_layers=None)
        yield "recompute_granularity", "null", replace(settings, recompute=none)
    if model.seq_length >= 1024:
        yield with_sequence(model.seq_length // 2)
    if batch.micro_batch_size > 1:
        yield with_micro_batch(batch.micro_batch_size // 2)
    if settings.parallel.sequence_parallel:
        off = replace(settings.parallel, sequence_parallel=False)
        yield "sequence_parallel", "false", replace(settings, parallel=off)


def _current(settings: Settings, field: str) -> str:
    homes = {
        "seq_length": settings.model,
        "micro_batch_size": settings.batch,
        "recompute_granularity": settings.recompute,
        "sequence_parallel": settings.parallel,
    }
    return str(getattr(homes[field], field))


_WORDS = {
    "seq_length": "the sequence length",
    "micro_batch_size": "the micro batch size",
    "recompute_granularity": "recompute_granularity",
    "sequence_parallel": "sequence parallelism",
}


def _explain(case: Case, comparison: Comparison) -> tuple[str, str]:
    """(explanation, question). The question names the setting whose change would close the gap, if one does."""
    if case.settings is None or case.pipeline_rank is None:
        return "", ""
    settings = case.settings
    more = "more" if comparison.gap_bytes > 0 else "less"
    gap = f"the log shows {gib(abs(comparison.gap_bytes))} {more} than this configuration allocates"
    family = case.cluster.gpu.family if case.cluster else "hopper"
    best: tuple[float, str, str] | None = None
    for field, value, changed in _hypotheses(settings):
        try:
            phases = step_timeline(changed, case.pipeline_rank, family).timeline.phases()
        except (ValueError, ZeroDivisionError, KeyError, IndexError):
            continue
        predicted = next((p for p in phases if p.name == comparison.phase), None)
        if predicted is None:
            continue
        number = predicted.allocated_bytes if comparison.quantity == "allocated_bytes" else predicted.peak_bytes
        distance = abs(number - comparison.observed_bytes) / max(1, comparison.observed_bytes)
        if distance <= CLOSES and (best is None or distance < best[0]):
            best = (distance, field, value)
    if best is not None:
        _, field, value = best
        explanation = f"{gap}; {field} = {value} would allocate what it shows, within {best[0]:.1%}"
        return explanation, f"{gap}: is {_WORDS[field]} really {_current(settings, field)}?"
    likely = "is the sequence length really" if comparison.gap_bytes > 0 else "was the sequence length at most"
    return gap, f"{gap}: {likely} {settings.model.seq_length}, and is this the configuration of that run?"
