"""Distributions of errors by group, drawn towards that of all runs where a group has few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from estimator.calibration import priors
from estimator.calibration.apply import ALL
from estimator.calibration.observations import Floats, Table
from estimator.calibration.quantiles import QuantileTable, from_runs, posterior, sum_of

MAX_PRIOR_RUNS = 10.0
"""For how many runs of a group all runs stand at most."""
ALLOCATORS = ("default", "expandable_segments")
COVERAGES = (0.95, 0.99)


@dataclass(frozen=True, slots=True)
class ErrorTables:
    tables: Mapping[str, QuantileTable]
    counts: Mapping[str, int]

    def table(self, group: str) -> QuantileTable:
        return self.tables.get(group) or self.tables[ALL]

    def as_dict(self) -> dict[str, Any]:
        """By group: number of held-out runs, central intervals, quantiles at ``LEVELS``."""
        return {
            name: {
                "num_runs": self.counts[name],
                "intervals": {str(c): [round(v, 6) for v in table.interval(c)] for c in COVERAGES},
                "quantiles": [round(value, 8) for value in table.values],
            }
            for name, table in self.tables.items()
        }


def grouped(groups: NDArray[np.str_], errors: Floats, weights: Floats, scale: float) -> ErrorTables:
    """One table for all and one for each group; ``scale``: of the prior."""
    whole_scale, whole_dof = posterior(errors, weights, scale, priors.DEGREES_OF_FREEDOM)
    tables = {ALL: from_runs(errors, whole_scale, whole_dof)}
    counts = {ALL: len(errors)}
    for name in np.unique(groups):
        inside = groups == name
        own = posterior(errors[inside], weights[inside], whole_scale, min(whole_dof, MAX_PRIOR_RUNS))
        tables[str(name)] = from_runs(errors[inside], *own)
        counts[str(name)] = int(inside.sum())
    return ErrorTables(tables, counts)


def peak_tables(strategies: NDArray[np.str_], errors: Floats, weights: Floats) -> ErrorTables:
    """Errors of the corrected peak by sharding strategy."""
    return grouped(strategies, errors, weights, priors.PEAK_SCALE)


def allocator_tables(table: Table) -> ErrorTables:
    """Errors of survival memory over peak, by allocator setting; only of runs whose survival was bisected."""
    rows = [row for row in table.rows if row.measured_survival and row.predicted_survival]
    errors = [
        (row.measured_survival or 0) / row.measured_peak / ((row.predicted_survival or 0) / row.predicted_peak) - 1
        for row in rows
    ]
    groups = np.array([row.allocator for row in rows], dtype=np.str_)
    return grouped(groups, np.array(errors, dtype=float), np.ones(len(rows)), priors.ALLOCATOR_SCALE)


def survival_tables(peaks: ErrorTables, allocators: ErrorTables) -> ErrorTables:
    """Peak and allocator together, for each strategy and setting: taken as independent."""
    tables, counts = {}, {}
    for strategy, peak in peaks.tables.items():
        for setting in ALLOCATORS:
            tables[f"{strategy}/{setting}"] = sum_of(peak, allocators.table(setting))
            counts[f"{strategy}/{setting}"] = min(peaks.counts[strategy], allocators.counts.get(setting, 0))
    return ErrorTables(tables, counts)
