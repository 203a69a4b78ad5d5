"""Allocations and frees as flat arrays: what the allocator model replays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from estimator.allocator.compiled import Ints
from estimator.allocator.kernel import ALLOC, EMPTY_CACHE, FREE, FREE_COMPLETED, FREE_REQUESTED
from estimator.timeline import EMPTY_CACHE_OP, STREAMS, Block, Timeline


class TraceError(ValueError):
    """A free without its allocation, a second allocation of a live buffer, or a size that does not match."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Events in order, one row each.

    ``kinds``: ALLOC, FREE (requested and completed at once), FREE_REQUESTED (no longer counted as allocated, but still
    used by another stream), FREE_COMPLETED (may be reused from here on), EMPTY_CACHE. ``sizes`` are requested bytes
    (ALLOC only), ``streams`` indices into ``stream_names``, ``phases`` into ``phase_names``.
    """

    kinds: Ints
    buffers: Ints
    sizes: Ints
    streams: Ints
    phases: Ints
    stream_names: tuple[str, ...]
    phase_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def num_buffers(self) -> int:
        return int(self.buffers.max(initial=-1)) + 1


class Event(NamedTuple):
    kind: int
    buffer: int
    num_bytes: int
    stream: int
    phase: int


def from_events(events: Iterable[Event], stream_names: tuple[str, ...], phase_names: tuple[str, ...] = ("",)) -> Trace:
    """A trace of events that are known to meet."""
    table = np.array(list(events), dtype=np.int64).reshape(-1, 5)
    kinds, buffers, sizes, streams, phases = (np.ascontiguousarray(table[:, i]) for i in range(5))
    return Trace(kinds, buffers, sizes, streams, phases, stream_names, phase_names)


Scope = tuple[object, ...]


def compile_ops(timeline: Timeline) -> Trace:
    """The timeline of one rank as a trace.

    Scopes are () (the strategy), (iteration, microbatch) and (iteration, microbatch, layer). A block is read once,
    however often it runs. Raises TraceError where a free does not meet its allocation, or a buffer is allocated while
    it is live.
    """
    assembly = _Assembly()
    for name, start, stop in timeline.spans():
        assembly.phase(name)
        for block, scope in timeline.entries[start:stop]:
            assembly.add(block, scope)
    return assembly.trace()


_OWN, _PREVIOUS, _MICROBATCH = 0, 1, 2
_LocalKey = tuple[int, str]
_STREAM_NUMBERS = {name: number for number, name in enumerate(STREAMS)}


def _local_key(name: str) -> _LocalKey:
    """Which scope a block's name belongs to, relative to the one that it runs in, and the name there
    (estimator/model/program.py)."""
    if name.startswith("prev/"):
        return _PREVIOUS, name[5:]
    return (_MICROBATCH if name.startswith("^") else _OWN), name


@dataclass(slots=True)
class _Template:
    """A block read once. Its buffers are numbered from 0: those that it allocates, then those that it takes over.

    Plain lists: most blocks have few ops, for which arrays would cost more than they save.
    """

    kinds: list[int]
    refs: list[int]
    sizes: list[int]
    streams: list[int]
    new_sizes: list[int]
    taken: list[tuple[_LocalKey, int]]
    """Buffers of earlier blocks that this one frees or renames: name and bytes (0: not said)."""
    left: list[tuple[_LocalKey, int]]
    """Buffers alive under a name of this block when it ends: name and number."""
    relations: frozenset[int]
    """Of which scopes it takes or leaves buffers."""


class _Reader:
    """Reads one block into a :class:`_Template`."""

    def __init__(self) -> None:
        self.kinds: list[int] = []
        self.refs: list[int] = []
        self.sizes: list[int] = []
        self.streams: list[int] = []
        self.new_sizes: list[int] = []
        self.taken: list[tuple[_LocalKey, int]] = []
        self.held: dict[_LocalKey, int] = {}

    def read(self, block: Block) -> _Template:
        for name, num_bytes, _, stream in block.ops:
            if num_bytes > 0:
                key = _local_key(name)
                if key in self.held:
                    raise TraceError(f"block {block.name!r}: {name!r} is allocated twice")
                self.held[key] = len(self.new_sizes)
                self._write(ALLOC, len(self.new_sizes), num_bytes, stream)
                self.new_sizes.append(num_bytes)
            elif num_bytes < 0:
                self._write(FREE, self._take(_local_key(name), -num_bytes, block.name), 0, stream)
            elif name == EMPTY_CACHE_OP:
                self._write(EMPTY_CACHE, 0, 0, stream)
            else:
                old, new = name.split(">")
                self.held[_local_key(new)] = self._take(_local_key(old), 0, block.name)
        # Taken buffers were numbered -1, -2, ... while it was not known how many new ones there are.
        num_new = len(self.new_sizes)
        refs = [ref if ref >= 0 else num_new - 1 - ref for ref in self.refs]
        left = [(key, ref if ref >= 0 else num_new - 1 - ref) for key, ref in self.held.items()]
        relations = frozenset(relation for (relation, _), _ in (*self.taken, *left))
        return _Template(self.kinds, refs, self.sizes, self.streams, self.new_sizes, self.taken, left, relations)

    def _write(self, kind: int, ref: int, num_bytes: int, stream: str) -> None:
        self.kinds.append(kind)
        self.refs.append(ref)
        self.sizes.append(num_bytes)
        self.streams.append(_STREAM_NUMBERS[stream])

    def _take(self, key: _LocalKey, num_bytes: int, where: str) -> int:
        number = self.held.pop(key, None)
        if number is None:
            self.taken.append((key, num_bytes))
            return -len(self.taken)
        size = self.new_sizes[number] if number >= 0 else self.taken[-1 - number][1]
        if num_bytes and size and size != num_bytes:
            raise TraceError(f"block {where!r}: {key[1]!r} has {size} bytes, {num_bytes} are freed")
        return number


class _Assembly:
    """Puts blocks one after another and lets their buffers meet by scope and name."""

    def __init__(self) -> None:
        self.phases: dict[str, int] = {}
        self.columns: tuple[list[int], ...] = ([], [], [], [])
        self.phase_starts: list[tuple[int, int]] = []
        """(number, first event) of each phase that was begun."""
        self.live: dict[Scope, dict[str, int]] = {}
        """By scope and name: the number of each live buffer."""
        self.sizes: list[int] = []

    def phase(self, name: str) -> None:
        """What is added from now on belongs to this phase."""
        self.phase_starts.append((self.phases.setdefault(name, len(self.phases)), len(self.columns[0])))

    def add(self, block: Block, scope: Scope) -> None:
        template = block.compiled
        if len(block.ops) == 1 and block.ops[0][1]:
            self._add_single(block, scope)
            return
        if not isinstance(template, _Template):
            template = block.compiled = _Reader().read(block)
        first = len(self.sizes)
        self.sizes.extend(template.new_sizes)
        numbers = [*range(first, len(self.sizes))]
        names = self._names_by_relation(scope, template.relations)
        for (relation, name), num_bytes in template.taken:
            number = names[relation].pop(name, -1)
            if number < 0:
                raise TraceError(f"block {block.name!r}: {name!r} is freed in scope {scope} but not allocated")
            if num_bytes and self.sizes[number] != num_bytes:
                raise TraceError(
                    f"block {block.name!r}: {name!r} in scope {scope} has {self.sizes[number]} bytes, "
                    f"{num_bytes} are freed"
                )
            numbers.append(number)
        for (relation, name), ref in template.left:
            if name in names[relation]:
                raise TraceError(f"block {block.name!r}: {name!r} is allocated in scope {scope} while it is live")
            names[relation][name] = numbers[ref]
        kinds, buffers, num_bytes_of, streams = self.columns
        kinds.extend(template.kinds)
        buffers.extend([numbers[ref] for ref in template.refs] if numbers else template.refs)
        num_bytes_of.extend(template.sizes)
        streams.extend(template.streams)

    def _add_single(self, block: Block, scope: Scope) -> None:
        """One allocation or free: half of all blocks, and most of those that run once."""
        name, num_bytes, _, stream = block.ops[0]
        relation, key = _local_key(name)
        names = self.live.setdefault(_scope_of(scope, relation), {})
        kinds, buffers, num_bytes_of, streams = self.columns
        if num_bytes > 0:
            if key in names:
                raise TraceError(f"block {block.name!r}: {key!r} is allocated in scope {scope} while it is live")
            number = names[key] = len(self.sizes)
            self.sizes.append(num_bytes)
            kinds.append(ALLOC)
            num_bytes_of.append(num_bytes)
        else:
            number = names.pop(key, -1)
            if number < 0:
                raise TraceError(f"block {block.name!r}: {key!r} is freed in scope {scope} but not allocated")
            if self.sizes[number] != -num_bytes:
                raise TraceError(
                    f"block {block.name!r}: {key!r} in scope {scope} has {self.sizes[number]} bytes, "
                    f"{-num_bytes} are freed"
                )
            kinds.append(FREE)
            num_bytes_of.append(0)
        buffers.append(number)
        streams.append(_STREAM_NUMBERS[stream])

    def _names_by_relation(self, scope: Scope, relations: frozenset[int]) -> dict[int, dict[str, int]]:
        return {relation: self.live.setdefault(_scope_of(scope, relation), {}) for relation in relations}

    def trace(self) -> Trace:
        kinds, buffers, sizes, streams = (np.array(column, dtype=np.int64) for column in self.columns)
        numbers, starts = np.array(self.phase_starts, dtype=np.int64).reshape(-1, 2).T
        phases = np.repeat(numbers, np.diff(starts, append=len(kinds)))
        return Trace(kinds, buffers, sizes, streams, phases, STREAMS, tuple(self.phases))


def _scope_of(scope: Scope, relation: int) -> Scope:
    if relation == _OWN:
        return scope
    if relation == _MICROBATCH:
        return scope[:-1] if len(scope) > 2 else scope
    return (*scope[:-1], scope[-1] - 1)  # type: ignore[operator]


def with_delayed_frees(trace: Trace, stream: str, num_events: int) -> Trace:
    """The trace as if buffers of ``stream`` had been used on another stream too (Tensor.record_stream).

    Each of their frees is requested where it stands and completed ``num_events`` events later.
    """
    index = trace.stream_names.index(stream)
    order = np.arange(len(trace), dtype=np.float64)
    delayed = (trace.kinds == FREE) & (trace.streams == index)
    kinds = np.where(delayed, FREE_REQUESTED, trace.kinds)
    rows = np.flatnonzero(delayed)
    completed_at = np.minimum(order[rows] + num_events, len(trace)) - 0.5
    take = np.argsort(np.concatenate([order, np.maximum(completed_at, order[rows] + 0.5)]), kind="stable")

    def merged(values: Ints, extra: Ints) -> Ints:
        joined: Ints = np.concatenate([values, extra])[take]
        return joined

    return Trace(
        merged(kinds, np.full(len(rows), FREE_COMPLETED, dtype=np.int64)),
        merged(trace.buffers, trace.buffers[rows]),
        merged(trace.sizes, trace.sizes[rows]),
        merged(trace.streams, trace.streams[rows]),
        merged(trace.phases, trace.phases[rows]),
        trace.stream_names,
        trace.phase_names,
    )
