"""Every statement of the service."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence

from sqlalchemy import and_, insert, or_, select, text
from sqlalchemy.orm import Session

from app.db.models import ProfiledRun, Recommendation, RunPrediction

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


def _parts(values: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(values), _AT_ONCE):
        yield values[start : start + _AT_ONCE]


def ping(session: Session) -> None:
    """Raise SQLAlchemy's error if the database does not answer."""
    session.execute(text("SELECT 1"))
