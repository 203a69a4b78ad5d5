"""The distribution of a relative error as quantiles at fixed levels, straight lines between them.

Relative error: measured over predicted, less one. A table is what a calibration stores: answering does not
need the runs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

_LOWER = (
    1e-6, 1e-5, 1e-4, 1e-3, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075,
    0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45,
)  # fmt: skip
LEVELS = (*_LOWER, 0.5, *(1 - level for level in reversed(_LOWER)))

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class QuantileTable:
    """``values[i]`` is the quantile at ``LEVELS[i]``, never falling."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.values) != len(LEVELS) or any(b < a for a, b in zip(self.values, self.values[1:], strict=False)):
            raise ValueError(f"a table has {len(LEVELS)} quantiles in rising order")
        if not all(math.isfinite(value) and value > -1 for value in self.values):
            raise ValueError("a quantile of a relative error is finite and above -1")

    def quantile(self, level: float) -> float:
        """The error that a share ``level`` of runs stays below; outside of the levels the outermost."""
        return float(np.interp(level, LEVELS, self.values))

    def interval(self, coverage: float) -> tuple[float, float]:
        """The central interval: as much is left out below as above."""
        return self.quantile((1 - coverage) / 2), self.quantile((1 + coverage) / 2)

    def below(self, limit: float) -> float:
        """P(error <= limit); 0 and 1 beyond the outermost quantiles."""
        values = self.values
        if limit < values[0]:
            return 0.0
        if limit >= values[-1]:
            return 1.0
        right = max(1, bisect_left(values, limit))
        low, high = values[right - 1], values[right]
        share = 1.0 if high == low else (limit - low) / (high - low)
        return LEVELS[right - 1] + share * (LEVELS[right] - LEVELS[right - 1])

    def below_with_noise(self, limit: float, sigma: float) -> float:
        """P(error + e <= limit) for a normal e of this standard deviation, exact for the lines between quantiles."""
        if sigma < 1e-9:
            return self.below(limit)
        z = [(limit - value) / sigma for value in self.values]
        phi = [0.5 * math.erfc(-v / math.sqrt(2)) for v in z]
        primitive = [
            v * p + math.exp(-v * v / 2) / math.sqrt(2 * math.pi) if v > -38 else 0.0
            for v, p in zip(z, phi, strict=True)
        ]
        total = LEVELS[0] * phi[0] + (1 - LEVELS[-1]) * phi[-1]
        for i in range(len(z) - 1):
            width = z[i] - z[i + 1]
            mean = (primitive[i] - primitive[i + 1]) / width if width > 1e-6 else (phi[i] + phi[i + 1]) / 2
            total += (LEVELS[i + 1] - LEVELS[i]) * mean
        return min(1.0, max(0.0, total))


def from_runs(errors: Sequence[float] | Floats, scale: float, dof: float) -> QuantileTable:
    """Errors of runs that were held out, with a Student t where they are too few.

    ``scale`` and ``dof``: of the t (:func:`posterior`). From 20 runs on, a level is the order statistic of split
    conformal prediction (the ceil((n+1) level)-th smallest, floor below the median), which covers whatever the
    distribution is; beyond the outermost runs the wider of the t and of the outermost run.
    """
    levels = np.asarray(LEVELS)
    values = scale * student_quantiles(dof)
    ordered = np.sort(np.asarray(errors, dtype=float))
    n = len(ordered)
    if n >= 20:
        low = np.floor((n + 1) * levels).astype(int)
        high = np.ceil((n + 1) * levels).astype(int)
        for i, level in enumerate(levels):
            if level < 0.5:
                values[i] = ordered[low[i] - 1] if low[i] >= 1 else min(values[i], ordered[0])
            elif level > 0.5:
                values[i] = ordered[high[i] - 1] if high[i] <= n else max(values[i], ordered[-1])
            else:
                values[i] = np.median(ordered)
    return table_of(values)


@cache
def _grid() -> Floats:
    """Where the density is integrated: fine in the middle, reaching beyond the outermost level at 3 degrees."""
    return np.asarray(np.sinh(np.linspace(0.0, 6.0, 40_001)), dtype=float)


def student_quantiles(dof: float) -> Floats:
    """Quantiles of Student's t at ``LEVELS``, by integrating its density (to 0.1 % from 3 degrees of freedom on).

    Not scipy's: where scipy is installed, numba loads its linear algebra, which every command would wait for.
    """
    x = _grid()
    log_constant = math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2) - 0.5 * math.log(dof * math.pi)
    density = np.exp(log_constant - (dof + 1) / 2 * np.log1p(x * x / dof))
    mass = np.concatenate(([0.0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(x))))
    upper = np.interp(np.asarray(LEVELS)[len(_LOWER) :] - 0.5, mass, x)
    return np.concatenate((-upper[:0:-1], upper))


def posterior(errors: Floats, weights: Floats, scale: float, dof: float) -> tuple[float, float]:
    """Scale and degrees of freedom after these errors: the prior counts as ``dof`` runs of size ``scale``."""
    n = float(weights.sum())
    after = dof + n
    return math.sqrt((dof * scale**2 + float((weights * errors**2).sum())) / after), after


def sum_of(first: QuantileTable, second: QuantileTable) -> QuantileTable:
    """The distribution of the sum of two independent errors."""
    levels = np.asarray(LEVELS)
    weights = np.diff(np.concatenate(([0.0], (levels[1:] + levels[:-1]) / 2, [1.0])))
    values = np.add.outer(np.asarray(first.values), np.asarray(second.values)).ravel()
    mass = np.outer(weights, weights).ravel()
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(mass[order]) - mass[order] / 2
    return table_of(np.interp(levels, reached, values[order]))


def table_of(values: Floats) -> QuantileTable:
    """A table from raw quantiles: made monotone, and kept above -1."""
    rising = np.maximum.accumulate(np.clip(values, -0.9, 10.0))
    return QuantileTable(tuple(float(value) for value in rising))
