"""Where readable output goes, and how figures and bars are written."""

from __future__ import annotations

import functools

from rich.console import Console

GIB = 1024**3
MAX_WIDTH = 110


@functools.cache
def console() -> Console:
    """Standard output, not wider than reads well; 80 columns where nothing says how wide."""
    found = Console(highlight=False, markup=False, emoji=False)
    if found.width > MAX_WIDTH:
        found.width = MAX_WIDTH
    return found


def gib(num_bytes: float) -> str:
    """A quantity as a person reads it: "78.4 GiB"."""
    value = num_bytes / GIB
    return f"{value:.1f} GiB" if abs(value) >= 0.95 else f"{value:.2f} GiB"


def percent(share: float) -> str:
    """A probability; never rounded up to certainty, nor down to impossibility."""
    if share >= 0.9995:
        return "over 99.9 %"
    if share < 0.0005:
        return "under 0.1 %"
    return f"{100 * share:.4g} %" if share >= 0.9 else f"{100 * share:.3g} %"


def factor(relative: float | None) -> str:
    """A relative step time: "1.04x"."""
    return "not known" if relative is None else f"{relative:.2f}x"


def bar(value: float, whole: float, width: int) -> str:
    """A bar of ``width`` characters, filled as far as value reaches in whole."""
    filled = 0 if whole <= 0 else max(0, min(width, round(width * value / whole)))
    full, empty = ("#", ".") if console().options.ascii_only else ("█", "░")
    return full * filled + empty * (width - filled)
