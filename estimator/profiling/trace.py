"""The allocator's history of a run, made small: what was asked for, on which stream, in which order, by what."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

_MAX_ENTRIES = 2_000_000
_MAX_FRAMES = 14
_KEPT_FROM = ("site-packages/", "dist-packages/", "/site/", "/estimator/", "python3.12/", "python3.11/")


class History:
    """Records every allocation and free of this process from ``start`` on."""

    def start(self) -> None:
        import torch

        torch.cuda.init()
        torch.cuda.memory._record_memory_history(
            enabled="all", context="all", stacks="python", max_entries=_MAX_ENTRIES
        )

    def write(self, path: Path, result: dict[str, Any], marks: list[tuple[str, int]]) -> None:
        """Write the history with the run's record as gzipped JSON."""
        import torch

        try:
            entries = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
            document = compact(entries, marks)
        except Exception as error:  # the record is worth more than its trace
            document = {"error": repr(error)}
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(path, "wt") as stream:
            json.dump({"record": result, **document}, stream)


def _frames(entry: dict[str, Any]) -> str:
    lines = []
    for frame in entry.get("frames", [])[:_MAX_FRAMES]:
        name = str(frame["filename"])
        for start in _KEPT_FROM:
            name = name.rsplit(start, 1)[-1]
        lines.append(f"{name}:{frame['line']}:{frame['name']}")
    return "|".join(lines)


def compact(entries: list[dict[str, Any]], marks: list[tuple[str, int]]) -> dict[str, Any]:
    """Torch's trace entries as ``events`` [action, address, bytes, stream, frames]; the last two are table indices.

    Bytes are what was requested for ``alloc`` and ``free_*``, and the segment's size for ``segment_*``. ``phases``
    holds [name, number of events before its end]: marks and entries share the clock (microseconds since the epoch).
    """
    frames: dict[str, int] = {}
    streams: dict[int, int] = {}
    events: list[list[Any]] = []
    times: list[int] = []
    for entry in entries:
        if entry["action"] == "snapshot":
            continue
        frame = frames.setdefault(_frames(entry), len(frames))
        stream = streams.setdefault(entry["stream"], len(streams))
        events.append([entry["action"], entry["addr"], entry["size"], stream, frame])
        times.append(entry.get("time_us", 0))
    phases = [[name, sum(1 for moment in times if moment <= end)] for name, end in marks]
    return {"events": events, "frames": list(frames), "streams": list(streams), "phases": phases}
