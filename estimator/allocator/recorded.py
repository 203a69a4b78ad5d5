"""Allocation histories of real training steps, kept with this package: what the model must reproduce exactly.

Recorded on an H200 (torch 2.11, default allocator settings) with torch.cuda.memory._record_memory_history over model
build, optimizer build and two iterations of Megatron-Core jobs under torch's fake process group. Names as in
estimator/data/allocator_traces: ``br_*`` are 8-billion-parameter-like layers, ``s_*`` small models, then the strategy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from estimator.allocator.compiled import Ints
from estimator.allocator.trace import Trace

FOLDER = Path(__file__).parent.parent / "data" / "allocator_traces"


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """One history: requested sizes, and what the real allocator made of them."""

    name: str
    trace: Trace
    segments: Ints
    """[i] = bytes (negative: given back) and stream of each cudaMalloc and cudaFree, in order."""
    peak_reserved_bytes: int
    peak_allocated_bytes: int


def recorded_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.npz"))


def load_recorded(name: str) -> RecordedRun:
    """Reads ``estimator/data/allocator_traces/<name>.npz``."""
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as stored:
        kinds, buffers, sizes, streams, segments, peaks = (
            stored[key].astype(np.int64) for key in ("kinds", "buffers", "sizes", "streams", "segments", "peaks")
        )
    stream_names = tuple(f"stream {i}" for i in range(int(streams.max()) + 1))
    trace = Trace(kinds, buffers, sizes, streams, np.zeros_like(kinds), stream_names, ("run",))
    return RecordedRun(name, trace, segments, int(peaks[0]), int(peaks[1]))
