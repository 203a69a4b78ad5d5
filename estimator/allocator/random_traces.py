"""Random allocation traces, and their replay on PyTorch's own allocator (needs a GPU and torch).

    python -m estimator.allocator.random_traces --out random_traces.jsonl

replays each trace under both allocator settings, each in a process of its own, and writes one JSON line a trace and
setting: seed, settings, peak reserved and allocated bytes, and, for the first ``--survivals`` of them, the memory
fraction's bracket: the highest limit that died and the lowest that survived, in bytes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from estimator.allocator.kernel import ALLOC, EMPTY_CACHE, FREE
from estimator.allocator.trace import Event, Trace, from_events

KIB, MIB = 1 << 10, 1 << 20
NUM_STREAMS = 3
SETTINGS = ("expandable_segments:False", "expandable_segments:True")


def random_trace(seed: int, num_events: int = 600, max_live_bytes: int = 6 << 30) -> Trace:
    """A trace of allocations and frees on up to three streams, the same for the same arguments.

    Sizes come from a palette, as a model's do, of small ones (under 1 MiB), middle ones (under 10 MiB) and large ones;
    buffers die in order, in reverse order, or at random, by phases. One trace in four empties the cache in between.
    """
    rng = random.Random(seed)  # only random() is used: it is the same in every Python

    def below(n: int) -> int:
        return int(rng.random() * n)

    palette = [_random_size(rng.random(), rng.random()) for _ in range(4 + below(28))]
    num_streams = 1 + below(NUM_STREAMS)
    empties = rng.random() < 0.25
    live: list[tuple[int, int, int]] = []
    events: list[Event] = []
    num_buffers = live_bytes = 0
    growing, order = 0.6, 0
    for i in range(num_events):
        if i % 60 == 0:
            growing, order = 0.35 + 0.4 * rng.random(), below(3)
            if empties and i and rng.random() < 0.3:
                events.append(Event(EMPTY_CACHE, 0, 0, 0, 0))
        size = palette[below(len(palette))]
        if not live or (rng.random() < growing and live_bytes + size <= max_live_bytes):
            stream = below(num_streams) if rng.random() < 0.4 else 0
            events.append(Event(ALLOC, num_buffers, size, stream, 0))
            live.append((num_buffers, size, stream))
            num_buffers += 1
            live_bytes += size
        else:
            buffer, size, stream = live.pop((0, len(live) - 1, below(len(live)))[order])
            events.append(Event(FREE, buffer, 0, stream, 0))
            live_bytes -= size
    return from_events(events, tuple(f"stream {i}" for i in range(num_streams)))


def _random_size(kind: float, place: float) -> int:
    if kind < 0.25:
        return 1 + int(place**3 * MIB)
    if kind < 0.5:
        return MIB + 1 + int(place * 9 * MIB)
    if kind < 0.9:
        return (10 * MIB + int(place**2 * 300 * MIB)) // 512 * 512
    return 1 + int(place**2 * 1024) * MIB


def _replay_on_gpu(torch: Any, trace: Trace, streams: list[Any]) -> bool:
    """Replays ``trace``; False if it ran out of memory. Leaves nothing allocated and nothing cached."""
    live: dict[int, int] = {}
    survived = True
    rows = zip(trace.kinds.tolist(), trace.buffers.tolist(), trace.sizes.tolist(), trace.streams.tolist(), strict=True)
    try:
        for kind, buffer, size, stream in rows:
            if kind == ALLOC:
                live[buffer] = torch.cuda.caching_allocator_alloc(size, 0, streams[stream])
            elif kind == FREE:
                torch.cuda.caching_allocator_delete(live.pop(buffer))
            else:
                torch.cuda.empty_cache()
    except torch.OutOfMemoryError:
        survived = False
    for pointer in live.values():
        torch.cuda.caching_allocator_delete(pointer)
    return survived


def _bracket(torch: Any, trace: Trace, streams: list[Any], low: int, high: int) -> tuple[int, int]:
    """(highest limit seen to die, lowest seen to survive), bisected to 0.1 %."""
    total = torch.cuda.get_device_properties(0).total_memory
    while high - low > max(2 * MIB, high // 1000):
        limit = (low + high) // 2 // (2 * MIB) * (2 * MIB)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((limit + KIB) / total)
        if _replay_on_gpu(torch, trace, streams):
            high = limit
        else:
            low = limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()
    return low, high


def measure(seeds: range, num_survivals: int) -> Iterator[dict[str, object]]:
    """One record a seed, in this process and under its PYTORCH_CUDA_ALLOC_CONF."""
    torch = importlib.import_module("torch")  # only on the machine with the GPU
    streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(NUM_STREAMS - 1))]
    for seed in seeds:
        trace = random_trace(seed)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        _replay_on_gpu(torch, trace, streams)
        peak_reserved, peak_allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        record: dict[str, object] = {
            "seed": seed,
            "settings": os.environ["PYTORCH_CUDA_ALLOC_CONF"],
            "peak_reserved_bytes": peak_reserved,
            "peak_allocated_bytes": peak_allocated,
            "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name(0),
        }
        if seed - seeds.start < num_survivals:
            low = peak_allocated - 2 * MIB
            record["died_at_bytes"], record["survived_at_bytes"] = _bracket(torch, trace, streams, low, peak_reserved)
        yield record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--survivals", type=int, default=15)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        with arguments.out.open("a") as out:
            for record in measure(range(1, 1 + arguments.count), arguments.survivals):
                out.write(json.dumps(record) + "\n")
                out.flush()
        return
    arguments.out.unlink(missing_ok=True)
    for settings in SETTINGS:
        command = [sys.executable, "-m", "estimator.allocator.random_traces", "--measure", "--out", str(arguments.out)]
        command += ["--count", str(arguments.count), "--survivals", str(arguments.survivals)]
        subprocess.run(command, check=True, env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings})


if __name__ == "__main__":
    main()
