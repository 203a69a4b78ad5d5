"""Calibrations in SQL: fitted from stored runs on request, never changed, active only when somebody says so."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy.exc import IntegrityError

from app.db.models import CalibrationRow, Recommendation
from app.db.repositories import Calibrations, Runs
from app.db.session import Database
from estimator import ESTIMATOR_VERSION, SCHEMA_VERSION
from estimator.calibration import Calibration, shipped
from estimator.calibration.apply import from_document
from estimator.calibration.observations import Observation
from estimator.catalog import list_gpus
from estimator.errors import FieldProblem, JobError

CHECK_SPLIT = re.compile(r"(dense|kinds)-check-\d")
"""Runs that measure the estimate's accuracy: fitting to them would make that figure worthless."""


@dataclass(frozen=True, slots=True)
class Fitted:
    calibration_id: str
    document: Mapping[str, Any]
    is_new: bool


def families() -> list[str]:
    """GPU families in the catalogue."""
    return sorted({gpu.family for gpu in list_gpus()})


def gpus_of(family: str) -> list[str]:
    """Raises JobError for an unknown family."""
    found = [gpu.name for gpu in list_gpus() if gpu.family == family]
    if not found:
        raise JobError([FieldProblem("gpu_family", f"no GPU is of family {family!r}", ", ".join(families()))])
    return found


def observations(database: Database, stack: str, family: str) -> tuple[list[Observation], int]:
    """Runs that were ok and that this version predicts, beside the predictions; how many of the check split are not
    among them."""
    rows = []
    left_out = 0
    with database.transaction() as session:
        for row in Runs(session).beside_predictions(stack, gpus_of(family), ESTIMATOR_VERSION):
            if row.refused is not None or not row.predicted_peak:
                continue
            if CHECK_SPLIT.match(row.run_id):
                left_out += 1
                continue
            rows.append(
                Observation(
                    run_id=row.run_id,
                    fingerprint=row.fingerprint,
                    model=row.model or "",
                    strategy=row.strategy or "unknown",
                    measured_peak=row.peak_allocated_bytes,
                    predicted_peak=row.predicted_peak,
                    components=row.components or {},
                    allocator=row.allocator,
                    method=row.method,
                    measured_persistent=row.persistent_bytes,
                    predicted_persistent=row.predicted_persistent,
                    measured_reserved=row.peak_reserved_bytes,
                    measured_survival=row.survival_bytes,
                    predicted_survival=row.predicted_survival,
                    device_used=row.device_used_bytes,
                    num_communicators=row.num_communicators or 0,
                )
            )
    return rows, left_out


def fit(database: Database, stack: str, family: str) -> Fitted:
    """Fit what is stored and predicted, and keep it. The same runs give the same calibration, kept once."""
    from estimator.calibration.fit import fit as fit_rows

    rows, left_out = observations(database, stack, family)
    now = dt.datetime.now(dt.UTC)
    document = fit_rows(rows, stack, family, ESTIMATOR_VERSION, now.isoformat(timespec="seconds"), left_out)
    name = document["calibration_id"]
    kept = _row(database, name)
    if kept is not None:
        return Fitted(name, kept.document, False)
    row = CalibrationRow(
        id=name,
        created_at=now,
        stack=stack,
        gpu_family=family,
        estimator_version=ESTIMATOR_VERSION,
        num_runs=len(rows),
        document=document,
        run_ids=sorted(observation.run_id for observation in rows),
    )
    try:
        with database.transaction() as session:
            Calibrations(session).add(row)
    except IntegrityError:  # another process fitted the same runs meanwhile
        return Fitted(name, document, False)
    return Fitted(name, document, True)


def active(database: Database) -> tuple[Calibration, ...]:
    """Those that answer, one a stack and GPU family."""
    with database.transaction() as session:
        repository = Calibrations(session)
        found = []
        for row in repository.active():
            known = _usable(row.calibration_id)
            if known is None:
                stored = repository.get(row.calibration_id)
                if stored is None:
                    continue
                known = _remember(row.calibration_id, stored.document)
            found.append(known)
    return tuple(found)


def of_answer(database: Database, kept: Recommendation) -> tuple[Calibration, ...]:
    """The calibration that an answer was made with, so that more can be asked about it; none: it was a shipped one."""
    if kept.calibration_id is None or kept.calibration_id in _shipped():
        return ()
    with database.transaction() as session:
        row = Calibrations(session).get(kept.calibration_id)
        return () if row is None else (_remember(row.id, row.document),)


_KNOWN: dict[str, Calibration] = {}


def _usable(calibration_id: str) -> Calibration | None:
    return _KNOWN.get(calibration_id)


def _remember(calibration_id: str, document: Mapping[str, Any]) -> Calibration:
    """Rows never change, so that what was read once holds for the life of the process."""
    if len(_KNOWN) > 200:
        _KNOWN.clear()
    _KNOWN[calibration_id] = from_document(document)
    return _KNOWN[calibration_id]


def activate(database: Database, calibration_id: str) -> bool:
    """False if there is no such calibration. Replaces what was active for its stack and GPU family."""
    with database.transaction() as session:
        repository = Calibrations(session)
        row = repository.get(calibration_id)
        if row is None:
            return False
        from_document(row.document)  # one of another version could not answer
        repository.activate(row, dt.datetime.now(dt.UTC))
    return True


def deactivate(database: Database, calibration_id: str) -> bool:
    """Back to the shipped calibration. False if it was not active."""
    with database.transaction() as session:
        return Calibrations(session).deactivate(calibration_id)


def get(database: Database, calibration_id: str) -> dict[str, Any] | None:
    """A stored or shipped calibration for an answer."""
    row = _row(database, calibration_id)
    if row is not None:
        return _plain(row.document, calibration_id in _active_ids(database))
    found = _shipped().get(calibration_id)
    return None if found is None else {**_plain(found.document, False), "shipped": True}


def run_ids(database: Database, calibration_id: str) -> Sequence[str] | None:
    row = _row(database, calibration_id)
    if row is not None:
        return row.run_ids
    return [] if calibration_id in _shipped() else None


def page(database: Database, limit: int, after: tuple[dt.datetime, str] | None) -> list[dict[str, Any]]:
    """Newest first, each in short."""
    chosen = _active_ids(database)
    with database.transaction() as session:
        rows = Calibrations(session).page(limit, after)
    return [_brief(row.document, row.id in chosen) | {"stored_at": row.created_at.isoformat()} for row in rows]


def _brief(document: Mapping[str, Any], is_active: bool) -> dict[str, Any]:
    names = ("calibration_id", "created_at", "stack", "gpu_family", "provenance", "applied_part", "coverage")
    return {name: document[name] for name in names} | {
        "active": is_active,
        "held_out": document["held_out"].get("all"),
        "num_outliers": len(document["outliers"]),
        "structural": document["structural"],
    }


def _plain(document: Mapping[str, Any], is_active: bool) -> dict[str, Any]:
    return {**document, "active": is_active, "shipped": False, "schema_version": SCHEMA_VERSION}


def _active_ids(database: Database) -> set[str]:
    with database.transaction() as session:
        return {row.calibration_id for row in Calibrations(session).active()}


def _row(database: Database, calibration_id: str) -> CalibrationRow | None:
    with database.transaction() as session:
        return Calibrations(session).get(calibration_id)


@lru_cache(maxsize=1)
def _shipped() -> dict[str, Calibration]:
    return {calibration.calibration_id: calibration for calibration in shipped()}
