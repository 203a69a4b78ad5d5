"""What ``oombudsman calibrate`` and ``calibrations`` do and print."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from app.cli.console import console
from app.cli.database import opened
from app.cli.inputs import pairs
from app.services import calibrations, predictions
from app.services.calibration_files import fit_files
from estimator.calibration import shipped, stack_key
from estimator.catalog import find_gpu
from estimator.reading import read_stack


def of_database(gpu: str, stack: Sequence[str], activate: bool, processes: int) -> dict[str, Any]:
    """Predict what is not predicted yet, fit, keep, and activate if asked for."""
    family = find_gpu(gpu).family
    key = stack_key(read_stack(pairs(stack)))
    with opened() as database:
        with _progress("predicting") as advance:
            started = time.monotonic()
            predicted = predictions.fill(
                database, key, calibrations.gpus_of(family), processes=processes, progress=advance
            )
            filled = time.monotonic() - started
        started = time.monotonic()
        done = calibrations.fit(database, key, family)
        fitted = time.monotonic() - started
        if activate:
            calibrations.activate(database, done.calibration_id)
        found = calibrations.get(database, done.calibration_id) or {}
    timing = {"predicted": predicted, "predicting_seconds": round(filled, 2), "fitting_seconds": round(fitted, 2)}
    return {**found, "timing": timing}


def of_files(files: list[Path], gpu: str) -> dict[str, Any]:
    """Fit records that lie in files. Raises JobError."""
    return fit_files(files, find_gpu(gpu).family)


@contextmanager
def _progress(what: str) -> Iterator[Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console(), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda count: bar.update(task, completed=count)


def print_versions(items: Iterable[Mapping[str, Any]]) -> None:
    """One line a version, the shipped ones last."""
    out = console()
    for item in items:
        held_out, known = item["held_out"], item["provenance"]
        errors = " to ".join(f"{100 * held_out[k]['median']:.2f} %" for k in ("before", "after")) if held_out else "-"
        state = "active" if item["active"] else item["created_at"][:10]
        out.print(f"{item['calibration_id']}  {state:10}  {item['gpu_family']}, {item['stack']}")
        out.print(f"{'':30}{known['num_fitted']} of {known['num_runs']} runs; median error, held out: {errors}")
    for shipped_one in shipped():
        stack = shipped_one.stack or "any stack"
        out.print(f"{shipped_one.calibration_id}  {'shipped':10}  {shipped_one.gpu_family}, {stack}")


def print_calibration(found: Mapping[str, Any]) -> None:
    """What a person wants to know before activating it."""
    out = console()
    known = found["provenance"]
    state = "active" if found.get("active") else "shipped" if found.get("shipped") else "not active"
    out.print(f"{found['calibration_id']} ({state}): {found['gpu_family']} GPUs, {found['stack'] or 'any stack'}")
    out.print(
        f"{known['num_fitted']} of {known['num_runs']} runs of {known['num_models']} models, "
        f"{known['num_simulated']} simulated; correction applied: {100 * found['applied_part']:.0f} % "
        f"({found['applied_because']})"
    )
    if known["num_left_out_of_check"]:
        out.print(f"{known['num_left_out_of_check']} runs of the check split left out: it is never fitted to")
    table = Table(box=None, pad_edge=False, padding=(0, 1), title="Held out by model", title_justify="left")
    for column in ("strategy", "runs", "median before", "after", "90 % before", "after", "95 % interval"):
        table.add_column(column, justify="left" if column == "strategy" else "right", no_wrap=True)
    for name, row in found["held_out"].items():
        low, high = found["errors"]["peak"].get(name, found["errors"]["peak"]["all"])["intervals"]["0.95"]
        figures = [f"{100 * row[k][q]:.2f} %" for q in ("median", "percentile_90") for k in ("before", "after")]
        table.add_row(name, str(row["num_runs"]), *figures, f"{100 * low:+.2f} to {100 * high:+.2f} %")
    if found["held_out"]:
        out.print(table)
    for level, row in found["coverage"].items():
        if row:
            out.print(
                f"{level} intervals: {100 * row['covered']:.2f} % of {row['num_runs']} held-out runs inside, "
                f"median width {100 * row['median_width']:.2f} % of the peak"
            )
    for row in found["coefficients"]:
        if row["source"] == "fitted":
            value = f"{100 * row['value']:+.2f} % ± {100 * row['sigma']:.2f}"
            out.print(f"  {row['name']}: {value} (applied {100 * row['applied'] + 0.0:.2f} %)")
    for name, row in found["overhead"].items():
        out.print(f"  {name}: {row['mean_bytes'] >> 20} MiB ± {round(row['sigma_bytes']) >> 20} ({row['source']})")
    for line in found["structural"]:
        out.print(f"  fault of the model? {line}")
    for row in found["outliers"][:20]:
        out.print(f"  left out: {row['run_id']}: {row['reason']}")
    if "timing" in found:
        t = found["timing"]
        out.print(
            f"{t['predicted']} predictions made in {t['predicting_seconds']} s, fitted in {t['fitting_seconds']} s"
        )
