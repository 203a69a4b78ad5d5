"""POST /estimate, POST /recommend, GET /recommendations/{id}."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Path, Response

from app.api.answers import CapacityAnswer, CompareAnswer, EstimateAnswer, OutcomeAnswer, OutcomeList, RecommendAnswer
from app.api.body import StrictRoute
from app.api.dependencies import DatabaseDependency
from app.api.errors import ProblemError, problem_responses
from app.api.examples import EXAMPLES
from app.db.models import Recommendation
from app.db.session import Database
from app.problems import Problem
from app.schemas import CapacityBody, CompareBody, EstimateBody, OutcomeBody, RecommendBody
from app.services import answers, calibrations, outcomes, storage
from app.settings import Settings
from estimator import SCHEMA_VERSION
from estimator.errors import FieldProblem

JSON = "application/json"
RECOMMENDATION_ID = re.compile(r"rec_[A-Za-z0-9_-]+")
IMMUTABLE = "private, max-age=31536000, immutable"
BODY_ERRORS = (400, 413, 415, 422, 500)

RecommendationId = Annotated[str, Path(max_length=64, examples=["rec_3q2-7wAAbbCCddEEffGGhh"])]
IfNoneMatch = Annotated[str | None, Header(description="An ETag that you have: then the answer is 304")]


def build_router(settings: Settings) -> APIRouter:
    """The routes, with the body limits of these settings."""
    router = APIRouter(tags=["answers"], route_class=StrictRoute)

    @router.post(
        "/estimate",
        summary="Memory of a job, by moment and component",
        max_body_size=settings.max_estimate_body_bytes,
        responses={200: {"model": EstimateAnswer}, **problem_responses(*BODY_ERRORS, 503)},
    )
    def estimate(
        body: Annotated[EstimateBody, Body(openapi_examples=_examples())], database: DatabaseDependency
    ) -> Response:
        answer = answers.estimate(body, calibrations.active(database))
        return Response(answers.encode(answer), media_type=JSON)

    @router.post(
        "/capacity",
        summary="The largest micro batch or sequence that fits, or the fewest GPUs",
        max_body_size=settings.max_estimate_body_bytes,
        responses={200: {"model": CapacityAnswer}, **problem_responses(*BODY_ERRORS, 503)},
    )
    def capacity(
        body: Annotated[CapacityBody, Body(openapi_examples=_capacity_examples())], database: DatabaseDependency
    ) -> Response:
        answer = answers.capacity(body, calibrations.active(database))
        return Response(answers.encode(answer), media_type=JSON)

    @router.post(
        "/compare",
        summary="What makes two jobs differ in memory",
        max_body_size=2 * settings.max_estimate_body_bytes,
        responses={200: {"model": CompareAnswer}, **problem_responses(*BODY_ERRORS, 503)},
    )
    def compare(
        body: Annotated[CompareBody, Body(openapi_examples=_compare_examples())], database: DatabaseDependency
    ) -> Response:
        answer = answers.compare(body, calibrations.active(database))
        return Response(answers.encode(answer), media_type=JSON)

    @router.post(
        "/recommend",
        summary="Why a job runs out of memory, and settings that fit",
        max_body_size=settings.max_recommend_body_bytes,
        responses={200: {"model": RecommendAnswer}, **problem_responses(*BODY_ERRORS, 503)},
    )
    def recommend(
        body: Annotated[RecommendBody, Body(openapi_examples=_examples())], database: DatabaseDependency
    ) -> Response:
        answer = answers.recommend(body, settings, calibrations.active(database))
        content = answers.encode(answer)
        storage.store(database, body, answer)
        headers = {"Content-Location": f"/recommendations/{answer['id']}", "ETag": _etag(content)}
        return Response(content, media_type=JSON, headers=headers)

    @router.get(
        "/recommendations/{recommendation_id}",
        summary="A recommendation that was made before",
        responses={
            200: {"model": RecommendAnswer},
            304: {"description": "You have it already"},
            **problem_responses(404, 422, 500, 503),
        },
    )
    def read(
        recommendation_id: RecommendationId, database: DatabaseDependency, if_none_match: IfNoneMatch = None
    ) -> Response:
        return _immutable(_load(database, recommendation_id).result, if_none_match)

    @router.get(
        "/recommendations/{recommendation_id}/request",
        summary="The request that a recommendation answered, ready to be sent again",
        responses={
            200: {"model": RecommendBody},
            304: {"description": "You have it already"},
            **problem_responses(404, 422, 500, 503),
        },
    )
    def read_request(
        recommendation_id: RecommendationId, database: DatabaseDependency, if_none_match: IfNoneMatch = None
    ) -> Response:
        return _immutable(_load(database, recommendation_id).request, if_none_match)

    @router.post(
        "/recommendations/{recommendation_id}/outcome",
        summary="What became of a recommendation: it ran, or it did not",
        max_body_size=settings.max_recommend_body_bytes,
        responses={200: {"model": OutcomeAnswer}, **problem_responses(404, *BODY_ERRORS, 503)},
    )
    def report(recommendation_id: RecommendationId, body: OutcomeBody, database: DatabaseDependency) -> Response:
        kept = _load(database, recommendation_id)
        return Response(answers.encode(outcomes.report(database, kept, body)), media_type=JSON)

    @router.get(
        "/recommendations/{recommendation_id}/outcomes",
        summary="What was reported of a recommendation",
        responses={200: {"model": OutcomeList}, **problem_responses(404, 422, 500, 503)},
    )
    def reports(recommendation_id: RecommendationId, database: DatabaseDependency) -> Response:
        kept = _load(database, recommendation_id)
        found = {"items": outcomes.of(database, kept.id), "schema_version": SCHEMA_VERSION}
        return Response(answers.encode(found), media_type=JSON)

    return router


def _examples() -> Any:
    return EXAMPLES


_SIDE: dict[str, Any] = {
    "job": {"recipe": "llama3_8b_pretrain_config"},
    "cluster": {"gpu": "h100-80gb", "num_gpus": 16},
}


def _capacity_examples() -> Any:
    return {"sequence": {"summary": "The longest sequence", "value": {**_SIDE, "question": "seq_length"}}}


def _compare_examples() -> Any:
    changed = {**_SIDE, "job": {**_SIDE["job"], "overrides": ["train.micro_batch_size=2"]}}
    return {"a change": {"summary": "Since the micro batch was changed", "value": {"a": _SIDE, "b": changed}}}


def _load(database: Database, recommendation_id: str) -> Recommendation:
    row = storage.load(database, recommendation_id) if RECOMMENDATION_ID.fullmatch(recommendation_id) else None
    if row is None:
        error = FieldProblem("recommendation_id", "no recommendation has this id")
        raise ProblemError(Problem("not-found", "no recommendation has this id", (error,)))
    return row


def _immutable(document: Any, if_none_match: str | None) -> Response:
    content = answers.encode(document)
    headers = {"ETag": _etag(content), "Cache-Control": IMMUTABLE}
    if if_none_match is not None and _matches(if_none_match, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=JSON, headers=headers)


def _etag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'


def _matches(if_none_match: str, etag: str) -> bool:
    candidates = [part.strip().removeprefix("W/") for part in if_none_match.split(",")]
    return "*" in candidates or etag in candidates
