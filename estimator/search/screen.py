"""Which candidates are worth reading and estimating in full.

Three tests, each cheaper than the next, none of which can drop a candidate that fits: a lower bound on the peak; what
is known of more or less recompute of the same settings; the peak of the steady iteration of the heavier stage. More
recomputed layers never raise the peak by more than one hidden state, far below the steps in which the search varies
them (tests hold the search against exhaustive evaluation).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from estimator.cluster import Cluster
from estimator.job.settings import Settings
from estimator.overhead import overhead_of
from estimator.search.bound import lower_bound, stage_bound
from estimator.search.space import Point, Recompute, variant
from estimator.step import counted_peak
from estimator.verdict import judge


class Screen:
    """Remembers what it has seen; ``closest_bytes`` is the smallest need among the candidates it has tested."""

    def __init__(
        self, settings: Settings, cluster: Cluster, min_probability: float, candidates: Iterable[Point]
    ) -> None:
        self.settings, self.cluster, self.min_probability = settings, cluster, min_probability
        self.closest_bytes: int | None = None
        self.needs: dict[Point, tuple[int, bool]] = {}
        """Least bytes that a candidate needs, and whether that passed, of those whose steady iteration was counted."""
        self.calibration = cluster.calibration(settings.stack)
        self.work = 0
        """What has been counted so far, in the units of the counter."""
        self._known: dict[Point, bool] = {}
        self._ladders: dict[Point, list[Point]] = {}
        for point in candidates:
            if _rung(point.recompute) is not None:
                self._ladders.setdefault(_without_recompute(point), []).append(point)
        for ladder in self._ladders.values():
            ladder.sort(key=lambda p: _rung(p.recompute) or 0)

    def passes(self, point: Point) -> bool:
        """Whether the candidate may fit."""
        if point not in self._known:
            self._learn(point, self._test(point))
            ladder = self._ladders.get(_without_recompute(point), [])
            tried_twice = point in ladder and point != ladder[0]
            if not self._known[point] and tried_twice and ladder[-1] not in self._known:
                self._learn(ladder[-1], self._test(ladder[-1]))
        return self._known[point]

    def _learn(self, point: Point, passed: bool) -> None:
        """What passes, passes with more recompute; what fails, fails with less."""
        self._known[point] = passed
        ladder = self._ladders.get(_without_recompute(point), [])
        if point not in ladder:
            return
        place = ladder.index(point)
        for other in ladder[place:] if passed else ladder[:place]:
            self._known[other] = passed

    def _test(self, point: Point) -> bool:
        trial = variant(self.settings, point)
        overhead = overhead_of(trial, self.calibration)
        limit = self.cluster.memory_limit_bytes
        errors = self.calibration.survival_errors(trial.sharding.strategy, trial.runtime.allocator)

        def may_fit(least_bytes: int) -> bool:
            """The survival memory is never below a bound on the peak, nor below the peak."""
            room = self.cluster.usable_bytes
            return judge(
                least_bytes, overhead.total_bytes, overhead.sigma_bytes, room, limit, self.min_probability, errors
            ).fits

        bound = self._corrected(lower_bound(trial))
        if not may_fit(bound):
            self._note(bound + overhead.total_bytes)
            return False
        counted, work = counted_peak(trial, _heaviest_stage(trial), self.cluster.gpu.family)
        peak = self._corrected(counted)
        self.work += work
        self._note(peak + overhead.total_bytes)
        passed = may_fit(peak)
        self.needs[point] = peak + overhead.total_bytes, passed
        return passed

    def _corrected(self, num_bytes: int) -> int:
        """The least that a calibrated estimate makes of it."""
        factor, constant = self.calibration.least_factor()
        return int(num_bytes * factor) + constant

    def _note(self, required: int) -> None:
        if self.closest_bytes is None or required < self.closest_bytes:
            self.closest_bytes = required


def _rung(recompute: Recompute) -> int | None:
    """How much is recomputed, on the ladder nothing, n layers, all layers; None for what is beside it."""
    if recompute.granularity is None:
        return 0
    if recompute.granularity != "full":
        return None
    return recompute.layers if recompute.method == "block" else 1 << 20


def _without_recompute(point: Point) -> Point:
    return replace(point, recompute=Recompute(None))


def _heaviest_stage(settings: Settings) -> int:
    """The first stage has most microbatches in flight, the last one the loss: the one with the higher bound."""
    stages = settings.parallel.pipeline_model_parallel_size
    return 0 if stages == 1 or stage_bound(settings, 0) >= stage_bound(settings, stages - 1) else stages - 1
