"""Does it fit, and how surely.

``required`` = survival memory + what lies outside the allocator. The probability is that of the calibration's
distribution of errors of the survival memory, with a normal error of the overhead. An allocator cap is compared with
the survival memory alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from estimator.calibration import QuantileTable


@dataclass(frozen=True, slots=True)
class Verdict:
    fits: bool
    probability: float
    headroom_bytes: int
    """Usable minus required; negative when it does not fit."""


def judge(
    survival_bytes: int,
    overhead_bytes: int,
    overhead_sigma_bytes: float,
    usable_bytes: int,
    memory_limit_bytes: int | None,
    min_probability: float,
    errors: QuantileTable,
) -> Verdict:
    """``errors``: of the survival memory, measured over predicted less one."""
    margin = usable_bytes - survival_bytes - overhead_bytes
    if survival_bytes <= 0:  # nothing that an error could be relative to
        return Verdict(margin >= 0, float(margin >= 0), margin)
    probability = errors.below_with_noise(margin / survival_bytes, overhead_sigma_bytes / survival_bytes)
    if memory_limit_bytes is not None:
        limit_margin = memory_limit_bytes - survival_bytes
        probability = min(probability, errors.below(limit_margin / survival_bytes))
        margin = min(margin, limit_margin)
    return Verdict(probability >= min_probability, probability, margin)
