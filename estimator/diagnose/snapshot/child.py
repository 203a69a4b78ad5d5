"""The process that reads a snapshot: limited memory and time, no output but one JSON text.

``python -m estimator.diagnose.snapshot.child PATH MEMORY_BYTES CPU_SECONDS MAX_BYTES``
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

from estimator.diagnose.snapshot.analysis import analyse
from estimator.diagnose.snapshot.reader import SnapshotRefused, load_plain


def limit_process(memory_bytes: int, cpu_seconds: int) -> None:
    """Bound what this process may take, where the system can (not on Windows)."""
    try:
        import resource
    except ImportError:
        return
    for name, value in (
        ("RLIMIT_AS", memory_bytes),
        ("RLIMIT_CPU", cpu_seconds),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_FSIZE", 0),
    ):
        kind = getattr(resource, name)
        _, hard = resource.getrlimit(kind)
        soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (soft, hard))


def run(path: str, memory_bytes: int, cpu_seconds: int, max_bytes: int) -> str:
    limit_process(memory_bytes, cpu_seconds)
    gc.disable()  # millions of containers, no cycles: collecting them would only take time
    try:
        with Path(path).open("rb") as file:
            snapshot = load_plain(file, max_bytes)
        answer = {"snapshot": analyse(snapshot)}
    except SnapshotRefused as error:
        answer = {"refused": {"message": str(error)[:400]}}
    except MemoryError:
        answer = {"refused": {"message": "the snapshot needs more memory than this reader may take"}}
    except OSError as error:
        answer = {"refused": {"message": f"the file cannot be read: {error.strerror}"}}
    return json.dumps(answer, allow_nan=False)


if __name__ == "__main__":
    sys.stdout.write(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
    sys.stdout.flush()
    sys.exit(0)
