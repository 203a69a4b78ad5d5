"""From measured runs to a calibration: screen, solve, hold out, describe.

What is claimed is what held-out runs show: for each fold of models the coefficients are solved without it, and errors
are those of the runs in it. The correction is applied only as far (0, a quarter ... all of it) as it does not make the
held-out median of any strategy worse by more than that median's bootstrap standard error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from estimator.calibration import priors
from estimator.calibration.apply import ALL, CONTENT_VERSION, canonical
from estimator.calibration.coefficients import Solution, prior_sigmas, solve
from estimator.calibration.error_tables import allocator_tables, peak_tables, survival_tables
from estimator.calibration.figures import bootstrap_error, error_figures, held_out_coverage, median_error
from estimator.calibration.observations import Floats, Observation, Table
from estimator.calibration.outliers import Screened, screen
from estimator.calibration.overheads import overheads
from estimator.calibration.quantiles import LEVELS

PARTS = (1.0, 0.75, 0.5, 0.25, 0.0)
MIN_MODELS = 3
"""With fewer, leaving one out says nothing about another: the coefficients are reported, not applied."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Errors of each row of a table (measured over corrected, less one), corrected without the row's own model."""

    part: float
    errors: Floats
    reason: str


def fit(
    rows: Sequence[Observation], stack: str, gpu_family: str, estimator_version: str, created_at: str, left_out: int = 0
) -> dict[str, Any]:
    """The document of a calibration (``from_document`` makes it usable). Deterministic: equal rows, equal id.

    ``left_out``: how many runs of the check split the caller has kept away.
    """
    rows = sorted(rows, key=lambda row: row.run_id)
    everything = Table.of(rows)
    screened = screen(everything, gpu_family)
    table = everything.only(screened.keep)
    solution = solve(table)
    held_out = _held_out(table)
    judged = table.only(~table.seen)
    errors = held_out.errors[~table.seen]
    peaks = peak_tables(judged.strategies, errors, judged.weights)
    allocators = allocator_tables(judged)
    document: dict[str, Any] = {
        "content_version": CONTENT_VERSION,
        "stack": stack,
        "gpu_family": gpu_family,
        "created_at": created_at,
        "provenance": _provenance(rows, table, estimator_version) | {"num_left_out_of_check": left_out},
        "applied_part": held_out.part,
        "applied_because": held_out.reason,
        "coefficients": _coefficients(table, solution, held_out.part),
        "unaccounted": _unaccounted(solution, held_out.part, len(table)),
        "noise": round(solution.noise, 6),
        "overhead": overheads(table.rows, gpu_family),
        "levels": list(LEVELS),
        "errors": {
            "peak": peaks.as_dict(),
            "survival": survival_tables(peaks, allocators).as_dict(),
            "allocator": allocators.as_dict(),
        },
        "held_out": error_figures(judged, judged.errors, errors),
        "coverage": held_out_coverage(judged, errors),
        "outliers": [outlier.as_dict() for outlier in screened.outliers],
        "structural": _structural(table, solution, screened),
    }
    return {"calibration_id": identify(document), **document}


def identify(document: dict[str, Any]) -> str:
    """The id of this content."""
    return "cal_" + hashlib.sha256(canonical(document)).hexdigest()[:24]


def _held_out(table: Table) -> HeldOut:
    if table.num_models < MIN_MODELS or table.seen.all():
        reason = f"runs of {table.num_models} models: nothing could be held out to show that a correction helps"
        return HeldOut(0.0, table.errors, reason)
    folds = table.folds()
    corrections = np.zeros(len(table))
    for fold in np.unique(folds):
        inside = folds == fold
        corrections[inside] = solve(table.only(~inside)).correction(table.shares[inside])
    judged = ~table.seen
    names = [ALL, *np.unique(table.strategies[judged])]
    groups = {n: judged & ((table.strategies == n) if n != ALL else True) for n in names}
    limits = {n: median_error(table.errors[rows]) + bootstrap_error(table.errors[rows]) for n, rows in groups.items()}
    allowed: list[tuple[float, float, Floats]] = []
    for part in PARTS:
        errors = (1 + table.errors) / (1 + part * corrections) - 1
        worse = [n for n, rows in groups.items() if part and median_error(errors[rows]) > limits[n]]
        if not worse:
            allowed.append((float(np.abs(errors[judged]).mean()), part, errors))
    _, part, errors = min(allowed, key=lambda found: (found[0], found[1]))
    reason = "the part with the least mean held-out error that makes no strategy's median worse"
    return HeldOut(part, errors, reason)


def _provenance(rows: Sequence[Observation], table: Table, estimator_version: str) -> dict[str, Any]:
    ids = "\n".join(row.run_id for row in rows)
    return {
        "estimator_version": estimator_version,
        "num_runs": len(rows),
        "num_fitted": len(table),
        "num_models": table.num_models,
        "num_seen_before": int(table.seen.sum()),
        "num_simulated": sum(row.method == "simulated" for row in rows),
        "run_ids_sha256": hashlib.sha256(ids.encode()).hexdigest(),
    }


def _coefficients(table: Table, solution: Solution, part: float) -> list[dict[str, Any]]:
    prior = prior_sigmas(table.names)
    return [
        {
            "name": name,
            "value": round(float(solution.values[k]), 7),
            "sigma": round(float(solution.sigmas[k]), 7),
            "prior_sigma": float(prior[k]),
            "applied": round(part * float(solution.values[k]), 7),
            "source": "fitted" if solution.sigmas[k] < 0.9 * prior[k] else "prior",
        }
        for k, name in enumerate(table.names)
    ]


def _unaccounted(solution: Solution, part: float, num_rows: int) -> dict[str, Any]:
    value, sigma = float(solution.values[-1]) * 2**30, float(solution.sigmas[-1]) * 2**30
    return {
        "value_bytes": round(value),
        "sigma_bytes": round(sigma),
        "prior_sigma_bytes": priors.UNACCOUNTED_SIGMA_BYTES,
        "applied_bytes": round(part * value),
        "source": "fitted" if num_rows and sigma < 0.9 * priors.UNACCOUNTED_SIGMA_BYTES else "prior",
    }


def _structural(table: Table, solution: Solution, screened: Screened) -> list[str]:
    """What looks like a fault of the model, for those who mend it."""
    found = [
        f"{name} wants a correction of {100 * float(solution.unbounded[k]):+.1f} %: more than "
        f"{100 * priors.MAX_CORRECTION:.0f} % is a fault of the model, so the correction stops there"
        for k, name in enumerate(table.names)
        if abs(solution.unbounded[k]) > priors.MAX_CORRECTION
    ]
    if abs(solution.unbounded[-1]) * 2**30 > priors.MAX_UNACCOUNTED_BYTES:
        found.append("unaccounted bytes want more than their bound")
    return found + [
        f"{name}: so many runs contradict their job that the model is suspected, not the runs; they were kept"
        for name in screened.suspicious
    ]
