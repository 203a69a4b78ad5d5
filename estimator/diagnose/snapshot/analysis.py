"""What a memory snapshot shows: allocated and reserved over time, what lives at the peak, fragmentation, growth.

The format is that of ``torch.cuda.memory._snapshot()`` (torch 2.x): ``segments`` are the pool at the end, with their
blocks; ``device_traces`` are the last events of each device, oldest first. Bytes are counted as
``torch.cuda.memory_allocated`` does: a block is allocated until its free is requested.
Everything is checked as it is read; what is not as expected is skipped and counted. Work is linear in the entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from estimator.diagnose.snapshot.reader import SnapshotRefused
from estimator.diagnose.snapshot.stacks import component_of

MAX_EVENTS = 40_000_000
MAX_SEGMENTS = 2_000_000
MAX_STACKS = 400_000
SERIES_POINTS = 400
TOP_STACKS = 40
TOP_SEGMENTS = 20
SHOWN_FRAMES = 8
MAX_BOUNDARIES = 256
QUIET_EVENTS = 50
"""Events without the optimizer's after which an optimizer step counts as over."""
MAX_SIZE = 1 << 50

_RESERVE = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_OPTIMIZER = frozenset({"optimizer_states", "optimizer_temporaries"})


@dataclass(slots=True)
class _Stacks:
    """Distinct stacks, by number. Snapshots share one list of frames between all events of a stack."""

    by_identity: dict[int, int] = field(default_factory=dict)
    by_content: dict[tuple[str, ...], int] = field(default_factory=dict)
    frames: list[tuple[str, ...]] = field(default_factory=list)
    components: list[str] = field(default_factory=list)

    def number(self, raw: Any) -> int:
        known = self.by_identity.get(id(raw))
        if known is not None:
            return known
        texts = tuple(_frame(f) for f in raw[:64]) if isinstance(raw, list) else ()
        found = self.by_content.get(texts)
        if found is None:
            if len(self.frames) >= MAX_STACKS:
                return self.number([])
            found = len(self.frames)
            self.by_content[texts] = found
            self.frames.append(texts)
            self.components.append(component_of([_without_line(t) for t in texts]))
        self.by_identity[id(raw)] = found
        return found


def _frame(frame: Any) -> str:
    if not isinstance(frame, dict):
        return ""
    path = str(frame.get("filename", ""))[-160:]
    return f"{path}:{str(frame.get('name', ''))[:80]}:{str(frame.get('line', ''))[:9]}"


def _without_line(text: str) -> str:
    return text.rpartition(":")[0]


@dataclass(slots=True)
class _Device:
    number: int
    events: list[Any]
    segments: list[dict[str, Any]]
    allocated: int = 0
    reserved: int = 0


def analyse(snapshot: Any) -> dict[str, Any]:
    """Plain data about the device that holds most. Raises SnapshotRefused if it is no snapshot."""
    device = max(_devices(snapshot), key=lambda d: (d.allocated, len(d.events)), default=None)
    if device is None:
        raise SnapshotRefused("the file is a pickle, but no memory snapshot: it has no segments and no events")
    stacks = _Stacks()
    freed = "free_requested" if any(_action(e) == "free_requested" for e in device.events) else "free_completed"
    course = _course(device, freed)
    live = _live(device, freed, course, stacks)
    peak = course.peak
    return {
        "device": device.number,
        "num_events": len(device.events),
        "skipped_events": course.skipped,
        "peak_allocated_bytes": peak,
        "peak_event": course.peak_index,
        "peak_reserved_bytes": course.peak_reserved,
        "end_allocated_bytes": device.allocated,
        "end_reserved_bytes": device.reserved,
        "series": course.series,
        "oom": course.oom,
        "components_at_peak": _by_component(live.at_peak, stacks),
        "largest_at_peak": _largest(live.at_peak, live.counts, stacks),
        "unattributed_bytes": peak - sum(live.at_peak.values()),
        "fragmentation": _fragmentation(device),
        "steps": live.boundaries,
        "growth": _growth(live, stacks),
    }


def _devices(snapshot: Any) -> Iterator[_Device]:
    segments = (
        snapshot if isinstance(snapshot, list) else snapshot.get("segments") if isinstance(snapshot, dict) else None
    )
    traces = snapshot.get("device_traces") if isinstance(snapshot, dict) else None
    segments = segments if isinstance(segments, list) else []
    traces = traces if isinstance(traces, list) else []
    if len(segments) > MAX_SEGMENTS or sum(len(t) for t in traces[:64] if isinstance(t, list)) > MAX_EVENTS:
        raise SnapshotRefused("the snapshot has more entries than this reader takes")
    by_device: dict[int, list[dict[str, Any]]] = {}
    for segment in segments:
        if isinstance(segment, dict) and _size(segment.get("total_size")) is not None:
            number = segment.get("device")
            by_device.setdefault(number if isinstance(number, int) else 0, []).append(segment)
    for number in sorted({*by_device, *(i for i, t in enumerate(traces[:64]) if isinstance(t, list) and t)}):
        events = traces[number] if 0 <= number < len(traces) and isinstance(traces[number], list) else []
        device = _Device(number, events, by_device.get(number, []))
        for segment in device.segments:
            device.reserved += segment["total_size"]
            device.allocated += sum(
                _size(b.get("size")) or 0 for b in _blocks(segment) if b.get("state") == "active_allocated"
            )
        yield device


def _blocks(segment: dict[str, Any]) -> Iterator[dict[str, Any]]:
    blocks = segment.get("blocks")
    if isinstance(blocks, list):
        for block in blocks:
            if isinstance(block, dict):
                yield block


def _size(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < MAX_SIZE else None


def _action(event: Any) -> Any:
    return event.get("action") if isinstance(event, dict) else None


@dataclass(slots=True)
class _Course:
    peak: int
    peak_index: int
    peak_reserved: int
    series: list[dict[str, int]]
    oom: list[dict[str, Any]]
    skipped: int
    start: int


def _course(device: _Device, freed: str) -> _Course:
    """Allocated and reserved after every event. They are known at the end (the segments), so the start follows."""
    delta = reserve_delta = skipped = 0
    for event in device.events:
        action = _action(event)
        size = _size(event.get("size")) if isinstance(event, dict) else None
        if size is None or not isinstance(action, str):
            skipped += 1
        elif action == "alloc":
            delta += size
        elif action == freed:
            delta -= size
        elif action in _RESERVE:
            reserve_delta += _RESERVE[action] * size
    start = max(0, device.allocated - delta)
    allocated, reserved = start, max(0, device.reserved - reserve_delta)
    peak, peak_index, peak_reserved = allocated, 0, reserved
    series: list[dict[str, int]] = []
    oom: list[dict[str, Any]] = []
    width = max(1, len(device.events) // SERIES_POINTS)
    top = allocated
    for index, event in enumerate(device.events):
        action = _action(event)
        size = _size(event.get("size")) if isinstance(event, dict) else None
        if size is None or not isinstance(action, str):
            continue
        if action == "alloc":
            allocated += size
            top = max(top, allocated)
            if allocated > peak:
                peak, peak_index = allocated, index + 1
        elif action == freed:
            allocated -= size
        elif action in _RESERVE:
            reserved += _RESERVE[action] * size
            peak_reserved = max(peak_reserved, reserved)
        elif action == "oom" and len(oom) < 8:
            oom.append({"event": index, "requested_bytes": size, "free_bytes": _size(event.get("device_free"))})
        if index % width == 0:
            series.append({"event": index, "allocated_bytes": top, "reserved_bytes": reserved})
            top = allocated
    return _Course(peak, peak_index, peak_reserved, series[: SERIES_POINTS * 2], oom, skipped, start)


@dataclass(slots=True)
class _Live:
    at_peak: dict[int, int]
    counts: dict[int, int]
    boundaries: list[dict[str, int]]
    early: dict[int, int] | None
    late: dict[int, int] | None


def _live(device: _Device, freed: str, course: _Course, stacks: _Stacks) -> _Live:
    """Live bytes by stack at the peak and at the ends of optimizer steps."""
    alive, sums, counts = _before(device, freed, stacks)
    at_peak, counts_at_peak = dict(sums), dict(counts)
    early: dict[int, int] | None = None
    late: dict[int, int] | None = None
    boundaries: list[dict[str, int]] = []
    last_optimizer = -1
    for index, event in enumerate(device.events):
        action = _action(event)
        if action == "alloc":
            size, address = _size(event.get("size")), event.get("addr")
            if size is None or type(address) is not int:
                continue
            stack = stacks.number(event.get("frames"))
            alive[address] = (stack, size)
            sums[stack] = sums.get(stack, 0) + size
            counts[stack] = counts.get(stack, 0) + 1
            if stacks.components[stack] in _OPTIMIZER:
                last_optimizer = index
        elif action == freed:
            entry = alive.pop(event.get("addr"), None) if type(event.get("addr")) is int else None
            if entry is not None:
                sums[entry[0]] -= entry[1]
                counts[entry[0]] -= 1
        if index + 1 == course.peak_index:
            at_peak, counts_at_peak = dict(sums), dict(counts)
        if last_optimizer >= 0 and index - last_optimizer == QUIET_EVENTS and len(boundaries) < MAX_BOUNDARIES:
            boundaries.append({"event": last_optimizer, "allocated_bytes": sum(sums.values())})
            last_optimizer = -1
            if len(boundaries) <= 2:
                early = dict(sums)
            late = dict(sums)
    return _Live(at_peak, counts_at_peak, boundaries, early, late)


def _before(
    device: _Device, freed: str, stacks: _Stacks
) -> tuple[dict[int, tuple[int, int]], dict[int, int], dict[int, int]]:
    """What was alive before the first event: freed without having been allocated, or there at the end and never
    allocated in the trace. Of the former nobody knows the stack."""
    unknown = stacks.number([])
    alive: dict[int, tuple[int, int]] = {}
    seen: set[int] = set()
    for event in device.events:
        action = _action(event)
        if action not in ("alloc", freed):
            continue
        address, size = event.get("addr"), _size(event.get("size"))
        if type(address) is not int or size is None or address in seen:
            continue
        seen.add(address)
        if action == freed:
            alive[address] = (unknown, size)
    for segment in device.segments:
        address = segment.get("address")
        for block in _blocks(segment):
            size = _size(block.get("size")) or 0
            own = block.get("address", address)
            if block.get("state") == "active_allocated" and type(own) is int and own not in seen:
                frames = block.get("frames")
                history = block.get("history")
                if not frames and isinstance(history, list) and history and isinstance(history[0], dict):
                    frames = history[0].get("frames")
                alive[own] = (stacks.number(frames), size)
            if type(address) is int:
                address += size
    sums: dict[int, int] = {}
    counts: dict[int, int] = {}
    for stack, size in alive.values():
        sums[stack] = sums.get(stack, 0) + size
        counts[stack] = counts.get(stack, 0) + 1
    return alive, sums, counts


def _by_component(sums: dict[int, int], stacks: _Stacks) -> dict[str, int]:
    totals: dict[str, int] = {}
    for stack, size in sums.items():
        if size:
            name = stacks.components[stack]
            totals[name] = totals.get(name, 0) + size
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _largest(sums: dict[int, int], counts: dict[int, int], stacks: _Stacks) -> list[dict[str, Any]]:
    ordered = sorted(((size, stack) for stack, size in sums.items() if size > 0), reverse=True)[:TOP_STACKS]
    return [
        {
            "num_bytes": size,
            "num_blocks": counts.get(stack, 0),
            "component": stacks.components[stack],
            "frames": list(stacks.frames[stack][:SHOWN_FRAMES]),
        }
        for size, stack in ordered
    ]


def _fragmentation(device: _Device) -> dict[str, Any]:
    """Free bytes inside segments at the end, by stream and for the worst segments."""
    streams: dict[int, dict[str, int]] = {}
    worst: list[tuple[int, dict[str, Any]]] = []
    for segment in device.segments:
        sizes = [(_size(b.get("size")) or 0, b.get("state")) for b in _blocks(segment)]
        free = [size for size, state in sizes if state == "inactive"]
        pending = sum(size for size, state in sizes if state == "active_pending_free")
        allocated = sum(size for size, state in sizes if state == "active_allocated")
        raw = segment.get("stream")
        number = raw if isinstance(raw, int) else 0
        if number in streams or len(streams) < 64:
            row = streams.setdefault(
                number,
                dict.fromkeys(("segments", "reserved_bytes", "allocated_bytes", "free_bytes", "largest_free_bytes"), 0),
            )
            row["segments"] += 1
            row["reserved_bytes"] += segment["total_size"]
            row["allocated_bytes"] += allocated
            row["free_bytes"] += sum(free)
            row["largest_free_bytes"] = max(row["largest_free_bytes"], *free, 0)
        if allocated and free:
            facts = {
                "stream": number,
                "total_bytes": segment["total_size"],
                "allocated_bytes": allocated,
                "free_bytes": sum(free),
                "pending_bytes": pending,
                "largest_free_bytes": max(free),
                "num_blocks": len(sizes),
                "segment_type": str(segment.get("segment_type", ""))[:16],
                "is_expandable": segment.get("is_expandable") is True,
            }
            worst.append((sum(free), facts))
    worst.sort(key=lambda item: -item[0])
    return {
        "streams": {str(k): v for k, v in sorted(streams.items())},
        "segments": [f for _, f in worst[:TOP_SEGMENTS]],
    }


def _growth(live: _Live, stacks: _Stacks) -> list[dict[str, Any]]:
    """Stacks that hold more at the end of the last optimizer step than after the second one."""
    if len(live.boundaries) < 3 or live.early is None or live.late is None:
        return []
    grown = [(size - live.early.get(stack, 0), stack) for stack, size in live.late.items()]
    ordered = sorted(((more, stack) for more, stack in grown if more > 0), reverse=True)[:10]
    steps = len(live.boundaries) - 2
    return [
        {
            "num_bytes": more,
            "bytes_per_step": more // steps,
            "component": stacks.components[stack],
            "frames": list(stacks.frames[stack][:SHOWN_FRAMES]),
        }
        for more, stack in ordered
    ]
