"""POST /runs, GET /runs, GET /runs/{run_id}."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from app.api.answers import RunAnswer, RunPage, RunsStored
from app.api.body import StrictRoute
from app.api.dependencies import DatabaseDependency
from app.api.errors import ProblemError, problem_responses
from app.db.repositories import Runs
from app.problems import Problem
from app.schemas import RunsBody
from app.services import predictions, runs
from app.services.answers import encode
from app.settings import Settings
from estimator import SCHEMA_VERSION
from estimator.catalog import find_gpu
from estimator.errors import FieldProblem, JobError

JSON = "application/json"


class RunFilters(BaseModel):
    """Filters and paging of GET /runs."""

    model_config = ConfigDict(extra="forbid")

    gpu: str | None = Field(default=None, max_length=200)
    strategy: str | None = Field(default=None, max_length=32)
    outcome: Literal["ok", "oom", "error"] | None = None
    method: Literal["simulated", "real"] | None = None
    source: Literal["profiler", "log", "snapshot", "feedback"] | None = None
    fingerprint: str | None = Field(default=None, max_length=64)
    recommendation_id: str | None = Field(default=None, max_length=64)
    limit: int = Field(default=50, ge=1, le=1000)
    cursor: str | None = Field(default=None, max_length=500, description="next_cursor of the page before")

    def values(self) -> dict[str, str]:
        """The filters that are set; a GPU by the name that rows carry. Raises JobError for an unknown one."""
        found = {name: value for name in Runs.FILTERS if (value := getattr(self, name)) is not None}
        if self.gpu is not None:
            try:
                found["gpu"] = find_gpu(self.gpu).name
            except JobError as error:
                problem = error.problems[0]
                raise JobError([FieldProblem("query.gpu", problem.message, problem.suggestion)]) from error
        return found


def build_router(settings: Settings) -> APIRouter:
    """The routes, with the body limits of these settings."""
    router = APIRouter(tags=["runs"], route_class=StrictRoute)

    @router.post(
        "/runs",
        summary="Store measured runs: all of them, or none",
        max_body_size=settings.max_runs_body_bytes,
        responses={200: {"model": RunsStored}, **problem_responses(400, 413, 415, 422, 500, 503)},
    )
    def store(body: RunsBody, database: DatabaseDependency) -> Response:
        done = runs.store(database, body.runs)
        answer = {"stored": done.stored, "unchanged": done.unchanged, "schema_version": SCHEMA_VERSION}
        return Response(encode(answer), media_type=JSON)

    @router.get(
        "/runs",
        summary="Measured runs, newest first",
        responses={200: {"model": RunPage}, **problem_responses(422, 500, 503)},
    )
    def read_page(filters: Annotated[RunFilters, Query()], database: DatabaseDependency) -> Response:
        found = runs.page(database, filters.values(), filters.limit, filters.cursor)
        answer = {
            "items": [runs.as_plain(row) for row in found.rows],
            "limit": filters.limit,
            "next_cursor": found.next_cursor,
            "schema_version": SCHEMA_VERSION,
        }
        return Response(encode(answer), media_type=JSON)

    @router.get(
        "/runs/{run_id:path}",
        summary="One measured run, and what the estimate says of it",
        responses={200: {"model": RunAnswer}, **problem_responses(404, 422, 500, 503)},
    )
    def read_run(
        run_id: Annotated[str, Path(max_length=200, examples=["dense-check-000"])], database: DatabaseDependency
    ) -> Response:
        row = None if "\x00" in run_id else runs.get(database, run_id)
        if row is None:
            error = FieldProblem("run_id", "no run has this id")
            raise ProblemError(Problem("not-found", "no run has this id", (error,)))
        predicted = predictions.of_runs(database, [row])[row.fingerprint]
        return Response(encode(runs.as_plain(row, predicted)), media_type=JSON)

    return router
