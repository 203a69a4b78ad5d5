"""Bounded robust least squares for the corrections, with priors at the analytic values.

y_i = measured over predicted peak less one = sum_k theta_k share_ik + b / predicted_i + error, with theta_k ~ N(0,
sigma_k), b ~ N(0, sigma_b). Errors are heavy-tailed: Huber's weights, found by iteration. The bounds are those beyond
which a correction would hide a fault of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from estimator.calibration import priors
from estimator.calibration.observations import Floats, Table

HUBER = 1.5
MIN_NOISE = 5e-4
"""Rounding of the allocator: no run is known better than this."""
ITERATIONS = 8
SWEEPS = 2000


@dataclass(frozen=True, slots=True)
class Solution:
    """Last entry of each: the constant, in GiB."""

    values: Floats
    sigmas: Floats
    unbounded: Floats
    """What the runs would want without bounds."""
    noise: float

    def correction(self, shares: Floats) -> Floats:
        """Relative correction of each row's peak."""
        return np.asarray(shares @ self.values, dtype=float)


def solve(table: Table) -> Solution:
    """Coefficients of ``table.names`` and the constant. No row: the priors."""
    prior = prior_sigmas(table.names)
    bounds = np.array([*[priors.MAX_CORRECTION] * len(table.names), priors.MAX_UNACCOUNTED_BYTES / 2**30])
    x, y = table.shares, table.errors
    values = np.zeros(len(prior))
    unbounded, covariance, noise = values, np.asarray(np.diag(prior**2), dtype=float), MIN_NOISE
    for _ in range(ITERATIONS if len(table) else 0):
        left = y - x @ values
        noise = max(MIN_NOISE, 1.4826 * _weighted_median(np.abs(left), table.weights))
        huber = np.minimum(1.0, HUBER * noise / np.maximum(np.abs(left), 1e-12))
        weights = table.weights * huber / noise**2
        precision = (x * weights[:, None]).T @ x + np.diag(prior**-2)
        target = (x * weights[:, None]).T @ y
        covariance = np.asarray(np.linalg.inv(precision), dtype=float)
        unbounded = np.asarray(covariance @ target, dtype=float)
        before, values = values, _bounded(precision, target, bounds, unbounded)
        if np.allclose(before, values, rtol=0, atol=1e-7):
            break
    return Solution(values, np.sqrt(np.diag(covariance)), unbounded, noise)


def prior_sigmas(names: tuple[str, ...]) -> Floats:
    return np.array([*map(priors.component_sigma, names), priors.UNACCOUNTED_SIGMA_BYTES / 2**30])


def _bounded(precision: Floats, target: Floats, bounds: Floats, unbounded: Floats) -> Floats:
    """The minimum of the same parabola within the bounds, one coordinate after the other: the matrix is positive
    definite, so that this converges."""
    values = np.clip(unbounded, -bounds, bounds)
    for _ in range(SWEEPS if (values != unbounded).any() else 0):
        before = values.copy()
        for k in range(len(values)):
            rest = target[k] - precision[k] @ values + precision[k, k] * values[k]
            values[k] = np.clip(rest / precision[k, k], -bounds[k], bounds[k])
        if np.allclose(before, values, rtol=0, atol=1e-9):
            break
    return values


def _weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])
