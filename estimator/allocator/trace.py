"""Allocations and frees as flat arrays: what the allocator model replays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from estimator.allocator.kernel import ALLOC, EMPTY_CACHE, FREE, FREE_COMPLETED, FREE_REQUESTED, Ints
from estimator.timeline import Op, Timeline

EMPTY_CACHE_OP = "!empty_cache"
"""Name of the zero-byte op by which a timeline says that torch.cuda.empty_cache() is called."""


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


def _resolved(name: str, scope: Scope) -> tuple[Scope, str]:
    """The scope that a local buffer name belongs to, and the name there (see estimator/model/program.py)."""
    if name.startswith("prev/"):
        return (*scope[:-1], scope[-1] - 1), name[5:]  # type: ignore[operator]
    if name.startswith("^") and len(scope) > 2:
        return scope[:-1], name
    return scope, name


def compile_ops(timeline: Timeline) -> Trace:
    """The timeline of one rank as a trace.

    Scopes are () (the strategy), (iteration, microbatch) and (iteration, microbatch, layer). Raises TraceError where a
    free does not meet its allocation, or a buffer is allocated while it is live.
    """
    return compile_op_stream(timeline.ops())


def compile_op_stream(ops: Iterable[tuple[str, Scope, Op]]) -> Trace:
    """:func:`compile_ops` of ops that come with their phase and scope."""
    streams: dict[str, int] = {}
    phases: dict[str, int] = {}

    def events() -> Iterator[Event]:
        live: dict[tuple[Scope, str], tuple[int, int]] = {}
        num_buffers = 0
        for phase, scope, (name, num_bytes, _, stream) in ops:
            phase_index = phases.setdefault(phase, len(phases))
            stream_index = streams.setdefault(stream, len(streams))
            if num_bytes > 0:
                key = _resolved(name, scope)
                if key in live:
                    raise TraceError(f"{phase}: {name!r} in scope {scope} is allocated twice")
                live[key] = num_buffers, num_bytes
                yield Event(ALLOC, num_buffers, num_bytes, stream_index, phase_index)
                num_buffers += 1
            elif num_bytes < 0:
                found = live.pop(_resolved(name, scope), None)
                if found is None:
                    raise TraceError(f"{phase}: {name!r} in scope {scope} is freed but not allocated")
                if found[1] != -num_bytes:
                    raise TraceError(f"{phase}: {name!r} in scope {scope} has {found[1]} bytes, {-num_bytes} are freed")
                yield Event(FREE, found[0], 0, stream_index, phase_index)
            elif name == EMPTY_CACHE_OP:
                yield Event(EMPTY_CACHE, 0, 0, stream_index, phase_index)
            else:
                old, new = name.split(">")
                found = live.pop(_resolved(old, scope), None)
                if found is None:
                    raise TraceError(f"{phase}: {old!r} in scope {scope} is renamed but not allocated")
                new_key = _resolved(new, scope)
                if new_key in live:
                    raise TraceError(f"{phase}: {new!r} in scope {scope} exists already")
                live[new_key] = found

    rows = list(events())
    return from_events(rows, tuple(streams), tuple(phases))


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
