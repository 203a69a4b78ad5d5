"""The caching allocator itself: integers in flat arrays, so that numba can compile it.

Written from the behaviour of c10/cuda/CUDACachingAllocator.cpp, class DeviceCachingAllocator, at pytorch/pytorch commit
001074d25084 (older than 2.11, whose file was not at hand); the names in the docstrings are its functions. Recorded runs
show that 2.11 does the same, but only for default settings and no memory fraction.

A block is an index into the arrays of :class:`State`. A *pool* is one stream's small (odd) or large (even) pool:
``2 * stream + small``.

Not modelled: private pools of CUDA graphs, the end of an expandable segment's address space (1 1/8 of the GPU), and
sharing by IPC.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from estimator.allocator.compiled import Ints, close_gap, compiled, open_gap

# Constants of c10/core/AllocatorConfig.h.
MIN_BLOCK = 512
SMALL_SIZE = 1 << 20
SMALL_BUFFER = 2 << 20
MIN_LARGE_ALLOC = 10 << 20
ROUND_LARGE = 2 << 20

# Kinds of events.
ALLOC, FREE, FREE_REQUESTED, FREE_COMPLETED, EMPTY_CACHE = 0, 1, 2, 3, 4

# State.config: the settings, as integers.
EXPANDABLE, MAX_SPLIT, MAX_NON_SPLIT, LARGE_BUFFER = 0, 1, 2, 3
GC_MILLIONTHS, LIMIT, DEVICE_CAP, NUM_CONFIG = 4, 5, 6, 7
NO_LIMIT = 1 << 62

# State.totals: what is counted.
RESERVED, ALLOCATED, NEXT_ADDRESS, NUM_BLOCKS, NUM_SPARE, NUM_PENDING = 0, 1, 2, 3, 4, 5
NUM_RETRIES, NUM_SEGMENTS, MIN_REFUSED, MAX_GRANTED, NUM_RANGES, NUM_TOTALS = 6, 7, 8, 9, 10, 11

# Block status.
IS_FREE, IS_ALLOCATED, IS_PENDING = 0, 1, 2

# What a run returns.
PEAK_RESERVED, PEAK_ALLOCATED, PEAK_EVENT, ALLOCATED_AT_PEAK, LARGEST_FREE_AT_PEAK = 0, 1, 2, 3, 4
DIED_AT, DIED_REQUESTED, NUM_RESULTS = 5, 6, 7

_RANGE_PAGES = 1 << 24
"""Pages of address space between two expandable segments (and so of each of them): more than any GPU has."""


class State(NamedTuple):
    """All blocks and pools. Arrays of one row a block, but for the free lists (a row a pool) and the totals."""

    size: Ints
    address: Ints
    prev: Ints
    next: Ints
    pool: Ints
    status: Ints
    mapped: Ints
    born: Ints
    """The pools' number of searches when the block was last freed: its age is counted from there."""
    free: Ints
    """[pool, i]: mapped free blocks, ordered by size, then address."""
    num_free: Ints
    unmapped: Ints
    """[pool, i]: address space of expandable segments without memory, ordered by address."""
    num_unmapped: Ints
    num_searches: Ints
    """[small]: searches of the pools of all streams, counted for garbage collection."""
    spare: Ints
    pending: Ints
    """Buffers freed while another stream still used them, in order."""
    block_of: Ints
    """[buffer]: its block."""
    scratch: Ints
    config: Ints
    totals: Ints


def new_state(num_pools: int, num_blocks: int, num_buffers: int, config: Ints) -> State:
    """An empty allocator with room for ``num_blocks`` blocks at any one time."""

    def row() -> Ints:
        return np.empty(num_blocks, dtype=np.int64)

    totals = np.zeros(NUM_TOTALS, dtype=np.int64)
    totals[NEXT_ADDRESS] = 1 << 61
    totals[MIN_REFUSED] = NO_LIMIT
    return State(
        size=row(),
        address=row(),
        prev=row(),
        next=row(),
        pool=row(),
        status=row(),
        mapped=row(),
        born=row(),
        free=np.empty((num_pools, num_blocks), dtype=np.int64),
        num_free=np.zeros(num_pools, dtype=np.int64),
        unmapped=np.empty((num_pools, num_blocks), dtype=np.int64),
        num_unmapped=np.zeros(num_pools, dtype=np.int64),
        num_searches=np.zeros(2, dtype=np.int64),
        spare=row(),
        pending=np.empty(num_buffers, dtype=np.int64),
        block_of=np.full(num_buffers, -1, dtype=np.int64),
        scratch=row(),
        config=config,
        totals=totals,
    )


@compiled
def _new_block(s: State, pool: int, address: int, size: int, mapped: int) -> int:
    if s.totals[NUM_SPARE] > 0:
        s.totals[NUM_SPARE] -= 1
        b = s.spare[s.totals[NUM_SPARE]]
    else:
        b = s.totals[NUM_BLOCKS]
        s.totals[NUM_BLOCKS] += 1
    s.size[b], s.address[b], s.pool[b], s.mapped[b] = size, address, pool, mapped
    s.prev[b], s.next[b], s.status[b], s.born[b] = -1, -1, IS_FREE, 0
    return int(b)


@compiled
def _drop_block(s: State, b: int) -> None:
    s.spare[s.totals[NUM_SPARE]] = b
    s.totals[NUM_SPARE] += 1


@compiled
def _position(s: State, pool: int, size: int, address: int) -> int:
    """Index of the first free block of ``pool`` that is not below (size, address): BlockComparatorSize."""
    low, high = 0, s.num_free[pool]
    while low < high:
        middle = (low + high) >> 1
        b = s.free[pool, middle]
        if s.size[b] < size or (s.size[b] == size and s.address[b] < address):
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _add_free(s: State, b: int) -> None:
    """insert_into_blocks."""
    pool = s.pool[b]
    at = _position(s, pool, s.size[b], s.address[b])
    open_gap(s.free[pool], at, s.num_free[pool])
    s.free[pool, at] = b
    s.num_free[pool] += 1
    s.born[b] = s.num_searches[pool & 1]


@compiled
def _take_free(s: State, pool: int, at: int) -> None:
    close_gap(s.free[pool], at, s.num_free[pool])
    s.num_free[pool] -= 1


@compiled
def _remove_free(s: State, b: int) -> None:
    _take_free(s, s.pool[b], _position(s, s.pool[b], s.size[b], s.address[b]))


@compiled
def _add_unmapped(s: State, b: int) -> None:
    pool = s.pool[b]
    at = s.num_unmapped[pool]
    while at > 0 and s.address[s.unmapped[pool, at - 1]] > s.address[b]:
        at -= 1
    open_gap(s.unmapped[pool], at, s.num_unmapped[pool])
    s.unmapped[pool, at] = b
    s.num_unmapped[pool] += 1


@compiled
def _remove_unmapped(s: State, b: int) -> None:
    pool = s.pool[b]
    at = 0
    while s.unmapped[pool, at] != b:
        at += 1
    close_gap(s.unmapped[pool], at, s.num_unmapped[pool])
    s.num_unmapped[pool] -= 1


@compiled
def _insert_between(s: State, b: int, before: int, after: int) -> None:
    """Block::splice."""
    s.prev[b], s.next[b] = before, after
    if before >= 0:
        s.next[before] = b
    if after >= 0:
        s.prev[after] = b


@compiled
def _merge(s: State, b: int, other: int) -> None:
    """try_merge_blocks: ``b`` takes in its neighbour ``other`` where that is free and as (un)mapped as ``b``."""
    if other < 0 or s.status[other] != IS_FREE or s.mapped[other] != s.mapped[b]:
        return
    if s.mapped[other]:
        _remove_free(s, other)
    else:
        _remove_unmapped(s, other)
    if s.prev[b] == other:
        s.address[b] = s.address[other]
        s.prev[b] = s.prev[other]
        if s.prev[b] >= 0:
            s.next[s.prev[b]] = b
    else:
        s.next[b] = s.next[other]
        if s.next[b] >= 0:
            s.prev[s.next[b]] = b
    s.size[b] += s.size[other]
    _drop_block(s, other)


@compiled
def _free_block(s: State, b: int) -> None:
    """free_block: the memory may be used again; it joins its free neighbours."""
    s.status[b] = IS_FREE
    _merge(s, b, s.prev[b])
    _merge(s, b, s.next[b])
    _add_free(s, b)


@compiled
def _complete_pending(s: State) -> None:
    """synchronize_and_free_events."""
    for i in range(s.totals[NUM_PENDING]):
        _free_block(s, s.block_of[s.pending[i]])
    s.totals[NUM_PENDING] = 0


@compiled
def _complete_one(s: State, buffer: int) -> None:
    """process_events, for one buffer; nothing if a release has completed it before."""
    for i in range(s.totals[NUM_PENDING]):
        if s.pending[i] == buffer:
            close_gap(s.pending, i, s.totals[NUM_PENDING])
            s.totals[NUM_PENDING] -= 1
            _free_block(s, s.block_of[buffer])
            return


@compiled
def _is_range(s: State, b: int) -> bool:
    """Whether ``b`` belongs to an expandable segment: these addresses lie below those of cudaMalloc."""
    return bool(s.address[b] < (1 << 60))


@compiled
def _page(pool: int, s: State) -> int:
    return SMALL_BUFFER if pool & 1 else int(s.config[LARGE_BUFFER])


@compiled
def _release_segment(s: State, b: int) -> None:
    """release_block: cudaFree of one whole, unsplit segment."""
    _remove_free(s, b)
    s.totals[RESERVED] -= s.size[b]
    s.totals[NUM_SEGMENTS] -= 1
    _drop_block(s, b)


@compiled
def _unmap(s: State, b: int) -> None:
    """unmap_block: gives back the whole pages inside a free block of an expandable segment."""
    page = _page(s.pool[b], s)
    start, end = s.address[b], s.address[b] + s.size[b]
    first, last = -(-start // page) * page, end // page * page
    if first >= last:
        return
    _remove_free(s, b)
    if first > start:
        before = _new_block(s, s.pool[b], start, first - start, 1)
        _insert_between(s, before, s.prev[b], b)
        _add_free(s, before)
    if end > last:
        after = _new_block(s, s.pool[b], last, end - last, 1)
        _insert_between(s, after, b, s.next[b])
        _add_free(s, after)
    s.address[b], s.size[b], s.mapped[b] = first, last - first, 0
    _merge(s, b, s.prev[b])
    _merge(s, b, s.next[b])
    if s.prev[b] < 0 and s.next[b] < 0:  # release_expandable_segment
        _drop_block(s, b)
    else:
        _add_unmapped(s, b)
    s.totals[RESERVED] -= last - first


@compiled
def _release_cached(s: State) -> None:
    """release_cached_blocks: every free segment that is not split, every whole free page of expandable ones."""
    _complete_pending(s)
    for small in range(2):
        for pool in range(small, len(s.num_free), 2):
            # From the largest down, so that what is left in place has been looked at; unmapping may add small rests.
            num_ranges = 0
            i = s.num_free[pool] - 1
            while i >= 0:
                b = s.free[pool, i]
                if _is_range(s, b):
                    s.scratch[num_ranges] = b
                    num_ranges += 1
                elif s.prev[b] < 0 and s.next[b] < 0:
                    _release_segment(s, b)
                i -= 1
            while num_ranges > 0:
                num_ranges -= 1
                _unmap(s, s.scratch[num_ranges])


@compiled
def _release_available(s: State, pool: int, size: int) -> bool:
    """release_available_cached_blocks: only with max_split_size, oversize blocks of this stream, largest first."""
    max_split = s.config[MAX_SPLIT]
    if max_split == NO_LIMIT:
        return False
    wanted = max(size, max_split)
    at = _position(s, pool, wanted, 0)
    if at < s.num_free[pool]:
        b = s.free[pool, at]
        if _is_range(s, b):
            return False
        _release_segment(s, b)
        return True
    released = 0
    while released < wanted and s.num_free[pool] > 0:
        b = s.free[pool, s.num_free[pool] - 1]
        if s.size[b] < max_split or _is_range(s, b):
            break
        released += s.size[b]
        _release_segment(s, b)
    return bool(released >= wanted)


@compiled
def _collect_garbage(s: State) -> None:
    """garbage_collect_cached_blocks: unsplit large segments that have not been used for longer than the average."""
    # Double arithmetic, as there: threshold * maximum.
    threshold = int(s.config[GC_MILLIONTHS] / 1e6 * s.config[LIMIT])
    if s.totals[RESERVED] <= threshold:
        return
    target = s.totals[RESERVED] - threshold
    total_age = count = reclaimed = 0
    for pool in range(0, len(s.num_free), 2):
        for i in range(s.num_free[pool]):
            b = s.free[pool, i]
            if s.prev[b] < 0 and s.next[b] < 0:
                total_age += s.num_searches[0] - s.born[b]
                count += 1
    freed = True
    while reclaimed < target and freed and count > 0:
        average = total_age / count
        freed = False
        for pool in range(0, len(s.num_free), 2):
            i = 0
            while i < s.num_free[pool]:
                b = s.free[pool, i]
                age = s.num_searches[0] - s.born[b]
                if s.prev[b] < 0 and s.next[b] < 0 and age >= average:
                    freed = True
                    reclaimed += s.size[b]
                    total_age -= age
                    count -= 1
                    _release_segment(s, b)
                else:
                    i += 1


@compiled
def _expandable_size(s: State, b: int) -> int:
    """What a free block can grow to: with the unmapped address space behind it."""
    after = s.next[b]
    return int(s.size[b] + (s.size[after] if after >= 0 and not s.mapped[after] else 0))


@compiled
def _get_free(s: State, pool: int, size: int) -> int:
    """get_free_block: best fit by size, then address."""
    if s.config[GC_MILLIONTHS] > 0 and s.config[LIMIT] < NO_LIMIT:
        s.num_searches[pool & 1] += 1
    at = _position(s, pool, size, 0)
    if at == s.num_free[pool]:
        return -1
    if s.config[EXPANDABLE]:
        room = _expandable_size(s, s.free[pool, at])
        while at + 1 < s.num_free[pool]:
            next_room = _expandable_size(s, s.free[pool, at + 1])
            if next_room >= room:
                break
            at, room = at + 1, next_room
    b = s.free[pool, at]
    max_split = s.config[MAX_SPLIT]
    if size < max_split <= s.size[b]:
        return -1
    if size >= max_split and s.size[b] >= size + s.config[MAX_NON_SPLIT]:
        return -1
    _take_free(s, pool, at)
    return int(b)


@compiled
def _map(s: State, b: int, size: int) -> bool:
    """map_block: memory for the first ``size`` bytes (whole pages) of an unmapped block, which joins its neighbours."""
    page = _page(s.pool[b], s)
    mapped = -(-size // page) * page
    if s.config[DEVICE_CAP] and s.totals[RESERVED] + mapped > s.config[LIMIT]:
        s.totals[MIN_REFUSED] = min(s.totals[MIN_REFUSED], s.totals[RESERVED] + mapped)
        return False
    if s.config[DEVICE_CAP]:
        s.totals[MAX_GRANTED] = max(s.totals[MAX_GRANTED], s.totals[RESERVED] + mapped)
    _remove_unmapped(s, b)
    s.mapped[b] = 1
    if mapped < s.size[b]:
        rest = _new_block(s, s.pool[b], s.address[b] + mapped, s.size[b] - mapped, 0)
        _insert_between(s, rest, b, s.next[b])
        _add_unmapped(s, rest)
        s.size[b] = mapped
    _merge(s, b, s.prev[b])
    _merge(s, b, s.next[b])
    _add_free(s, b)
    s.totals[RESERVED] += mapped
    return True


@compiled
def _find_range(s: State, pool: int, size: int) -> int:
    """find_expandable_block: the lowest address from which free and unmapped blocks together hold ``size`` bytes."""
    for i in range(s.num_unmapped[pool]):
        candidate = s.unmapped[pool, i]
        before = s.prev[candidate]
        if before >= 0 and s.status[before] == IS_FREE:
            candidate = before
        room, b = 0, candidate
        while room < size and b >= 0 and s.status[b] == IS_FREE:
            room += s.size[b]
            b = s.next[b]
        if room >= size:
            return int(candidate)
    page = _page(pool, s)
    s.totals[NUM_RANGES] += 1
    # Every range begins on a page. Addresses stay below 2**60.
    start = s.totals[NUM_RANGES] * page * _RANGE_PAGES
    b = _new_block(s, pool, start, page * (_RANGE_PAGES - 1), 0)
    _add_unmapped(s, b)
    return b


@compiled
def _expand(s: State, pool: int, size: int) -> int:
    """try_allocate_expandable_block."""
    b = _find_range(s, pool, size)
    if not s.mapped[b] and not _map(s, b, min(s.size[b], size)):
        return -1
    while s.size[b] < size:
        after = s.next[b]
        if not _map(s, after, min(size - s.size[b], s.size[after])):
            return -1
        b = after
    _remove_free(s, b)
    return b


@compiled
def _new_memory(s: State, pool: int, size: int, segment: int) -> int:
    """alloc_block: cudaMalloc of ``segment`` bytes, or more pages; refused above the limit."""
    limit = s.config[LIMIT]
    if not (s.config[DEVICE_CAP] and s.config[EXPANDABLE]):
        if s.totals[RESERVED] + segment > limit:
            s.totals[MIN_REFUSED] = min(s.totals[MIN_REFUSED], s.totals[RESERVED] + segment)
            return -1
        s.totals[MAX_GRANTED] = max(s.totals[MAX_GRANTED], s.totals[RESERVED] + segment)
    if s.config[EXPANDABLE]:
        return _expand(s, pool, size)
    # The driver hands out addresses downwards: seen in all recorded runs.
    s.totals[NEXT_ADDRESS] -= segment
    s.totals[RESERVED] += segment
    s.totals[NUM_SEGMENTS] += 1
    return _new_block(s, pool, s.totals[NEXT_ADDRESS], segment, 1)


@compiled
def _malloc(s: State, stream: int, size: int) -> int:
    """malloc of a rounded size: a block, or -1 (out of memory)."""
    small = 1 if size <= SMALL_SIZE else 0
    pool = 2 * stream + small
    if small:
        segment = SMALL_BUFFER
    elif size < MIN_LARGE_ALLOC:
        segment = s.config[LARGE_BUFFER]
    else:
        segment = -(-size // ROUND_LARGE) * ROUND_LARGE
    b = _get_free(s, pool, size)
    if b < 0:
        if s.config[GC_MILLIONTHS] > 0 and s.config[LIMIT] < NO_LIMIT and not s.config[DEVICE_CAP]:
            _collect_garbage(s)
        b = _new_memory(s, pool, size, segment)
        if b < 0 and _release_available(s, pool, size):
            b = _new_memory(s, pool, size, segment)
        if b < 0:
            _release_cached(s)
            s.totals[NUM_RETRIES] += 1
            b = _new_memory(s, pool, size, segment)
        if b < 0:
            return -1
    rest = s.size[b] - size
    split = rest >= MIN_BLOCK if small or s.config[EXPANDABLE] else size < s.config[MAX_SPLIT] and rest > SMALL_SIZE
    if split:
        head = _new_block(s, pool, s.address[b], size, 1)
        _insert_between(s, head, s.prev[b], b)
        s.address[b] += size
        s.size[b] = rest
        _add_free(s, b)
        b = head
    s.status[b] = IS_ALLOCATED
    s.totals[ALLOCATED] += s.size[b]
    return int(b)


@compiled
def run_events(
    s: State,
    kinds: Ints,
    buffers: Ints,
    sizes: Ints,
    streams: Ints,
    reserved_after: Ints,
    allocated_after: Ints,
    results: Ints,
) -> None:
    """Replays all events. The two ``_after`` arrays are written unless empty."""
    results[:] = 0
    results[DIED_AT] = -1
    keep = len(reserved_after) > 0
    for i in range(len(kinds)):
        kind = kinds[i]
        if kind == ALLOC:
            b = _malloc(s, streams[i], sizes[i])
            if b < 0:
                results[DIED_AT], results[DIED_REQUESTED] = i, sizes[i]
                return
            s.block_of[buffers[i]] = b
            results[PEAK_ALLOCATED] = max(results[PEAK_ALLOCATED], s.totals[ALLOCATED])
            if s.totals[RESERVED] > results[PEAK_RESERVED]:
                results[PEAK_RESERVED], results[PEAK_EVENT] = s.totals[RESERVED], i
                results[ALLOCATED_AT_PEAK] = s.totals[ALLOCATED]
                largest = 0
                for pool in range(len(s.num_free)):
                    if s.num_free[pool] > 0:
                        largest = max(largest, s.size[s.free[pool, s.num_free[pool] - 1]])
                results[LARGEST_FREE_AT_PEAK] = largest
        elif kind == FREE:
            b = s.block_of[buffers[i]]
            s.totals[ALLOCATED] -= s.size[b]
            _free_block(s, b)
        elif kind == FREE_REQUESTED:
            b = s.block_of[buffers[i]]
            s.totals[ALLOCATED] -= s.size[b]
            s.status[b] = IS_PENDING
            s.pending[s.totals[NUM_PENDING]] = buffers[i]
            s.totals[NUM_PENDING] += 1
        elif kind == FREE_COMPLETED:
            _complete_one(s, buffers[i])
        else:
            _release_cached(s)
        if keep:
            reserved_after[i], allocated_after[i] = s.totals[RESERVED], s.totals[ALLOCATED]
