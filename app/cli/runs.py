"""``oombudsman runs``: import files, list what is stored."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from app.cli.console import console, gib
from app.cli.database import opened
from app.cli.failures import Failure, warn
from app.cli.inputs import read_config, refusal
from app.db.session import Database
from app.problems import Problem, of_estimator_error, of_validation_error
from app.schemas import EstimateBody, Run
from app.services import predictions, run_files, runs
from estimator import SCHEMA_VERSION
from estimator.catalog import find_gpu
from estimator.errors import JobError

BATCH = 1000
"""Rows committed together: what is counted as stored survives a kill."""
SHOWN_BAD_ROWS = 20


class _Import:
    def __init__(self, database: Database, keep_going: bool) -> None:
        self.database, self.keep_going = database, keep_going
        self.stored = self.unchanged = self.bad = 0
        self.waiting: list[Run] = []

    def take(self, row: Run | run_files.BadRow) -> None:
        if isinstance(row, run_files.BadRow):
            self.refuse(str(row))
            return
        self.waiting.append(row)
        if len(self.waiting) >= BATCH:
            self.flush()

    def refuse(self, message: str) -> None:
        """A bad row ends the import, unless it is to go on; batches before it are stored."""
        if not self.keep_going:
            raise refusal("FILE", message, "mend it, or --keep-going to store the others")
        self.bad += 1
        if self.bad <= SHOWN_BAD_ROWS:
            warn(message)

    def flush(self) -> None:
        batch, self.waiting = self.waiting, []
        if not batch:
            return
        try:
            done = runs.store(self.database, batch)
        except JobError as error:
            if not self.keep_going:
                raise Failure(_named(of_estimator_error(error), batch)) from error
            for run in batch:
                self._one(run)
            return
        self.stored += done.stored
        self.unchanged += done.unchanged

    def _one(self, run: Run) -> None:
        try:
            done = runs.store(self.database, [run])
        except JobError as error:
            self.refuse(f"run {run.run_id!r}: {error}")
            return
        self.stored += done.stored
        self.unchanged += done.unchanged


def _named(problem: Problem, batch: list[Run]) -> Problem:
    """The problem of a batch, with run ids in the place of positions in it."""

    def name(path: str) -> str:
        match = re.match(r"runs\[(\d+)\]\.", path)
        return f"run {batch[int(match[1])].run_id!r}: {path[match.end() :]}" if match else path

    return replace(problem, errors=tuple(replace(e, path=name(e.path)) for e in problem.errors))


def import_files(files: list[Path], keep_going: bool, about: Path | None = None) -> str:
    """Store the runs of all files; says how many. ``about``: a file with the job of logs and snapshots.

    Raises Failure for the first bad row, unless it is to go on.
    """
    known = None if about is None else _about(about)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        opened() as database,
        Progress(*columns, console=console(), transient=True, disable=not sys.stderr.isatty()) as bar,
    ):
        work = _Import(database, keep_going)
        for path in files:
            try:
                task = bar.add_task(path.name, total=None)
                for row in run_files.read(path, known):
                    work.take(row)
                    bar.update(task, completed=work.stored + work.unchanged)
                work.flush()
            except OSError as error:
                raise refusal("FILE", f"{path}: {error.strerror}") from error
    refused = f", {work.bad} refused" if work.bad else ""
    return f"{work.stored} stored, {work.unchanged} known already{refused}"


def _about(path: Path) -> run_files.About:
    """An estimate request, or a run without measurements, as YAML or JSON. Raises Failure naming what is wrong."""
    document = read_config(path)
    rank, allocator = document.pop("rank", 0), document.pop("allocator", "default")
    try:
        body = EstimateBody.model_validate(document)
    except ValidationError as error:
        raise Failure(of_validation_error(error, EstimateBody)) from error
    if isinstance(rank, bool) or not isinstance(rank, int) or allocator not in ("default", "expandable_segments"):
        raise refusal("--about", "rank is a whole number, allocator is default or expandable_segments")
    job = body.job.model_dump(exclude_unset=True)
    return run_files.About(job, body.cluster.gpu, body.cluster.num_gpus, rank, allocator, body.stack)


def newest(gpu: str | None, limit: int) -> dict[str, Any]:
    """The newest runs with predictions, as ``--json`` prints them. Raises JobError for an unknown GPU."""
    filters = {"gpu": find_gpu(gpu).name} if gpu else {}
    with opened() as database:
        page = runs.page(database, filters, limit, None)
        predicted = predictions.of_runs(database, page.rows)
        items = [runs.as_plain(row, predicted.get(row.fingerprint)) for row in page.rows]
    return {"items": items, "next_cursor": page.next_cursor, "schema_version": SCHEMA_VERSION}


def print_runs(found: Mapping[str, Any]) -> None:
    """One line a run: measured and predicted peak."""
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for column in ("run", "gpu", "strategy", ""):
        table.add_column(column, no_wrap=True)
    for column in ("measured", "predicted", "off"):
        table.add_column(column, justify="right", no_wrap=True)
    for item in found["items"]:
        measured = (item.get("measured") or {}).get("peak_allocated_bytes")
        predicted = (item.get("predicted") or {}).get("peak_allocated_bytes")
        off = f"{100 * (predicted / measured - 1):+.2f} %" if measured and predicted else ""
        sizes = [gib(value) if value else "" for value in (measured, predicted)]
        table.add_row(item["run_id"], item["gpu"], item["strategy"] or "", item["outcome"], *sizes, off)
    console().print(table)
    if not found["items"]:
        console().print("No run is stored. oombudsman runs import FILE... stores the profiler's records.")
