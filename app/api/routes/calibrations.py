"""POST /calibrations, GET /calibrations, GET /calibrations/{id}[/runs], POST /calibrations/{id}/activate."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from app.api.answers import CalibrationAnswer, CalibrationPage, CalibrationRuns
from app.api.body import StrictRoute
from app.api.dependencies import DatabaseDependency
from app.api.errors import ProblemError, problem_responses
from app.problems import Problem
from app.schemas import CalibrateBody
from app.services import calibrations, predictions, runs
from app.services.answers import encode
from app.settings import Settings
from estimator import SCHEMA_VERSION
from estimator.calibration import stack_key
from estimator.catalog import find_gpu
from estimator.errors import FieldProblem, JobError
from estimator.reading import read_stack

JSON = "application/json"
MAX_PREDICTED = 100
"""Runs that a request may have predicted: about ten seconds. More is a matter for the command line."""

Identity = Annotated[str, Path(max_length=64, examples=["cal_0123456789abcdef01234567"])]


class Paging(BaseModel):
    """Paging of GET /calibrations."""

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(default=50, ge=1, le=500)
    cursor: str | None = Field(default=None, max_length=500, description="next_cursor of the page before")


def build_router(settings: Settings) -> APIRouter:
    """The routes, with the body limits of these settings."""
    router = APIRouter(tags=["calibrations"], route_class=StrictRoute)

    @router.post(
        "/calibrations",
        summary="Fit the stored runs of a stack and GPU family: a new version, active only if asked for",
        max_body_size=settings.max_estimate_body_bytes,
        responses={
            200: {"model": CalibrationAnswer, "description": "These runs were fitted before"},
            201: {"model": CalibrationAnswer, "description": "Fitted"},
            **problem_responses(400, 409, 413, 415, 422, 500, 503),
        },
    )
    def fit(body: CalibrateBody, database: DatabaseDependency) -> Response:
        family = _family(body)
        stack = stack_key(read_stack(body.stack))
        gpus = calibrations.gpus_of(family)
        if predictions.fill(database, stack, gpus, at_most=MAX_PREDICTED) == MAX_PREDICTED:
            raise ProblemError(_too_many())
        done = calibrations.fit(database, stack, family)
        if body.activate:
            calibrations.activate(database, done.calibration_id)
        found = calibrations.get(database, done.calibration_id)
        headers = {"Content-Location": f"/calibrations/{done.calibration_id}"}
        return Response(encode(found), 201 if done.is_new else 200, headers, JSON)

    @router.get(
        "/calibrations",
        summary="Versions of calibrations, newest first",
        responses={200: {"model": CalibrationPage}, **problem_responses(422, 500, 503)},
    )
    def read_page(paging: Annotated[Paging, Query()], database: DatabaseDependency) -> Response:
        after = runs.read_cursor(paging.cursor) if paging.cursor else None
        items = calibrations.page(database, paging.limit + 1, after)
        more, items = len(items) > paging.limit, items[: paging.limit]
        cursor = _cursor(items[-1]) if more else None
        answer = {"items": items, "limit": paging.limit, "next_cursor": cursor, "schema_version": SCHEMA_VERSION}
        return Response(encode(answer), media_type=JSON)

    _add_one(router)
    return router


def _add_one(router: APIRouter) -> None:
    @router.get(
        "/calibrations/{calibration_id}",
        summary="One calibration: coefficients, uncertainty, errors by group, what was left out",
        responses={200: {"model": CalibrationAnswer}, **problem_responses(404, 422, 500, 503)},
    )
    def read(calibration_id: Identity, database: DatabaseDependency) -> Response:
        return Response(encode(_known(calibrations.get(database, calibration_id))), media_type=JSON)

    @router.get(
        "/calibrations/{calibration_id}/runs",
        summary="The runs that a calibration was fitted to",
        responses={200: {"model": CalibrationRuns}, **problem_responses(404, 422, 500, 503)},
    )
    def read_runs(calibration_id: Identity, database: DatabaseDependency) -> Response:
        found = _known(calibrations.run_ids(database, calibration_id))
        return Response(encode({"run_ids": found, "schema_version": SCHEMA_VERSION}), media_type=JSON)

    @router.post(
        "/calibrations/{calibration_id}/activate",
        summary="Answer with this calibration from now on",
        responses={200: {"model": CalibrationAnswer}, **problem_responses(400, 404, 415, 422, 500, 503)},
    )
    def activate(calibration_id: Identity, database: DatabaseDependency, _body: Nothing | None = None) -> Response:
        _known(calibrations.activate(database, calibration_id) or None)
        return Response(encode(calibrations.get(database, calibration_id)), media_type=JSON)

    @router.post(
        "/calibrations/{calibration_id}/deactivate",
        summary="Answer with the shipped calibration again",
        responses={200: {"model": CalibrationAnswer}, **problem_responses(400, 404, 415, 422, 500, 503)},
    )
    def deactivate(calibration_id: Identity, database: DatabaseDependency, _body: Nothing | None = None) -> Response:
        found = _known(calibrations.get(database, calibration_id))
        calibrations.deactivate(database, calibration_id)
        return Response(encode({**found, "active": False}), media_type=JSON)


class Nothing(BaseModel):
    """An empty object."""

    model_config = ConfigDict(extra="forbid")


def _family(body: CalibrateBody) -> str:
    if (body.gpu is None) == (body.gpu_family is None):
        raise JobError([FieldProblem("gpu", "either gpu or gpu_family is needed", "gpu: h200-141gb")])
    if body.gpu_family is not None:
        return body.gpu_family
    try:
        return find_gpu(body.gpu or "").family
    except JobError as error:
        raise JobError([FieldProblem("gpu", p.message, p.suggestion) for p in error.problems]) from error


def _known(found: Any) -> Any:
    if found is None:
        error = FieldProblem("calibration_id", "no calibration has this id", "GET /calibrations lists them")
        raise ProblemError(Problem("not-found", "no stored calibration has this id", (error,)))
    return found


def _too_many() -> Problem:
    message = f"{MAX_PREDICTED} runs were predicted, and more wait"
    error = FieldProblem("body", message, "send it again, or run: oombudsman calibrate")
    return Problem("not-ready", message, (error,))


def _cursor(item: dict[str, Any]) -> str:
    return runs.make_cursor(dt.datetime.fromisoformat(item["stored_at"]), item["calibration_id"])
