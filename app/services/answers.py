"""Ask the estimator. No SQL and no HTTP here; the command line and the API both call these."""

from __future__ import annotations

import datetime as dt
import json
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from app.schemas import CapacityBody, CompareBody, EstimateBody, RecommendBody
from app.settings import Settings, get_settings
from estimator.requests import EstimateRequest, RecommendRequest

if TYPE_CHECKING:
    from estimator.calibration import Calibration

Request = TypeVar("Request", EstimateRequest, RecommendRequest)


def estimate(body: EstimateBody, calibrations: tuple[Calibration, ...] = ()) -> dict[str, Any]:
    """The answer of POST /estimate. ``calibrations``: the active ones. Raises JobError, NotModelled."""
    from estimator.answers import estimate_answer

    return estimate_answer(calibrated(body.to_request(), calibrations))


def recommend(
    body: RecommendBody, settings: Settings | None = None, calibrations: tuple[Calibration, ...] = ()
) -> dict[str, Any]:
    """The answer of POST /recommend with its own new id; not stored yet. Raises JobError, NotModelled."""
    from app.services.diagnosis import evidence_of
    from estimator.answers import recommend_answer

    request = body.to_request(evidence_of(body.evidence, settings or get_settings()))
    answer = recommend_answer(calibrated(request, calibrations))
    identity = {"id": new_id(), "created_at": dt.datetime.now(dt.UTC).isoformat(timespec="microseconds")}
    return identity | {name: value for name, value in answer.items() if name not in identity}


def calibrated(request: Request, calibrations: tuple[Calibration, ...]) -> Request:
    """The same question, to be answered with these calibrations where they hold."""
    return replace(request, cluster=replace(request.cluster, calibrations=calibrations))


def capacity(body: CapacityBody, calibrations: tuple[Calibration, ...] = ()) -> dict[str, Any]:
    """The answer of POST /capacity. Raises JobError, NotModelled."""
    from estimator.questions import capacity_answer

    return capacity_answer(calibrated(body.to_request(), calibrations), body.question)


def compare(body: CompareBody, calibrations: tuple[Calibration, ...] = ()) -> dict[str, Any]:
    """The answer of POST /compare. Raises JobError, NotModelled."""
    from estimator.questions import compare_answer

    first, second = body.to_requests()
    return compare_answer(calibrated(first, calibrations), calibrated(second, calibrations))


def new_id() -> str:
    """128 random bits: who has the id may read the answer."""
    return "rec_" + secrets.token_urlsafe(16)


def encode(answer: Any) -> bytes:
    """The answer as JSON, the same bytes whenever the same answer is sent. Raises ValueError for NaN."""
    return json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
