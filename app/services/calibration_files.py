"""A calibration straight from the profiler's records, as it is shipped with a version."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.schemas import Run
from app.services import predictions, run_files, runs
from app.services.calibrations import CHECK_SPLIT
from estimator import ESTIMATOR_VERSION
from estimator.calibration import stack_key
from estimator.calibration.fit import fit
from estimator.calibration.observations import Observation
from estimator.catalog import find_gpu
from estimator.errors import FieldProblem, JobError
from estimator.reading import read_stack

SEEN = "seen"
"""Tag of runs that the model was changed after: no evidence of how far answers are off."""


def fit_files(files: Sequence[Path], family: str) -> dict[str, Any]:
    """The document of a calibration of all runs in these files that are ok and of this GPU family.

    Raises JobError naming file and line for a row that is no run, a run of the check split, and runs of several stacks.
    """
    rows: list[Observation] = []
    stacks: set[str] = set()
    problems: list[FieldProblem] = []
    for path in files:
        for row in _rows(path):
            if isinstance(row, run_files.BadRow):
                problems.append(FieldProblem("--from", str(row)))
                continue
            if CHECK_SPLIT.match(row.run_id):
                message = f"{path}: {row.run_id} is of the check split, which is never fitted to"
                raise JobError([FieldProblem("--from", message, "runs of a fit split")])
            problems += runs.check(row, f"{path}: {row.run_id}")
            if not problems and row.outcome == "ok" and find_gpu(row.gpu).family == family:
                stacks.add(stack_key(read_stack(row.stack)))
                observation = _observation(row)
                rows += [observation] if observation is not None else []
    if problems:
        raise JobError(problems[:20])
    if len(stacks) > 1:
        raise JobError([FieldProblem("--from", "runs of several stacks: " + "; ".join(sorted(stacks)), "one stack")])
    now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    return fit(rows, next(iter(stacks), ""), family, ESTIMATOR_VERSION, now)


def _rows(path: Path) -> list[Run | run_files.BadRow]:
    try:
        return list(run_files.read(path))
    except OSError as error:
        raise JobError([FieldProblem("--from", f"{path}: {error.strerror}")]) from error


def _observation(run: Run) -> Observation | None:
    document = run.model_dump(mode="json", exclude_none=True)
    fingerprint = runs.fingerprint(run)
    predicted = predictions.predict(fingerprint, document)
    measured = run.measured
    if predicted["refused"] is not None or measured.peak_allocated_bytes is None:
        return None
    return Observation(
        run_id=run.run_id,
        fingerprint=fingerprint,
        model=predicted["model"],
        strategy=runs.strategy_of(run) or "unknown",
        measured_peak=measured.peak_allocated_bytes,
        predicted_peak=predicted["peak_allocated_bytes"],
        components=predicted["components"],
        allocator=run.allocator,
        method=run.method,
        measured_persistent=measured.persistent_bytes,
        predicted_persistent=predicted["persistent_bytes"],
        measured_reserved=measured.peak_reserved_bytes,
        measured_survival=measured.survival_bytes,
        predicted_survival=predicted["survival_bytes"],
        device_used=measured.device_used_bytes,
        num_communicators=predicted["num_communicators"],
        seen=SEEN in ((run.profile or {}).get("tags") or ()),
    )
