"""Memory snapshots of torch (``torch.cuda.memory._dump_snapshot``, or what an out-of-memory observer wrote).

A snapshot is a pickle, and a pickle can run code: it is read in a child process with limited memory, by an unpickler
that knows plain containers only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from estimator.diagnose.snapshot.reader import MAX_BYTES, SnapshotRefused

MEMORY_BYTES = 6 << 30
TIMEOUT_SECONDS = 180
MAX_ANSWER_CHARS = 4_000_000

__all__ = ["SnapshotRefused", "differences", "read_snapshot"]


def read_snapshot(
    path: str | os.PathLike[str],
    memory_bytes: int = MEMORY_BYTES,
    timeout_seconds: int = TIMEOUT_SECONDS,
    max_bytes: int = MAX_BYTES,
) -> dict[str, Any]:
    """What :func:`estimator.diagnose.snapshot.analysis.analyse` says about a file.

    Raises SnapshotRefused for anything that is no snapshot, or needs more than it may: nothing in it is executed.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise SnapshotRefused("there is no such file")
    package = Path(__file__).resolve().parents[3]
    environment = {
        **os.environ,
        "PYTHONPATH": str(package),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    limits = [str(memory_bytes), str(timeout_seconds), str(max_bytes)]
    command = [sys.executable, "-m", "estimator.diagnose.snapshot.child", str(file), *limits]
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SnapshotRefused(f"reading took more than {timeout_seconds} s") from None
    if len(done.stdout) > MAX_ANSWER_CHARS:
        raise SnapshotRefused("the snapshot says more than an answer may hold")
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise SnapshotRefused(
            f"reading ended with status {done.returncode}: too large, or made to break the reader"
        ) from None
    if "refused" in answer:
        raise SnapshotRefused(answer["refused"]["message"])
    snapshot: dict[str, Any] = answer["snapshot"]
    return snapshot


def differences(snapshot: Mapping[str, Any], predicted: Mapping[str, int]) -> list[dict[str, Any]]:
    """Each component at the peak of the snapshot beside the estimate's (``Timeline.components_at_peak``), the largest
    gap first. "unknown" are allocations whose stack the table does not know."""
    observed = snapshot.get("components_at_peak", {})
    names = {*observed, *predicted}
    rows = [
        {
            "component": name,
            "observed_bytes": observed.get(name, 0),
            "predicted_bytes": predicted.get(name, 0),
            "gap_bytes": observed.get(name, 0) - predicted.get(name, 0),
        }
        for name in names
    ]
    return sorted(rows, key=lambda row: (-abs(row["gap_bytes"]), row["component"]))
