"""What a memory snapshot shows, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_GIB = 1 << 30
LARGE_SHARE = 0.06
"""Reserved but not allocated memory above this share of the reserved is worth a sentence."""


def snapshot_summary(snapshot: Mapping[str, Any]) -> str:
    """Three sentences at most: the peak and what lives there, what lies in pieces, what grows."""
    peak = int(snapshot["peak_allocated_bytes"])
    named = {name: n for name, n in snapshot["components_at_peak"].items() if n > 0}
    largest = sorted(named.items(), key=lambda item: -item[1])[:3]
    what = ", ".join(f"{n / _GIB:.2f} GiB {name.replace('_', ' ')}" for name, n in largest)
    sentences = [f"The snapshot's peak is {peak / _GIB:.2f} GiB allocated" + (f": {what}." if what else ".")]
    reserved, allocated = int(snapshot["end_reserved_bytes"]), int(snapshot["end_allocated_bytes"])
    if reserved and reserved - allocated > LARGE_SHARE * reserved:
        idle = reserved - allocated
        sentences.append(f"At its end {idle / _GIB:.2f} GiB of {reserved / _GIB:.2f} GiB reserved are not allocated.")
    growing = [row for row in snapshot.get("growth") or () if isinstance(row, Mapping)]
    if growing:
        grown = sum(int(row.get("num_bytes") or 0) for row in growing)
        sentences.append(f"Between optimizer steps {grown / _GIB:.2f} GiB more stay: see growth.")
    return " ".join(sentences)
