"""Norms of Transformer Engine: outputs, statistics, and the workspace of the backward kernel.

The backward kernel reduces the gradient of gamma (and beta) over blocks of rows: FP32 [132 multiprocessors x blocks,
width]. Blocks per multiprocessor by width as measured on an H200 (Transformer Engine 2.12.0); other widths take the
nearest measured width below.
"""

from __future__ import annotations

from bisect import bisect_right

from estimator.components import NORMS
from estimator.timeline import Scribe

MULTIPROCESSORS = 132
RMS_BLOCKS_BY_WIDTH = {64: 12, 768: 4, 1024: 3, 1536: 5, 2560: 3, 5120: 1.5, 8192: 2, 12288: 1}
LAYER_BLOCKS_BY_WIDTH = {64: 12, 1024: 2, 2048: 4, 4096: 2, 6144: 1}


def backward_workspace(width: int, normalization: str) -> int:
    """Bytes of the FP32 partial sums for one norm's backward."""
    table = RMS_BLOCKS_BY_WIDTH if normalization == "RMSNorm" else LAYER_BLOCKS_BY_WIDTH
    widths = sorted(table)
    blocks = table[widths[max(0, bisect_right(widths, width) - 1)]]
    vectors = 1 if normalization == "RMSNorm" else 2
    return int(vectors * MULTIPROCESSORS * blocks * width * 4)


def write_statistics(s: Scribe, name: str, rows: int, normalization: str) -> None:
    """FP32 reciprocal deviation per row, and the mean for LayerNorm."""
    if normalization == "LayerNorm":
        s.alloc(f"{name}.mean", rows * 4, NORMS)
    s.alloc(f"{name}.rstd", rows * 4, NORMS)


def free_statistics(s: Scribe, name: str, normalization: str) -> None:
    if normalization == "LayerNorm":
        s.free(f"{name}.mean")
    s.free(f"{name}.rstd")
