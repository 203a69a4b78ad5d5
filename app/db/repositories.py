"""Every statement of the service."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Result, and_, delete, exists, func, insert, or_, select, text
from sqlalchemy.orm import Session, defer

from app.db.models import ActiveCalibration, CalibrationRow, ProfiledRun, Recommendation, RunPrediction

_AT_ONCE = 500
"""Values of one IN list; SQLite takes 999 parameters."""


class Recommendations:
    """Stored answers."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, recommendation: Recommendation) -> None:
        """Store one answer; it counts once the transaction has committed."""
        self._session.add(recommendation)
        self._session.flush()

    def get(self, recommendation_id: str) -> Recommendation | None:
        """The answer of this id, None if there is none."""
        return self._session.get(Recommendation, recommendation_id)


class Runs:
    """Measured runs and what the estimate says of them."""

    FILTERS = ("gpu", "strategy", "outcome", "method", "source", "fingerprint", "recommendation_id")

    def __init__(self, session: Session) -> None:
        self._session = session

    def hashes(self, run_ids: Sequence[str]) -> dict[str, str]:
        """Content hashes of those that are stored."""
        found: dict[str, str] = {}
        for part in _parts(run_ids):
            statement = select(ProfiledRun.run_id, ProfiledRun.content_hash).where(ProfiledRun.run_id.in_(part))
            found |= {row.run_id: row.content_hash for row in self._session.execute(statement)}
        return found

    def add(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Store new runs; they count once the transaction has committed."""
        if rows:
            self._session.execute(insert(ProfiledRun), list(rows))

    def get(self, run_id: str) -> ProfiledRun | None:
        return self._session.get(ProfiledRun, run_id)

    def page(
        self, filters: Mapping[str, str], limit: int, after: tuple[dt.datetime, str] | None
    ) -> Sequence[ProfiledRun]:
        """Newest first; ``after``: the (stored_at, run_id) of the last row of the page before."""
        statement = select(ProfiledRun).order_by(ProfiledRun.stored_at.desc(), ProfiledRun.run_id.desc()).limit(limit)
        for name, value in filters.items():
            statement = statement.where(getattr(ProfiledRun, name) == value)
        if after is not None:
            stored_at, run_id = after
            earlier = ProfiledRun.stored_at < stored_at
            same = and_(ProfiledRun.stored_at == stored_at, ProfiledRun.run_id < run_id)
            statement = statement.where(or_(earlier, same))
        return self._session.scalars(statement).all()

    def predictions(self, fingerprints: Sequence[str], estimator_version: str) -> dict[str, RunPrediction]:
        """By fingerprint, those that this version has made."""
        found: dict[str, RunPrediction] = {}
        for part in _parts(fingerprints):
            statement = select(RunPrediction).where(
                RunPrediction.estimator_version == estimator_version, RunPrediction.fingerprint.in_(part)
            )
            found |= {row.fingerprint: row for row in self._session.scalars(statement)}
        return found

    def add_prediction(self, row: RunPrediction) -> None:
        self._session.merge(row)
        self._session.flush()

    def without_prediction(
        self, stack: str, gpus: Sequence[str], estimator_version: str, limit: int
    ) -> Sequence[ProfiledRun]:
        """One run for each fingerprint that this version has not predicted, or not its survival memory."""
        known = exists().where(
            RunPrediction.fingerprint == ProfiledRun.fingerprint,
            RunPrediction.estimator_version == estimator_version,
            or_(ProfiledRun.survival_bytes.is_(None), RunPrediction.survival_bytes.isnot(None),
                RunPrediction.refused.isnot(None)),
        )  # fmt: skip
        first = (
            select(func.min(ProfiledRun.run_id))
            .where(*_fitted(stack, gpus), ~known)
            .group_by(ProfiledRun.fingerprint)
            .limit(limit)
        )
        return self._session.scalars(select(ProfiledRun).where(ProfiledRun.run_id.in_(first))).all()

    def beside_predictions(self, stack: str, gpus: Sequence[str], estimator_version: str) -> Result[Any]:
        """Runs that were ok, with what this version says of them: rows of plain columns, streamed."""
        p, r = RunPrediction, ProfiledRun
        statement = (
            select(
                r.run_id, r.fingerprint, r.strategy, r.method, r.allocator, r.peak_allocated_bytes,
                r.persistent_bytes, r.peak_reserved_bytes, r.survival_bytes, r.device_used_bytes,
                p.peak_allocated_bytes.label("predicted_peak"), p.persistent_bytes.label("predicted_persistent"),
                p.survival_bytes.label("predicted_survival"), p.components, p.model, p.num_communicators, p.refused,
            )
            .join(p, and_(p.fingerprint == r.fingerprint, p.estimator_version == estimator_version))
            .where(*_fitted(stack, gpus))
            .execution_options(yield_per=5000)
        )  # fmt: skip
        return self._session.execute(statement)

    def stacks(self) -> Sequence[tuple[str, str, int]]:
        """(stack, gpu, number of runs) of what is stored."""
        statement = select(ProfiledRun.stack, ProfiledRun.gpu, func.count()).group_by(
            ProfiledRun.stack, ProfiledRun.gpu
        )
        return [(stack, gpu, count) for stack, gpu, count in self._session.execute(statement)]


class Calibrations:
    """Versions of calibrations, and which of them are active."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, row: CalibrationRow) -> None:
        self._session.add(row)
        self._session.flush()

    def get(self, calibration_id: str) -> CalibrationRow | None:
        return self._session.get(CalibrationRow, calibration_id)

    def page(self, limit: int, after: tuple[dt.datetime, str] | None) -> Sequence[CalibrationRow]:
        """Newest first, without the ids of their runs; ``after``: (created_at, id) of the last row before."""
        statement = (
            select(CalibrationRow)
            .options(defer(CalibrationRow.run_ids))
            .order_by(CalibrationRow.created_at.desc(), CalibrationRow.id.desc())
            .limit(limit)
        )
        if after is not None:
            created_at, name = after
            same = and_(CalibrationRow.created_at == created_at, CalibrationRow.id < name)
            statement = statement.where(or_(CalibrationRow.created_at < created_at, same))
        return self._session.scalars(statement).all()

    def active(self) -> Sequence[ActiveCalibration]:
        return self._session.scalars(select(ActiveCalibration)).all()

    def activate(self, row: CalibrationRow, at: dt.datetime) -> None:
        """Answers of its stack and GPU family come from it, once the transaction has committed."""
        self._session.merge(
            ActiveCalibration(stack=row.stack, gpu_family=row.gpu_family, calibration_id=row.id, activated_at=at)
        )
        self._session.flush()

    def deactivate(self, calibration_id: str) -> bool:
        """False if it was not active."""
        statement = delete(ActiveCalibration).where(ActiveCalibration.calibration_id == calibration_id)
        done = self._session.execute(statement)
        return bool(done.rowcount)  # type: ignore[attr-defined]


def _fitted(stack: str, gpus: Sequence[str]) -> tuple[ColumnElement[bool], ...]:
    """Which runs a calibration of this stack and these cards looks at."""
    return (
        ProfiledRun.stack == stack,
        ProfiledRun.gpu.in_(gpus),
        ProfiledRun.outcome == "ok",
        ProfiledRun.peak_allocated_bytes.isnot(None),
    )


def _parts(values: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(values), _AT_ONCE):
        yield values[start : start + _AT_ONCE]


def ping(session: Session) -> None:
    """Raise SQLAlchemy's error if the database does not answer."""
    session.execute(text("SELECT 1"))
