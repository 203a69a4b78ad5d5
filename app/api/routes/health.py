"""Liveness, readiness, version, and what each type of problem means."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path

from app.api.answers import Health, Version
from app.api.dependencies import DatabaseDependency
from app.api.errors import ProblemError, problem_responses
from app.db import migrations
from app.problems import KINDS, PROBLEM_PATH, Problem
from estimator import ESTIMATOR_VERSION, SCHEMA_VERSION
from estimator.errors import FieldProblem

router = APIRouter(tags=["service"])


@router.get("/livez", summary="Whether the process answers", responses=problem_responses(500))
def livez() -> Health:
    return Health(status="ok")


@router.get(
    "/readyz",
    summary="Whether requests can be served: the database answers and is at the newest migration",
    responses=problem_responses(500, 503),
)
def readyz(database: DatabaseDependency) -> Health:
    migrations.require_current(database.engine)
    return Health(status="ready")


@router.get("/version", summary="Versions of what answers", responses=problem_responses(500))
def version() -> Version:
    return Version(
        version=ESTIMATOR_VERSION,
        estimator_version=ESTIMATOR_VERSION,
        schema_version=SCHEMA_VERSION,
        database_revision=migrations.HEAD,
    )


@router.get(PROBLEM_PATH + "{slug}", summary="What a type of problem means", responses=problem_responses(404, 422, 500))
def problem_kind(slug: Annotated[str, Path(max_length=100, examples=["not-modelled"])]) -> dict[str, Any]:
    kind = KINDS.get(slug)
    if kind is None:
        error = FieldProblem("slug", "no problem has this type", "one of " + ", ".join(KINDS))
        raise ProblemError(Problem("not-found", "no problem has this type", (error,)))
    return {"type": PROBLEM_PATH + slug, "title": kind.title, "status": kind.status, "meaning": kind.meaning}
