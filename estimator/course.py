"""The course of memory over a rank's timeline, thinned out to what a picture needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from estimator.allocator import compile_ops, replay
from estimator.survival import SETTINGS
from estimator.timeline import EMPTY_CACHE_OP, Block, Timeline

MAX_POINTS = 2000
TOP_COMPONENTS = 5


def course(timeline: Timeline, setting: str, max_points: int = 400) -> list[dict[str, Any]]:
    """Points in order of time: allocated bytes at the highest moment of each stretch, reserved bytes up to then.

    ``event`` counts allocations and frees since the start; ``components`` are the largest alive at that moment. The
    highest point of every phase is among them. ``setting``: of the allocator, one of ``estimator.survival.SETTINGS``.
    """
    if not 2 <= max_points <= MAX_POINTS:
        raise ValueError(f"max_points is from 2 to {MAX_POINTS}")
    chosen = _chosen(timeline, max_points)
    reserved = replay(compile_ops(timeline), SETTINGS[setting], keep_course=True).reserved_bytes
    points = []
    totals: dict[str, int] = {}
    event = 0
    for phase, index, block in _entries(timeline):
        if index in chosen:
            alive = dict(totals)
            for op in block.ops[: block.peak_index]:
                alive[op.component] = alive.get(op.component, 0) + op.num_bytes
            at = event + _events(block, block.peak_index)
            points.append(
                {
                    "event": at,
                    "phase": phase,
                    "allocated_bytes": sum(alive.values()),
                    "reserved_bytes": int(reserved[max(0, min(at, len(reserved)) - 1)]) if len(reserved) else 0,
                    "components": dict(sorted(alive.items(), key=lambda item: -item[1])[:TOP_COMPONENTS]),
                }
            )
        for op in block.ops:
            if op.num_bytes:
                totals[op.component] = totals.get(op.component, 0) + op.num_bytes
        event += _events(block, len(block.ops))
    return points


def _entries(timeline: Timeline) -> Iterator[tuple[str, int, Block]]:
    for phase, start, stop in timeline.spans():
        for index in range(start, stop):
            yield phase, index, timeline.entries[index].block


def _events(block: Block, stop: int) -> int:
    """Events of the first ``stop`` ops: a rename is none."""
    return sum(1 for op in block.ops[:stop] if op.num_bytes or op.name == EMPTY_CACHE_OP)


def _chosen(timeline: Timeline, max_points: int) -> set[int]:
    """The highest entry of each of ``max_points`` less the phases' stretches, and of each phase."""
    heights = []
    running = 0
    for _, _, block in _entries(timeline):
        heights.append(running + block.peak)
        running += block.delta
    spans = [(start, stop) for _, start, stop in timeline.spans() if stop > start]
    chosen = {max(range(start, stop), key=heights.__getitem__) for start, stop in spans}
    stretches = max(1, max_points - len(chosen))
    width = -(-len(heights) // stretches)
    for start in range(0, len(heights), width):
        chosen.add(max(range(start, min(start + width, len(heights))), key=heights.__getitem__))
    return chosen
