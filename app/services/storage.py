"""Keep recommendations, and find them again."""

from __future__ import annotations

import datetime as dt
from typing import Any

from app.db.models import Recommendation
from app.db.repositories import Recommendations
from app.db.session import Database
from app.schemas import RecommendBody
from estimator import ESTIMATOR_VERSION, SCHEMA_VERSION


def store(database: Database, body: RecommendBody, answer: dict[str, Any]) -> None:
    """Store one answer with what reproduces it. When this returns, it is committed."""
    calibration_id = answer.get("calibration_id") or (answer.get("current") or {}).get("calibration_id")
    row = Recommendation(
        id=answer["id"],
        created_at=dt.datetime.fromisoformat(answer["created_at"]),
        kind="recommend",
        request=body.model_dump(exclude_unset=True),
        result=answer,
        estimator_version=str(answer.get("estimator_version", ESTIMATOR_VERSION)),
        calibration_id=calibration_id,
        schema_version=str(answer.get("schema_version", SCHEMA_VERSION)),
    )
    with database.transaction() as session:
        Recommendations(session).add(row)


def load(database: Database, recommendation_id: str) -> Recommendation | None:
    """The stored row of this id."""
    with database.transaction() as session:
        return Recommendations(session).get(recommendation_id)
