"""The smallest memory in which a rank's step survives, for both settings of the caching allocator.

The timeline is replayed through the model of PyTorch's allocator (``estimator.allocator``) under the job's own options
(PYTORCH_CUDA_ALLOC_CONF beyond expandable_segments is taken as unset).
"""

from __future__ import annotations

from collections.abc import Iterable

from estimator.allocator import DEFAULT, EXPANDABLE_SEGMENTS, compile_ops, replay, survival
from estimator.timeline import Timeline

SETTINGS = {"default": DEFAULT, "expandable_segments": EXPANDABLE_SEGMENTS}


def survival_bytes(timeline: Timeline, names: Iterable[str] = tuple(SETTINGS)) -> dict[str, int]:
    """Bytes by allocator setting: "default" and "expandable_segments", or those of them in ``names``."""
    trace = compile_ops(timeline)
    return {name: survival(trace, SETTINGS[name]) for name in names}


def peak_reserved_bytes(timeline: Timeline, name: str) -> int:
    """What the allocator reserves at most where nothing limits it (max_memory_reserved), under one of ``SETTINGS``."""
    return replay(compile_ops(timeline), SETTINGS[name]).peak_reserved_bytes
