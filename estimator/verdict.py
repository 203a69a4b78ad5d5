"""Does it fit, and how surely.

``required`` = survival memory + what lies outside the allocator. The probability is that of a normal error: one
standard
deviation of :data:`SURVIVAL_SIGMA` of the survival memory, and that of the overhead. An allocator cap is compared with
the survival memory alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SURVIVAL_SIGMA = 0.01


@dataclass(frozen=True, slots=True)
class Verdict:
    fits: bool
    probability: float
    headroom_bytes: int
    """Usable minus required; negative when it does not fit."""


def fit_probability(margin_bytes: float, sigma_bytes: float) -> float:
    """P(error < margin) for a normal error."""
    if sigma_bytes <= 0:
        return 1.0 if margin_bytes >= 0 else 0.0
    return 0.5 * math.erfc(-margin_bytes / sigma_bytes / math.sqrt(2))


def judge(
    survival_bytes: int,
    overhead_bytes: int,
    overhead_sigma_bytes: float,
    usable_bytes: int,
    memory_limit_bytes: int | None,
    min_probability: float,
) -> Verdict:
    sigma = SURVIVAL_SIGMA * survival_bytes
    margin = usable_bytes - survival_bytes - overhead_bytes
    probability = fit_probability(margin, math.hypot(sigma, overhead_sigma_bytes))
    if memory_limit_bytes is not None:
        limit_margin = memory_limit_bytes - survival_bytes
        probability = min(probability, fit_probability(limit_margin, sigma))
        margin = min(margin, limit_margin)
    return Verdict(probability >= min_probability, probability, margin)
