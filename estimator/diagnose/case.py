"""What is known about one failure, put together: the text's numbers, the job's timeline, the tensors that match."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from estimator.cluster import Cluster
from estimator.diagnose.evidence import Evidence, Failure
from estimator.diagnose.fingerprint import Match
from estimator.job.settings import Settings
from estimator.step.compose import StepTimeline
from estimator.timeline import PhaseResult

FIRST = ("first_forward_backward", "first_optimizer_step")
PHASES = {
    "model_build": ("model_build",),
    "optimizer_build": ("optimizer_build",),
    "forward": ("first_forward_backward", "steady_forward_backward"),
    "backward": ("first_forward_backward", "steady_forward_backward"),
    "gradient_reduction": ("first_forward_backward", "steady_forward_backward"),
    "optimizer_step": ("first_optimizer_step", "steady_optimizer_step"),
}
"""Phase of a traceback -> phases of the timeline, the first iteration's before the later ones'."""


@dataclass(frozen=True, slots=True)
class Case:
    """``settings`` and ``step`` are None when the job is not known well enough to be estimated."""

    evidence: Evidence
    first: Failure
    cluster: Cluster | None = None
    settings: Settings | None = None
    step: StepTimeline | None = None
    pipeline_rank: int | None = None
    matches: tuple[Match, ...] = ()
    components: Mapping[str, int] = field(default_factory=dict)
    """Live bytes by component at the peak of the phase that failed."""

    def value(self, name: str) -> int | None:
        return self.first.value(name)

    @property
    def requested(self) -> int | None:
        return self.first.value("requested_bytes")

    @property
    def total(self) -> int | None:
        own = self.first.value("total_bytes")
        return own if own is not None else (self.cluster.total_bytes if self.cluster else None)

    @property
    def allocated(self) -> int | None:
        return self.first.value("allocated_bytes")

    @property
    def unallocated(self) -> int | None:
        """Reserved by PyTorch, but not allocated."""
        own = self.first.value("unallocated_bytes")
        reserved, allocated = self.first.value("reserved_bytes"), self.allocated
        if own is None and reserved is not None and allocated is not None:
            return max(0, reserved - allocated)
        return own

    @property
    def reserved(self) -> int | None:
        own, allocated, unallocated = (
            self.first.value("reserved_bytes"),
            self.allocated,
            self.first.value("unallocated_bytes"),
        )
        if own is None and allocated is not None and unallocated is not None:
            return allocated + unallocated
        return own

    @property
    def others(self) -> int | None:
        """Bytes that other processes hold on the card; None if the text does not say."""
        named = [f.value for f in self.first.facts if f.name == "other_process_bytes" and isinstance(f.value, int)]
        total, free, process = (
            self.first.value("total_bytes"),
            self.first.value("free_bytes"),
            self.value("process_bytes"),
        )
        if process is not None and total is not None and free is not None:
            return max(sum(named), total - free - process)
        reserved = self.reserved
        if (
            named
            and reserved is not None
            and process is None
            and len(named) == 1
            and abs(named[0] - reserved) < named[0] // 20
        ):
            return None  # the one process named is this one, seen from inside a container
        return sum(named) if named else None

    @property
    def is_first_iteration(self) -> bool:
        return not self.first.iteration

    @property
    def timeline_phase(self) -> PhaseResult | None:
        """The phase of the timeline in which it failed; the highest of all where the text does not say."""
        if self.step is None:
            return None
        phases = {phase.name: phase for phase in self.step.timeline.phases()}
        names = PHASES.get(self.first.phase or "")
        if names:
            name = names[0] if self.is_first_iteration else names[-1]
            return phases.get(name)
        return max(phases.values(), key=lambda phase: phase.peak_bytes)
