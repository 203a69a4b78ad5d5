"""What the page of measured runs shows: runs, predictions beside them, errors by group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.db.models import ProfiledRun, RunPrediction
from app.db.session import Database
from app.problems import of_estimator_error
from app.services import predictions, run_files, runs
from app.web.charts import scatter_plot
from estimator.catalog import find_gpu
from estimator.errors import JobError
from estimator.validation.summary import Figures, figures

FILTERS = ("gpu", "strategy", "outcome")
ROWS = 50
COMPARED = 500
GIB = 1 << 30
SHOWN_BAD = 20


@dataclass(slots=True)
class Imported:
    """What became of an upload."""

    stored: int = 0
    unchanged: int = 0
    bad: list[str] = field(default_factory=list)


def import_upload(database: Database, path: Path) -> Imported:
    """All rows of a file, or none: a bad row is named with its line and nothing is stored."""
    done, rows = Imported(), []
    for row in run_files.read(path):
        if isinstance(row, run_files.BadRow):
            done.bad.append(str(row).replace(str(path), "the file"))
            if len(done.bad) >= SHOWN_BAD:
                break
        else:
            rows.append(row)
    if done.bad:
        return done
    for start in range(0, len(rows), 10_000):
        try:
            stored = runs.store(database, rows[start : start + 10_000])
        except JobError as error:
            done.bad = [f"{p.path}: {p.message}" for p in of_estimator_error(error).errors[:SHOWN_BAD]]
            return done
        done.stored += stored.stored
        done.unchanged += stored.unchanged
    return done


def context(database: Database, query: Mapping[str, str]) -> dict[str, Any]:
    """Everything that measured.html needs."""
    chosen = {name: str(query.get(name) or "").strip()[:64] for name in FILTERS}
    filters = {name: value for name, value in chosen.items() if value}
    filter_error = ""
    if "gpu" in filters:
        try:
            filters["gpu"] = find_gpu(filters["gpu"]).name
        except JobError as error:
            filter_error = error.problems[0].message
            filters.pop("gpu")
    try:
        page = runs.page(database, filters, COMPARED, None)
        shown = runs.page(database, filters, ROWS, query.get("cursor") or None)
    except JobError as error:
        filter_error = error.problems[0].message
        page = shown = runs.page(database, filters, COMPARED, None)
    predicted = predictions.of_runs(database, page.rows) | predictions.of_runs(database, shown.rows)
    pairs = [pair for run in page.rows if (pair := _pair(run, predicted.get(run.fingerprint)))]
    plotted = [(m / GIB, p / GIB, f"{run.run_id}: {100 * (p / m - 1):+.2f} %") for run, m, p in pairs]
    return {
        "filters": chosen,
        "filter_error": filter_error,
        "rows": [(run, predicted.get(run.fingerprint)) for run in shown.rows[:ROWS]],
        "next_cursor": shown.next_cursor,
        "num_compared": len(pairs),
        "scatter": scatter_plot(plotted),
        "groups_of_errors": _groups(pairs),
        "imported": None,
        "upload_error": "",
    }


def _pair(run: ProfiledRun, predicted: RunPrediction | None) -> tuple[ProfiledRun, int, int] | None:
    measured = run.peak_allocated_bytes
    if measured is None or predicted is None or predicted.peak_allocated_bytes is None or run.outcome != "ok":
        return None
    return run, measured, predicted.peak_allocated_bytes


def _groups(pairs: list[tuple[ProfiledRun, int, int]]) -> list[tuple[str, Figures]]:
    by_group: dict[str, list[float]] = {}
    for run, measured, predicted in pairs:
        error = predicted / measured - 1
        by_group.setdefault("all", []).append(error)
        by_group.setdefault(run.strategy or "strategy not known", []).append(error)
    return [(name, figures(errors)) for name, errors in by_group.items()]
