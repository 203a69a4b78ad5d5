"""The timeline: what one rank allocates and frees, in order, and what follows from it.

A :class:`Block` is an ordered list of allocations and frees with local names: one layer's forward, one reduction. It
knows its net change and its highest point, so that a step of many equal layers is evaluated from few blocks. A
:class:`Timeline` runs blocks one after another under phases. Two blocks that share a buffer (saved by a forward,
freed by its backward) meet by the *scope* they run in, such as (microbatch 0, layer 3).

Bytes are what torch.cuda.memory_allocated() counts: every request rounded up to 512 bytes
(c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize, torch 2.11).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

ALIGNMENT_BYTES = 512
_ROUND_UP = ALIGNMENT_BYTES - 1

COMPUTE, SIDE, GATHER, REDUCE = STREAMS = ("default", "side", "all_gather", "reduce_scatter")
"""Streams: pools of the caching allocator are kept apart by the stream that a buffer is made on."""


def rounded(num_bytes: int) -> int:
    """Bytes the caching allocator counts for a request of ``num_bytes``: up to the next multiple of 512, at least
    one."""
    return max(1, -(-num_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES


class Op(NamedTuple):
    """One allocation (``num_bytes`` > 0) or free (< 0) of the buffer ``name``; 0 renames "old>new"."""

    name: str
    num_bytes: int
    component: str
    stream: str


_SIZE = operator.itemgetter(1)

EMPTY_CACHE_OP = "!empty_cache"
"""Name of the zero-byte op by which torch.cuda.empty_cache() is called: it changes what is reserved, not allocated."""


@dataclass(slots=True)
class Block:
    """An ordered list of allocations and frees.

    ``delta`` is the net change in bytes, ``peak`` the highest running sum (at least 0), ``peak_index`` how many ops
    have run when it is reached first.
    """

    name: str
    ops: tuple[Op, ...]
    delta: int = field(init=False)
    peak: int = field(init=False)
    peak_index: int = field(init=False)
    compiled: object = field(default=None, init=False, compare=False, repr=False)
    """Room for whoever replays blocks to keep what it made of this one; blocks are shared between timelines."""

    def __post_init__(self) -> None:
        self.delta = self.peak = self.peak_index = 0
        if not self.ops:
            return
        running = list(itertools.accumulate(map(_SIZE, self.ops)))
        self.delta, peak = running[-1], max(running)
        if peak > 0:
            self.peak, self.peak_index = peak, running.index(peak) + 1

    def split_after(self, buffer: str) -> tuple[Block, Block]:
        """Two blocks, the first ending with the last op on ``buffer``, or being all of it if there is none."""
        stop = max((i + 1 for i, op in enumerate(self.ops) if op.name == buffer), default=len(self.ops))
        return Block(self.name, self.ops[:stop]), Block(self.name, self.ops[stop:])


EMPTY = Block("empty", ())


class Scribe:
    """Writes blocks. Buffers made in one block and freed in another stay known between :meth:`cut` calls."""

    def __init__(self) -> None:
        self.live: dict[str, Op] = {}
        """The allocation of every buffer that is not freed yet, by the name it has now."""
        self._ops: list[Op] = []

    @property
    def has_ops(self) -> bool:
        """Whether anything was written since the last cut."""
        return bool(self._ops)

    def assume(self, name: str, num_bytes: int, component: str, stream: str = COMPUTE) -> None:
        """A buffer that an earlier block, written elsewhere, has made."""
        self.live[name] = Op(name, rounded(num_bytes), component, stream)

    def alloc(self, name: str, num_bytes: int, component: str, stream: str = COMPUTE) -> None:
        if name in self.live:
            raise ValueError(f"buffer {name!r} is allocated twice")
        size = (num_bytes + _ROUND_UP) // ALIGNMENT_BYTES * ALIGNMENT_BYTES if num_bytes > 0 else ALIGNMENT_BYTES
        op = self.live[name] = Op(name, size, component, stream)
        self._ops.append(op)

    def free(self, *names: str) -> None:
        for name in names:
            _, size, component, stream = self.live.pop(name)
            self._ops.append(Op(name, -size, component, stream))

    def empty_cache(self) -> None:
        """torch.cuda.empty_cache()."""
        self._ops.append(Op(EMPTY_CACHE_OP, 0, "", COMPUTE))

    def forget(self, name: str) -> None:
        """Stop following a buffer of an earlier block, so that its name may be used again here."""
        del self.live[name]

    def rename(self, old: str, new: str) -> None:
        """The same memory under a new name: an op of zero bytes, named ``old>new``, so that a replay can follow."""
        if new in self.live:
            raise ValueError(f"buffer {new!r} exists already")
        buffer = self.live.pop(old)
        self.live[new] = buffer
        self._ops.append(Op(f"{old}>{new}", 0, buffer.component, buffer.stream))

    def adopt(self, ops: list[Op]) -> None:
        """Ops written elsewhere; whoever adopts them tells ``live`` what they leave."""
        self._ops += ops

    def transient(self, name: str, num_bytes: int, component: str, stream: str = COMPUTE) -> None:
        """A buffer that is freed before anything else happens."""
        self.alloc(name, num_bytes, component, stream)
        self.free(name)

    def cut(self, name: str) -> Block:
        """The ops written since the last cut, as one block."""
        if not self._ops:
            return EMPTY
        block = Block(name, tuple(self._ops))
        self._ops = []
        return block


class PhaseResult(NamedTuple):
    """Allocated bytes when a phase ends, the highest within it, and the ``Timeline.entries`` index of that peak."""

    name: str
    allocated_bytes: int
    peak_bytes: int
    peak_entry: int


class Entry(NamedTuple):
    block: Block
    scope: tuple[object, ...]


class Timeline:
    """Blocks in the order in which one rank runs them, grouped in phases."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._phases: list[tuple[str, int]] = []

    def phase(self, name: str) -> None:
        """Begin a phase: all entries added from now on belong to it, until the next."""
        self._phases.append((name, len(self.entries)))

    def run(self, block: Block, scope: tuple[object, ...] = ()) -> None:
        if block.ops:
            self.entries.append(Entry(block, scope))

    def spans(self) -> tuple[tuple[str, int, int], ...]:
        """(phase, first entry, one past its last entry), in order."""
        bounds = [*self._phases, ("", len(self.entries))]
        return tuple((name, start, stop) for (name, start), (_, stop) in itertools.pairwise(bounds))

    def phases(self) -> tuple[PhaseResult, ...]:
        results = []
        running = 0
        for name, start, stop in self.spans():
            peak, peak_entry = running, start
            for i in range(start, stop):
                block = self.entries[i][0]
                if running + block.peak > peak:
                    peak, peak_entry = running + block.peak, i
                running += block.delta
            results.append(PhaseResult(name, running, peak, peak_entry))
        return tuple(results)

    def components_at_peak(self, phase: PhaseResult) -> dict[str, int]:
        """Live bytes by component at the peak of ``phase``; they add up to ``phase.peak_bytes`` exactly."""
        totals: dict[str, int] = {}
        stop = min(phase.peak_entry, len(self.entries))
        times: dict[int, int] = {}
        blocks: dict[int, Block] = {}
        for block, _ in self.entries[:stop]:
            key = id(block)
            times[key] = times.get(key, 0) + 1
            blocks[key] = block
        for key, block in blocks.items():
            for _, num_bytes, component, _ in block.ops:
                totals[component] = totals.get(component, 0) + num_bytes * times[key]
        if stop < len(self.entries) and sum(totals.values()) != phase.peak_bytes:
            block = self.entries[stop].block
            for op in block.ops[: block.peak_index]:
                totals[op.component] = totals.get(op.component, 0) + op.num_bytes
        return {name: n for name, n in totals.items() if n}

    def ops(self) -> Iterator[tuple[str, tuple[object, ...], Op]]:
        """Every op in order with its phase and scope: what the allocator model replays."""
        for name, start, stop in self.spans():
            for block, scope in self.entries[start:stop]:
                for op in block.ops:
                    yield name, scope, op
