"""The smallest memory in which a step survives, for both settings of the caching allocator.

Until the allocator is simulated this is an upper bound on the peak: the largest ratio of survival memory to peak
allocated measured on an H200 with Megatron FSDP (36.3 GiB for a 26.2 GiB peak with the default allocator, 20.2 for 19.9
with expandable segments), and the pages that segments are rounded to.
"""

from __future__ import annotations

DEFAULT_RATIO = 1.40
EXPANDABLE_RATIO = 1.02
ROUNDING_BYTES = 64 * 1024**2

ASSUMPTION = (
    "survival_bytes is an upper bound (allocated peak times 1.40 with the default allocator, 1.02 with "
    "expandable_segments): the allocator itself is not simulated yet"
)


def survival_upper_bound(peak_allocated_bytes: int) -> dict[str, int]:
    """Bytes by allocator setting: "default" and "expandable_segments"."""
    return {
        "default": int(peak_allocated_bytes * DEFAULT_RATIO) + ROUNDING_BYTES,
        "expandable_segments": int(peak_allocated_bytes * EXPANDABLE_RATIO) + ROUNDING_BYTES,
    }
