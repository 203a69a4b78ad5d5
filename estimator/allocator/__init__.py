"""A model of PyTorch's CUDA caching allocator, replaying what a rank allocates and frees. See docs/allocator.md."""

from estimator.allocator.replay import Death, Replay, replay, survival, warm
from estimator.allocator.settings import (
    DEFAULT,
    EXPANDABLE_SEGMENTS,
    AllocatorSettings,
    AllocatorSettingsError,
    parse_alloc_conf,
)
from estimator.allocator.trace import Trace, TraceError, compile_ops

__all__ = [
    "DEFAULT",
    "EXPANDABLE_SEGMENTS",
    "AllocatorSettings",
    "AllocatorSettingsError",
    "Death",
    "Replay",
    "Trace",
    "TraceError",
    "compile_ops",
    "parse_alloc_conf",
    "replay",
    "survival",
    "warm",
]
