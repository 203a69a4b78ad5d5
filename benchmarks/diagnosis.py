"""What reading evidence costs: a log of 100 MB, and a memory snapshot of 500 MB in its child process.

Run: .venv/bin/python benchmarks/diagnosis.py. Writes both to a temporary folder first; prints seconds and MiB.
"""

from __future__ import annotations

import argparse
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LINE = " [2026-01-01 10:00:00] iteration {:8d}/ 100000 | elapsed time per iteration (ms): 1234.5 | lm loss: 1.2E+00 |\n"
OOM = (
    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of "
    "79.11 GiB of which 1.25 GiB is free. Of the allocated memory 70.12 GiB is allocated by PyTorch, and 0.55 GiB is "
    "reserved by PyTorch but unallocated.\n"
)
READ_LOG = """
import resource, sys, time
from estimator.diagnose import diagnose, file_lines, parse_evidence
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started = time.perf_counter()
with open(sys.argv[1], "rb") as file:
    found = diagnose(parse_evidence(file_lines(file)))
seconds = time.perf_counter() - started
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert found.evidence.first is not None
print(f"{seconds:.2f} s, {peak / 1024:.0f} MiB in all, {(peak - before) / 1024:.0f} MiB more than before")
"""


def write_log(path: Path, num_bytes: int) -> None:
    with path.open("w") as file:
        written = number = 0
        while written < num_bytes:
            number += 1
            line = LINE.format(number)
            file.write(line)
            written += len(line)
        file.write(OOM)


def write_snapshot(path: Path, num_bytes: int) -> None:
    """Allocations and frees of a made-up step, each with a stack of its own list, as torch writes them."""
    names = ("fused_adam.py", "mlp.py", "attention.py", "cross_entropy.py", "param_and_grad_buffer.py")
    stacks = [
        [{"filename": f"/opt/x/{names[i % 5]}", "name": f"function_{i}_{j}", "line": j} for j in range(30)]
        for i in range(2000)
    ]
    size = 1 << 20
    per_event = 43  # bytes as pickled
    events: list[dict[str, Any]] = []
    for number in range(num_bytes // per_event):
        action = ("alloc", "free_requested", "free_completed")[number % 3]
        event = {"action": action, "addr": number // 3 * size, "size": size, "stream": 0, "time_us": number}
        events.append(event | {"frames": stacks[number % len(stacks)]})
    blocks = [{"address": 0, "size": size, "requested_size": size, "state": "inactive", "frames": []}]
    segment = {"address": 0, "total_size": size, "device": 0, "stream": 0, "segment_type": "large", "blocks": blocks}
    with path.open("wb") as file:
        pickle.dump({"segments": [segment], "device_traces": [events]}, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log-mb", type=int, default=100)
    parser.add_argument("--snapshot-mb", type=int, default=500)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log, snapshot = Path(folder) / "train.log", Path(folder) / "memory.pickle"
        write_log(log, options.log_mb * 10**6)
        shown = subprocess.run([sys.executable, "-c", READ_LOG, str(log)], check=True, capture_output=True, text=True)
        print(f"log of {log.stat().st_size / 1e6:.0f} MB: {shown.stdout.strip()}")
        write_snapshot(snapshot, options.snapshot_mb * 10**6)
        from estimator.diagnose.snapshot import read_snapshot

        started = time.perf_counter()
        answer = read_snapshot(snapshot)
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024**2
        size = snapshot.stat().st_size / 1e6
        print(f"snapshot of {size:.0f} MB, {answer['num_events']} events: {seconds:.1f} s, child of {peak:.2f} GiB")


if __name__ == "__main__":
    main()
