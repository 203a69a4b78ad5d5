"""The estimate of one job: peak, phases, components, ranks, survival memory and verdict."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from estimator import ESTIMATOR_VERSION, SCHEMA_VERSION
from estimator.calibration import Calibration, describe
from estimator.cluster import Cluster
from estimator.components import CALIBRATION
from estimator.errors import FieldProblem, JobError
from estimator.job.settings import Settings
from estimator.overhead import Overhead, overhead_of
from estimator.step import step_timeline
from estimator.survival import SETTINGS, survival_bytes
from estimator.timeline import PhaseResult, Timeline
from estimator.verdict import Verdict, judge

COVERAGES = (0.95, 0.99)
SCALED = "survival memory in the same ratio to the peak as the first of this strategy"


@dataclass(frozen=True, slots=True)
class RankEstimate:
    """Bytes of one pipeline rank (data-parallel rank 0)."""

    pipeline_rank: int
    phases: tuple[PhaseResult, ...]
    components_at_peak: dict[str, int]
    resident_state_bytes: int
    survival_bytes: dict[str, int]
    """By allocator setting; a setting that was not asked for is left out."""

    @property
    def peak(self) -> PhaseResult:
        return max(self.phases, key=lambda phase: phase.peak_bytes)

    @property
    def persistent_bytes(self) -> int:
        """Allocated when the optimizer step of the second iteration returns."""
        return next(p.allocated_bytes for p in self.phases if p.name == "steady_optimizer_step")


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a job needs on a card, and whether that fits."""

    settings: Settings
    ranks: tuple[RankEstimate, ...]
    chosen: int
    """Index in ``ranks`` of the rank that the figures are about: the worst, or the one asked for."""
    overhead: Overhead
    cluster: Cluster
    verdict: Verdict
    simulated: bool = True
    """Whether the allocator was simulated for this job, or its survival memory scaled from an alike one."""

    @property
    def rank(self) -> RankEstimate:
        return self.ranks[self.chosen]

    @property
    def calibration(self) -> Calibration:
        return self.cluster.calibration(self.settings.stack)

    def intervals(self) -> dict[str, dict[str, list[int]]]:
        """Central intervals of peak and survival memory by coverage, in bytes."""
        strategy, setting = self.settings.sharding.strategy, self.allocator_setting
        tables = {
            "peak_allocated_bytes": (self.rank.peak.peak_bytes, self.calibration.peak_errors(strategy)),
            "survival_bytes": (self.rank.survival_bytes[setting], self.calibration.survival_errors(strategy, setting)),
        }
        return {
            name: {str(c): [round(num_bytes * (1 + error)) for error in table.interval(c)] for c in COVERAGES}
            for name, (num_bytes, table) in tables.items()
        }

    @property
    def allocator_setting(self) -> str:
        return self.settings.runtime.allocator

    @property
    def survival_ratios(self) -> dict[str, float]:
        """Survival memory over peak of the chosen rank, by allocator setting."""
        return {name: n / self.rank.peak.peak_bytes for name, n in self.rank.survival_bytes.items()}

    def required_bytes(self, rank: RankEstimate | None = None) -> int:
        return (rank or self.rank).survival_bytes[self.allocator_setting] + self.overhead.total_bytes

    def verdict_at(self, survival: int, min_probability: float) -> Verdict:
        """The verdict if the job needed this much survival memory."""
        return _judged(self.settings, self.cluster, self.overhead, survival, min_probability)

    def as_dict(self) -> dict[str, Any]:
        """The answer of ``POST /estimate`` (without problems and the job's own assumptions)."""
        rank, peak = self.rank, self.rank.peak
        return {
            "schema_version": SCHEMA_VERSION,
            "estimator_version": ESTIMATOR_VERSION,
            "calibration_id": self.calibration.calibration_id,
            "peak_allocated_bytes": peak.peak_bytes,
            "persistent_bytes": rank.persistent_bytes,
            "resident_state_bytes": rank.resident_state_bytes,
            "peak_phase": peak.name,
            "peak_pipeline_rank": rank.pipeline_rank,
            "survival_bytes": {name: rank.survival_bytes.get(name) for name in SETTINGS},
            "allocator": {"setting": self.allocator_setting, "source": self.settings.runtime.allocator_source},
            "overhead_bytes": {"cuda_context": self.overhead.context_bytes, "nccl": self.overhead.nccl_bytes}
            | ({"dispatcher": self.overhead.dispatcher_bytes} if self.overhead.dispatcher_bytes else {}),
            "required_bytes": self.required_bytes(),
            "usable_bytes": self.cluster.usable_bytes,
            "memory_limit_bytes": self.cluster.memory_limit_bytes,
            "fits": self.verdict.fits,
            "fit_probability": round(self.verdict.probability, 6),
            "intervals": self.intervals(),
            "headroom_bytes": self.verdict.headroom_bytes,
            "phases": [
                {"name": p.name, "allocated_bytes": p.allocated_bytes, "peak_bytes": p.peak_bytes} for p in rank.phases
            ],
            "components_at_peak": dict(sorted(rank.components_at_peak.items(), key=lambda item: -item[1])),
            "ranks": [
                {
                    "pipeline_rank": r.pipeline_rank,
                    "peak_allocated_bytes": r.peak.peak_bytes,
                    "required_bytes": self.required_bytes(r),
                }
                for r in self.ranks
            ],
            "assumptions": self.assumptions(),
        }

    def _of_kinds(self) -> list[str]:
        """What is assumed of kinds of models that were not measured alone."""
        model = self.settings.model
        kinds = {"experts": model.moe, "latent attention": model.mla, "multi-token prediction": model.mtp_num_layers}
        found = [name for name, value in kinds.items() if value]
        notes = [f"{' and '.join(found)}: read from the source, held against three real runs"] if found else []
        if model.moe and self.settings.parallel.expert_model_parallel_size > 1:
            notes.append(
                f"the fullest rank's experts receive {self.settings.moe_load_imbalance:g} times the mean of tokens "
                "(moe_load_imbalance)"
            )
        return notes

    def assumptions(self) -> list[str]:
        names = ", ".join(self.overhead.communicators) or "none"
        scaled = [] if self.simulated else [SCALED]
        known = "as measured on such cards" if self.overhead.measured else "are priors, not measured on this cluster"
        return [
            *scaled,
            (
                f"CUDA context {self.overhead.context_bytes >> 20} MiB and NCCL {self.overhead.nccl_bytes >> 20} MiB "
                f"(communicators: {names}) {known}"
            ),
            *describe(self.calibration, self.settings.stack, self.cluster.gpu.family),
            "PYTORCH_CUDA_ALLOC_CONF sets nothing but expandable_segments; no other process shares the card",
            "gradient clipping is active in the step",
            f"{self.settings.num_microbatches} microbatches a step on each rank",
            *self._of_kinds(),
        ]


def _rank(
    settings: Settings, pipeline_rank: int, gpu_family: str, calibration: Calibration
) -> tuple[RankEstimate, Timeline]:
    """One rank without its survival memory, which takes longer than all the rest."""
    step = step_timeline(settings, pipeline_rank, gpu_family)
    phases = step.timeline.phases()
    peak = max(phases, key=lambda phase: phase.peak_bytes)
    components = step.timeline.components_at_peak(peak)
    correction = calibration.correction_bytes(components)
    if correction:
        components = {**components, CALIBRATION: correction}
        phases = tuple(_corrected(phase, correction / peak.peak_bytes) for phase in phases)
    rank = RankEstimate(pipeline_rank, phases, components, step.resident_state_bytes, survival_bytes={})
    return rank, step.timeline


def _corrected(phase: PhaseResult, relative: float) -> PhaseResult:
    """Other moments in proportion: the correction is fitted to the peak."""
    return phase._replace(
        allocated_bytes=round(phase.allocated_bytes * (1 + relative)),
        peak_bytes=round(phase.peak_bytes * (1 + relative)),
    )


def _with_survival(
    ranks: list[tuple[RankEstimate, Timeline]],
    exact: int,
    names: tuple[str, ...],
    given: dict[str, float] | None,
) -> tuple[RankEstimate, ...]:
    """Survival memory of the ``exact`` ranks with the highest peaks; of the others by the same ratio to their peak.

    ``given``: ratios to use for all of them instead of a simulation.
    """
    heaviest = sorted(range(len(ranks)), key=lambda i: -ranks[i][0].peak.peak_bytes)
    found: dict[int, dict[str, int]] = {}
    ratios = given
    if ratios is None:
        found = {
            i: {
                name: num_bytes + ranks[i][0].components_at_peak.get(CALIBRATION, 0)
                for name, num_bytes in survival_bytes(ranks[i][1], names).items()
            }
            for i in heaviest[:exact]
        }
        reference = heaviest[0]
        ratios = {name: n / ranks[reference][0].peak.peak_bytes for name, n in found[reference].items()}
    return tuple(
        replace(
            rank,
            survival_bytes=found.get(i) or {name: int(r * rank.peak.peak_bytes) for name, r in ratios.items()},
        )
        for i, (rank, _) in enumerate(ranks)
    )


def estimate(
    settings: Settings,
    cluster: Cluster,
    min_probability: float = 0.99,
    pipeline_rank: int | None = None,
    exact_ranks: int = 2,
    both_settings: bool = True,
    survival_ratios: dict[str, float] | None = None,
) -> Estimate:
    """Estimate every pipeline rank; the figures are of the worst by required bytes, or of ``pipeline_rank``.

    ``exact_ranks``: of how many ranks the allocator is simulated, those with the highest peaks (and ``pipeline_rank``).
    ``survival_ratios``: survival memory over peak by allocator setting, from an alike job, instead of a simulation.
    ``both_settings``: survival memory under the setting that the job does not have, too.

    Raises JobError if ``pipeline_rank`` is not a rank of the job, ValueError if its layers cannot be split.
    """
    stages = settings.parallel.pipeline_model_parallel_size
    if pipeline_rank is not None and not 0 <= pipeline_rank < stages:
        message = f"the job has no pipeline rank {pipeline_rank}"
        raise JobError([FieldProblem("pipeline_rank", message, f"0 to {stages - 1}")])
    setting = settings.runtime.allocator
    calibration = cluster.calibration(settings.stack)
    timelines = [_rank(settings, rank, cluster.gpu.family, calibration) for rank in range(stages)]
    names = tuple(SETTINGS) if both_settings else (setting,)
    ranks = _with_survival(timelines, stages if pipeline_rank is not None else exact_ranks, names, survival_ratios)
    overhead = overhead_of(settings, calibration)
    if pipeline_rank is None:
        chosen = max(range(stages), key=lambda i: ranks[i].survival_bytes[setting])
    else:
        chosen = pipeline_rank
    survival = ranks[chosen].survival_bytes[setting]
    verdict = _judged(settings, cluster, overhead, survival, min_probability)
    return Estimate(settings, ranks, chosen, overhead, cluster, verdict, survival_ratios is None)


def _judged(settings: Settings, cluster: Cluster, overhead: Overhead, survival: int, min_probability: float) -> Verdict:
    errors = cluster.calibration(settings.stack).survival_errors(settings.sharding.strategy, settings.runtime.allocator)
    return judge(
        survival,
        overhead.total_bytes,
        overhead.sigma_bytes,
        cluster.usable_bytes,
        cluster.memory_limit_bytes,
        min_probability,
        errors,
    )
