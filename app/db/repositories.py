"""Every statement of the service."""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.orm import Session

from app.db.models import Recommendation


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


def ping(session: Session) -> None:
    """Raise SQLAlchemy's error if the database does not answer."""
    session.execute(text("SELECT 1"))
