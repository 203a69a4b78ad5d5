"""The search: candidates in the order of what they cost, estimated until enough of them fit.

"Cheaper" is DESIGN's order: (a) no checkpoint conversion before conversion, if the job resumes or loads; (b) the same
GPUs; (c) predicted step time, ties within 1 %; (d) fewer changes. Candidates whose lower bound exceeds the card are
left
out unestimated, which cannot remove one that fits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from estimator.changes import Change, apply_changes
from estimator.cluster import Cluster
from estimator.errors import NotModelled
from estimator.estimate import Estimate, estimate
from estimator.job.settings import Settings, Stack
from estimator.layout import stage_shares
from estimator.reading import ReadJob, read_values
from estimator.search.changes import point_changes
from estimator.search.cost import step_cost
from estimator.search.screen import Screen
from estimator.search.space import FSDP, Point, current_point, points, variant

MAX_ESTIMATES = 60
"""Candidates estimated at most; the answer says so if the search ends there."""
MAX_WORK = 1_000_000
"""What the screen may count, about four seconds: large mixtures of experts have thousands of weights a stage."""
TIE = 0.01


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate that fits: what changes, what it then needs, what it costs."""

    point: Point
    changes: tuple[Change, ...]
    job: ReadJob
    estimate: Estimate
    relative_step_time: float
    cost_terms: dict[str, float]
    conversion_needed: bool


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A point of the Pareto front. ``fits`` None: its allocator was not simulated, ``need_bytes`` is a lower bound."""

    point: Point
    need_bytes: int
    relative_step_time: float
    fits: bool | None


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Candidates that fit, cheapest first; the closest miss if there are none."""

    fitting: tuple[Candidate, ...]
    closest_bytes: int | None
    """Smallest required_bytes seen among candidates (estimated, or bounded from below)."""
    num_candidates: int
    num_estimated: int
    exhausted: bool
    """False if the search stopped at MAX_ESTIMATES."""
    front: tuple[FrontPoint, ...] = ()
    """Memory against step time of the candidates that were looked at: those that no other beats in both."""


def resumes(effective: Mapping[str, Any]) -> bool:
    """Whether the job loads a checkpoint of its own or of another run."""
    checkpoint = effective.get("checkpoint") or {}
    return checkpoint.get("load") is not None or checkpoint.get("pretrained_checkpoint") is not None


def search(
    job: ReadJob,
    cluster: Cluster,
    stack: Stack,
    allow: Collection[str],
    min_probability: float,
    wanted: int,
    prefer: Collection[str] = (),
) -> SearchResult:
    """Candidates of the job that fit, no two of one kind (strategy, layout, kind of recompute). ``prefer``: families
    that come first among equally fast candidates, because evidence speaks for them.

    Step times are relative to the job's own; where that cannot be laid out, to the fastest candidate's.
    """
    settings = job.settings
    now = current_point(settings)
    candidates = list(points(settings, cluster.gpus_per_node, allow))
    if not job.laid_out:
        candidates.remove(now)
        candidates = [point for point in candidates if _can_be_split(job.settings, point)]
    if not candidates:
        return SearchResult((), None, 0, 0, True)
    cost = step_cost(settings, candidates, cluster.gpu, cluster.gpus_per_node)
    reference = float(cost.total[0] if job.laid_out else cost.total.min())
    relative = cost.total / reference
    order = _order(candidates, relative, now, resumes(job.effective.values), prefer)
    screen = Screen(settings, cluster, min_probability, candidates)
    shows_fsdp = any(p.strategy in FSDP for p in candidates)
    fitting: list[Candidate] = []
    exact: dict[Point, tuple[int, bool]] = {}
    kinds: set[tuple[object, ...]] = set()
    ratios: dict[str, dict[str, float]] = {}
    estimated = 0
    exhausted = True
    for index in order:
        point = candidates[index]
        if point == now and not job.errors:
            continue
        if len(fitting) >= wanted and not shows_fsdp:
            break
        kind = (point.strategy, point.tensor, point.pipeline, point.context, point.recompute.granularity)
        if kind in kinds or (len(fitting) >= wanted and not _missing_fsdp(fitting, point)):
            continue
        if not screen.passes(point):
            exhausted &= screen.work <= MAX_WORK
            if exhausted:
                continue
            break
        if estimated >= MAX_ESTIMATES or screen.work > MAX_WORK:
            exhausted = False
            break
        # The allocator is simulated once a strategy: with expandable segments the ratio moves by less than the
        # verdict's own error; with the default allocator it does not hold, and every candidate is simulated.
        known = ratios.get(point.strategy) if fitting and point.expandable_segments else None
        found = _evaluate(job, point, now, cluster, stack, min_probability, known)
        if found is None:
            continue
        estimated += 1
        changes, changed, result = found
        ratios.setdefault(point.strategy, result.survival_ratios)
        exact[point] = result.required_bytes(), result.verdict.fits
        if not result.verdict.fits:
            continue
        kinds.add(kind)
        terms = {name: round(float(values[index]) / reference, 4) for name, values in cost.terms.items()}
        conversion = _needs_conversion(point, now)
        fitting.append(Candidate(point, changes, changed, result, float(relative[index]), terms, conversion))
    times = {point: float(relative[i]) for i, point in enumerate(candidates)}
    front = _front(screen.needs, exact, times)
    return SearchResult(tuple(fitting), screen.closest_bytes, len(candidates), estimated, exhausted, front)


MAX_FRONT = 20


def _front(
    needs: Mapping[Point, tuple[int, bool]], exact: Mapping[Point, tuple[int, bool]], times: Mapping[Point, float]
) -> tuple[FrontPoint, ...]:
    """By step time; each next one needs less memory."""
    known: dict[Point, tuple[int, bool | None]] = {
        p: (n, None if passed else False) for p, (n, passed) in needs.items()
    }
    known |= exact
    front: list[FrontPoint] = []
    for point in sorted(known, key=lambda p: (times[p], known[p][0])):
        need, fits = known[point]
        if not front or need < front[-1].need_bytes:
            front.append(FrontPoint(point, need, times[point], fits))
    return tuple(front[:MAX_FRONT])


def _can_be_split(settings: Settings, point: Point) -> bool:
    """Whether Megatron-Core can deal the layers out: a layout kept from a job that cannot be laid out may not."""
    trial = variant(settings, point)
    try:
        stage_shares(trial.model, trial.parallel)
    except ValueError:
        return False
    return True


def _missing_fsdp(fitting: list[Candidate], point: Point) -> bool:
    """Whether FSDP is still to be shown beside enough cheaper candidates."""
    return point.strategy in FSDP and not any(c.point.strategy in FSDP for c in fitting)


def _needs_conversion(point: Point, now: Point) -> bool:
    return (point.strategy in FSDP) != (now.strategy in FSDP)


def _num_changes(point: Point, now: Point) -> int:
    return sum(getattr(point, name) != getattr(now, name) for name in Point.__dataclass_fields__)


_FAMILY_OF = {
    "strategy": "dp_strategy",
    "micro_batch_size": "micro_batch",
    "recompute": "recompute",
    "tensor": "layout",
    "pipeline": "layout",
    "context": "layout",
    "cross_entropy_te": "cross_entropy",
    "small_communication_unit": "fsdp_buffers",
    "expandable_segments": "allocator",
}


def _is_preferred(point: Point, now: Point, prefer: Collection[str]) -> bool:
    """Whether the candidate changes nothing but families that are preferred."""
    changed = {family for name, family in _FAMILY_OF.items() if getattr(point, name) != getattr(now, name)}
    return bool(changed) and changed <= set(prefer)


def _order(
    candidates: list[Point], relative: np.ndarray, now: Point, loads: bool, prefer: Collection[str] = ()
) -> list[int]:
    """Indices, cheapest first. Candidates within 1 % of the fastest of their tie count as equally fast: among them
    those that evidence speaks for, then those with fewer changes."""
    order: list[int] = []
    groups: dict[bool, list[int]] = {}
    for i, point in enumerate(candidates):
        groups.setdefault(loads and _needs_conversion(point, now), []).append(i)
    for _, members in sorted(groups.items()):
        members.sort(key=lambda i: float(relative[i]))
        start = 0
        while start < len(members):
            stop = start
            limit = float(relative[members[start]]) * (1 + TIE)
            while stop < len(members) and float(relative[members[stop]]) <= limit:
                stop += 1
            tie = members[start:stop]
            tie.sort(
                key=lambda i: (
                    not _is_preferred(candidates[i], now, prefer),
                    _num_changes(candidates[i], now),
                    float(relative[i]),
                )
            )
            order += tie
            start = stop
    return order


def _evaluate(
    job: ReadJob,
    point: Point,
    now: Point,
    cluster: Cluster,
    stack: Stack,
    min_probability: float,
    ratios: dict[str, float] | None,
) -> tuple[tuple[Change, ...], ReadJob, Estimate] | None:
    """The candidate as the override would make it, or None if a rule forbids it."""
    changes = point_changes(point, now, job.document.values, job.effective.values, cluster, stack)
    values = apply_changes(job.document.values, changes)
    try:
        changed = read_values(values, job.document, cluster, stack, job.moe_load_imbalance)
    except NotModelled:
        return None
    if changed.errors or not changed.laid_out:
        return None
    result = estimate(
        changed.settings, cluster, min_probability, exact_ranks=1, both_settings=False, survival_ratios=ratios
    )
    return changes, changed, result
