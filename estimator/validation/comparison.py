"""One record beside the estimate of the same rank: bytes measured and predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from estimator.job.settings import Settings
from estimator.profiling.job import ProfileJob, job_from_dict
from estimator.profiling.record import phase_of
from estimator.step import step_timeline
from estimator.survival import peak_reserved_bytes, survival_bytes
from estimator.timeline import PhaseResult, Timeline

COMPARED_PHASES = ("first_forward_backward", "first_optimizer_step", "steady_forward_backward", "steady_optimizer_step")
BUILD_PHASES = {"model_build": ("model_build", "wrap"), "optimizer_build": ("optimizer_build",)}
"""The profiler measures the wrapping of the model as a phase of its own."""

_FAMILY_BY_CAPABILITY = {"8": "ampere", "9": "hopper", "10": "blackwell", "12": "blackwell"}


@dataclass(frozen=True, slots=True)
class Row:
    """Measured and predicted bytes of one run; ``refused`` says why there is no prediction."""

    run_id: str
    tags: tuple[str, ...]
    strategy: str
    refused: str | None = None
    measured: dict[str, int] = field(default_factory=dict)
    predicted: dict[str, int] = field(default_factory=dict)
    components_at_peak: dict[str, int] = field(default_factory=dict)
    phase_errors: dict[str, float] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    """Groups of a summary beside the strategy."""

    def error(self, quantity: str) -> float:
        """Predicted over measured, less one."""
        return self.predicted[quantity] / self.measured[quantity] - 1


_NOT_MODELLED: tuple[tuple[str, Callable[[ProfileJob], object]], ...] = (
    ("model.transformer_impl", lambda job: job.settings.model.transformer_impl != "transformer_engine"),
    ("model.attention_backend", lambda job: job.settings.model.attention_backend in ("unfused", "local")),
    ("model.params_dtype", lambda job: job.settings.runtime.params_dtype != "bfloat16"),
    ("dist.use_torch_fsdp2", lambda job: job.settings.sharding.strategy == "torch_fsdp2"),
    (
        "fields beyond the estimate's settings",
        lambda job: job.extra_transformer_config or job.extra_ddp_config or job.extra_optimizer_config,
    ),
)


def pipeline_rank_of(settings: Settings, rank: int) -> int:
    """Stage of a global rank in Megatron's default order tp-cp-ep-dp-pp: pipeline varies last."""
    return rank * settings.parallel.pipeline_model_parallel_size // settings.parallel.world_size


def compare_record(record: Mapping[str, Any], with_survival: bool = False) -> Row:
    """``with_survival``: predict "survival", too, which takes longer.

    Raises ValueError naming the field if the record's job cannot be read.
    """
    job = job_from_dict(record["job"])
    about = (str(record["run_id"]), job.tags, job.settings.sharding.strategy)
    if record["outcome"] != "ok":
        return Row(*about, refused=f"the run ended in: {record['outcome']}")
    for name, applies in _NOT_MODELLED:
        if applies(job):
            return Row(*about, refused=f"not modelled: {name}")
    family = _FAMILY_BY_CAPABILITY.get(str(record["gpu"]["compute_capability"]).partition(".")[0], "hopper")
    step = step_timeline(job.settings, pipeline_rank_of(job.settings, int(record["rank"])), family)
    phases = {phase.name: phase for phase in step.timeline.phases()}
    worst = max(phases.values(), key=lambda phase: phase.peak_bytes)
    return Row(
        *about,
        measured={
            "peak": record["peak_allocated_bytes"],
            "persistent": record["persistent_bytes"],
            "reserved": record["peak_reserved_bytes"],
        },
        predicted={
            "peak": worst.peak_bytes,
            "persistent": phases["steady_optimizer_step"].allocated_bytes,
            "reserved": peak_reserved_bytes(step.timeline, job.allocator),
            **(survival_of(step.timeline, job.allocator) if with_survival else {}),
        },
        components_at_peak=step.timeline.components_at_peak(worst),
        phase_errors=_phase_errors(record, phases),
    )


def survival_of(timeline: Timeline, allocator: str) -> dict[str, int]:
    return {"survival": survival_bytes(timeline, (allocator,))[allocator]}


def _phase_errors(record: Mapping[str, Any], phases: Mapping[str, PhaseResult]) -> dict[str, float]:
    """Error of each phase's peak."""
    errors = {}
    for name, parts in {**BUILD_PHASES, **{name: (name,) for name in COMPARED_PHASES}}.items():
        measured = [found["peak_allocated_bytes"] for part in parts if (found := phase_of(dict(record), part))]
        if measured and max(measured):
            errors[name] = phases[name].peak_bytes / max(measured) - 1
    return errors
