"""Replays a trace in the allocator model: reserved bytes, fragmentation, death at a limit, the memory that survives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from estimator.allocator import kernel
from estimator.allocator.compiled import Ints
from estimator.allocator.settings import AllocatorSettings
from estimator.allocator.trace import Trace
from estimator.timeline import STREAMS

GRID_BYTES = 2 << 20
"""Limits are looked for in steps of 2 MiB, the unit in which the driver gives memory."""


@dataclass(frozen=True, slots=True)
class Death:
    """Where a replay ran out of memory, with the numbers that PyTorch's error text shows.

    ``requested_bytes`` is the "Tried to allocate"; ``free_bytes`` the limit less ``reserved_bytes``; all of them after
    the cached blocks were given back.
    """

    event: int
    phase: str
    requested_bytes: int
    free_bytes: int
    reserved_bytes: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class Replay:
    """What the allocator reserved for a trace.

    ``peak_allocated_bytes`` is max_memory_allocated(): sizes of blocks in use, with the rest of a block that was not
    split. The fragmentation fields are taken when ``peak_reserved_bytes`` (max_memory_reserved()) is first reached.
    """

    peak_reserved_bytes: int
    peak_allocated_bytes: int
    peak_event: int
    unallocated_at_peak_bytes: int
    """Reserved but not allocated."""
    largest_free_block_bytes: int
    num_retries: int
    """Times that all cached blocks were given back to make room (num_alloc_retries)."""
    died: Death | None
    min_refused_bytes: int | None
    """The least total of reserved bytes that the limit refused: a higher limit below it changes nothing."""
    max_granted_bytes: int
    """The highest total that was tested against the limit and passed: a limit lowered to it changes nothing. With
    expandable segments it can exceed what came to be reserved, because all of a request is tested, also the part for
    which free memory is there."""
    reserved_bytes: Ints
    """After each event; empty unless asked for."""
    allocated_bytes: Ints


def _config(settings: AllocatorSettings, limit: int | None, device_cap: bool) -> Ints:
    config = np.zeros(kernel.NUM_CONFIG, dtype=np.int64)
    config[kernel.EXPANDABLE] = settings.expandable_segments
    config[kernel.MAX_SPLIT] = settings.max_split_size_bytes or kernel.NO_LIMIT
    config[kernel.MAX_NON_SPLIT] = settings.max_non_split_rounding_bytes
    config[kernel.LARGE_BUFFER] = settings.large_segment_bytes
    config[kernel.GC_MILLIONTHS] = round(settings.garbage_collection_threshold * 1e6)
    config[kernel.LIMIT] = kernel.NO_LIMIT if limit is None else limit
    config[kernel.DEVICE_CAP] = device_cap
    return config


def _rounded(sizes: Ints, settings: AllocatorSettings) -> Ints:
    if max(settings.roundup_power2_divisions) > 1:
        unique, inverse = np.unique(sizes, return_inverse=True)
        return np.array([settings.rounded(int(size)) for size in unique], dtype=np.int64)[inverse]
    return np.maximum(-(-sizes // 512), 1) * 512


def replay(
    trace: Trace,
    settings: AllocatorSettings,
    limit: int | None = None,
    *,
    device_cap: bool = False,
    keep_course: bool = False,
) -> Replay:
    """Replays ``trace`` with at most ``limit`` bytes reserved.

    The limit acts as set_per_process_memory_fraction does: a request is refused when all of it would not fit beside
    what is reserved, before expandable segments look for pages. With ``device_cap`` it acts as a full GPU does: page
    by page.
    """
    num_buffers = max(trace.num_buffers, 1)
    # An allocation adds at most a segment and the rest of a split; unmapping, two rests around a run of pages.
    state = kernel.new_state(
        num_pools=2 * max(len(trace.stream_names), 1),
        num_blocks=2 * len(trace) + 64,
        num_buffers=num_buffers,
        config=_config(settings, limit, device_cap),
    )
    results = np.zeros(kernel.NUM_RESULTS, dtype=np.int64)
    course = len(trace) if keep_course else 0
    reserved, allocated = np.zeros(course, dtype=np.int64), np.zeros(course, dtype=np.int64)
    kernel.run_events(
        state,
        trace.kinds,
        trace.buffers,
        _rounded(trace.sizes, settings),
        trace.streams,
        reserved,
        allocated,
        results,
    )
    totals = state.totals
    died = None
    if results[kernel.DIED_AT] >= 0:
        event = int(results[kernel.DIED_AT])
        died = Death(
            event=event,
            phase=trace.phase_names[int(trace.phases[event])],
            requested_bytes=int(results[kernel.DIED_REQUESTED]),
            free_bytes=(limit or 0) - int(totals[kernel.RESERVED]),
            reserved_bytes=int(totals[kernel.RESERVED]),
            allocated_bytes=int(totals[kernel.ALLOCATED]),
        )
    refused = int(totals[kernel.MIN_REFUSED])
    return Replay(
        peak_reserved_bytes=int(results[kernel.PEAK_RESERVED]),
        peak_allocated_bytes=int(results[kernel.PEAK_ALLOCATED]),
        peak_event=int(results[kernel.PEAK_EVENT]),
        unallocated_at_peak_bytes=int(results[kernel.PEAK_RESERVED] - results[kernel.ALLOCATED_AT_PEAK]),
        largest_free_block_bytes=int(results[kernel.LARGEST_FREE_AT_PEAK]),
        num_retries=int(totals[kernel.NUM_RETRIES]),
        died=died,
        min_refused_bytes=refused if refused < kernel.NO_LIMIT else None,
        max_granted_bytes=int(totals[kernel.MAX_GRANTED]),
        reserved_bytes=reserved,
        allocated_bytes=allocated,
    )


def survival(trace: Trace, settings: AllocatorSettings, *, device_cap: bool = False, tolerance: float = 0.0025) -> int:
    """The smallest limit in bytes under which ``trace`` runs to its end, bisected to ``tolerance``.

    What a replay shows narrows the search beyond the halving: one that survives would do the same down to
    the highest total that it was granted, and one that dies would do the same up to the least that was refused.
    Survival is not monotonic in the limit (giving cached blocks back earlier can leave a better arrangement): the
    answer was seen to survive, and one not more than ``tolerance`` below it to die, or to have been granted less.
    """
    high, low = replay(trace, settings, device_cap=device_cap).max_granted_bytes, 0
    exact = settings.garbage_collection_threshold == 0.0  # collection starts at a part of the limit itself
    guess = min(_peak_live_bytes(trace, settings), high)
    while high - low > max(GRID_BYTES, tolerance * high):
        limit = min(max(-(-guess // GRID_BYTES) * GRID_BYTES, low + 1), high - 1)
        result = replay(trace, settings, limit, device_cap=device_cap)
        if result.died is None:
            high = result.max_granted_bytes if exact else limit
        else:
            low = max(limit, (result.min_refused_bytes or 0) - 1) if exact else limit
        guess = (low + high) // 2
    return high


def _peak_live_bytes(trace: Trace, settings: AllocatorSettings) -> int:
    """The most that is alive at once, each request rounded: what no arrangement can go below."""
    sizes = _rounded(trace.sizes, settings)
    made = trace.kinds == kernel.ALLOC
    by_buffer = np.zeros(trace.num_buffers, dtype=np.int64)
    by_buffer[trace.buffers[made]] = sizes[made]
    gone = (trace.kinds == kernel.FREE) | (trace.kinds == kernel.FREE_REQUESTED)
    steps = np.where(made, sizes, np.where(gone, -by_buffer[trace.buffers] if len(by_buffer) else 0, 0))
    return int(np.cumsum(steps).max(initial=0))


def warm() -> None:
    """Loads the compiled simulator by replaying nothing."""
    empty = np.zeros(0, dtype=np.int64)
    replay(Trace(empty, empty, empty, empty, empty, STREAMS, ("",)), AllocatorSettings())
