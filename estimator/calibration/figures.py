"""What held-out runs show: errors before and after, coverage and width of the intervals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from estimator.calibration.apply import ALL
from estimator.calibration.error_tables import COVERAGES, peak_tables
from estimator.calibration.observations import Floats, Table

RESAMPLES = 200
AT_ONCE = 5000
MIN_HELD_OUT = 20
"""Fewer runs say nothing about a coverage of 95 %."""


def median_error(errors: Floats) -> float:
    return float(np.median(np.abs(errors)))


def bootstrap_error(errors: Floats) -> float:
    """Standard error of the median of absolute errors, by resampling (of at most AT_ONCE rows, scaled)."""
    n = len(errors)
    if n < 2:
        return float("inf") if n == 0 else abs(float(errors[0]))
    generator = np.random.default_rng(20261201)
    size = min(n, AT_ONCE)
    drawn = np.abs(errors)[generator.integers(0, n, (RESAMPLES, size))]
    return float(np.median(drawn, axis=1).std(ddof=1)) * math.sqrt(size / n)


def error_figures(table: Table, before: Floats, after: Floats) -> dict[str, Any]:
    """By strategy: absolute relative errors of the peak without and with the correction."""
    result: dict[str, Any] = {}
    for name in (ALL, *np.unique(table.strategies)):
        inside = np.ones(len(table), dtype=bool) if name == ALL else table.strategies == name
        if not inside.any():
            continue
        result[str(name)] = {
            "num_runs": int(inside.sum()),
            "num_models": len({row.model for row, wanted in zip(table.rows, inside, strict=True) if wanted}),
            "before": _figures(before[inside]),
            "after": _figures(after[inside]),
            "bootstrap_error_of_median": round(bootstrap_error(before[inside]), 7) if inside.sum() > 1 else None,
        }
    return result


def _figures(errors: Floats) -> dict[str, float]:
    size = np.abs(errors)
    return {
        "median": round(float(np.median(size)), 7),
        "mean": round(float(size.mean()), 7),
        "percentile_90": round(float(np.quantile(size, 0.9, method="higher")), 7),
        "worst": round(float(size.max()), 7),
    }


def held_out_coverage(table: Table, errors: Floats) -> dict[str, Any]:
    """Share of runs within the interval that all runs of other models give; median width over the peak.

    None where there are too few runs or models to say.
    """
    if len(table) < MIN_HELD_OUT or table.num_models < 2:
        return {str(level): None for level in COVERAGES}
    folds = table.folds()
    within = {level: np.zeros(len(table), dtype=bool) for level in COVERAGES}
    widths = {level: np.zeros(len(table)) for level in COVERAGES}
    for fold in np.unique(folds):
        inside = folds == fold
        tables = peak_tables(table.strategies[~inside], errors[~inside], table.weights[~inside])
        for strategy in np.unique(table.strategies[inside]):
            rows = inside & (table.strategies == strategy)
            for level in COVERAGES:
                low, high = tables.table(str(strategy)).interval(level)
                within[level][rows] = (errors[rows] >= low) & (errors[rows] <= high)
                widths[level][rows] = high - low
    return {
        str(level): {
            "covered": round(float(within[level].mean()), 5),
            "median_width": round(float(np.median(widths[level])), 6),
            "num_runs": len(table),
        }
        for level in COVERAGES
    }
