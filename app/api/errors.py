"""Turns every failure into application/problem+json."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

import structlog
from asgi_correlation_id import correlation_id
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.db.migrations import DatabaseNotReady
from app.problems import KINDS, Problem, of_estimator_error, of_pydantic_errors
from app.services.answers import encode
from estimator.errors import EstimatorError, FieldProblem

MEDIA_TYPE = "application/problem+json"
BY_STATUS = {404: "not-found", 405: "method-not-allowed", 415: "unsupported-media-type"}

log = structlog.get_logger("oombudsman.api")


class ProblemError(HTTPException):
    """Raise to answer with this problem. An HTTPException, so that FastAPI's body parsing lets it pass."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(problem.http_status, problem.detail)


class ProblemDocument(BaseModel):
    """RFC 9457 problem details. ``type`` is relative to this server."""

    class Error(BaseModel):
        path: str
        message: str
        suggestion: str | None = None

    type: str
    title: str
    status: int
    detail: str
    errors: list[Error]
    fields: list[str] | None = None


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What a route's documentation says of its errors."""
    schema = {"$ref": "#/components/schemas/ProblemDocument"}
    return {
        status: {"description": HTTPStatus(status).phrase, "content": {MEDIA_TYPE: {"schema": schema}}}
        for status in statuses
    }


def problem_response(problem: Problem, **extra: Any) -> Response:
    """The problem as a response."""
    return Response(
        encode(problem.as_dict() | extra), problem.http_status, headers=dict(problem.headers), media_type=MEDIA_TYPE
    )


def install(app: FastAPI) -> None:
    """Register the handlers; ProblemMiddleware catches the rest."""

    @app.exception_handler(ProblemError)
    async def on_problem(_request: Request, error: ProblemError) -> Response:
        return problem_response(error.problem)

    @app.exception_handler(EstimatorError)
    async def on_estimator_error(_request: Request, error: EstimatorError) -> Response:
        return problem_response(of_estimator_error(error))

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        return problem_response(of_pydantic_errors(_located(error), _body_model(request)))

    @app.exception_handler(StarletteHTTPException)
    async def on_http(request: Request, error: StarletteHTTPException) -> Response:
        return problem_response(_of_http_error(request, error))

    for unavailable in (OperationalError, InterfaceError, PoolTimeoutError, DatabaseNotReady):

        @app.exception_handler(unavailable)
        async def on_unavailable(_request: Request, error: Exception) -> Response:
            log.error("database_unavailable", error=type(error).__name__, cause=type(error.__cause__).__name__)
            detail = str(error) if isinstance(error, DatabaseNotReady) else KINDS["unavailable"].meaning
            return problem_response(Problem("unavailable", detail, headers={"Retry-After": "5"}))


def _located(error: RequestValidationError) -> list[dict[str, Any]]:
    """The findings with places as a client sees them: keys of a body bare, others by where they stand (query.limit)."""
    return [
        {**found, "loc": found["loc"][1:] if found["loc"] and found["loc"][0] == "body" else found["loc"]}
        for found in error.errors()
    ]


def _body_model(request: Request) -> type[BaseModel] | None:
    body_field = getattr(request.scope.get("route"), "body_field", None)
    annotation = getattr(getattr(body_field, "field_info", None), "annotation", None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _of_http_error(request: Request, error: StarletteHTTPException) -> Problem:
    if error.status_code == 413:
        return _too_large()
    slug = BY_STATUS.get(error.status_code, "http-error")
    detail = {
        "not-found": f"there is nothing at {request.url.path[:200]}",
        "method-not-allowed": f"{request.method} is not a method of {request.url.path[:200]}",
    }.get(slug, str(error.detail))
    errors = (FieldProblem("path", detail, "GET /openapi.json lists every address"),) if slug == "not-found" else ()
    headers = dict(error.headers or {})
    if slug == "method-not-allowed" and (allowed := _allowed_methods(request)):
        headers["Allow"] = ", ".join(allowed)
    return Problem(slug, detail, errors, status=error.status_code, headers=headers)


def _allowed_methods(request: Request) -> list[str]:
    """All that the document says of this path: the router answers for the first route that it finds only."""
    path = request.url.path.removeprefix("/v1")
    for template, operations in request.app.openapi()["paths"].items():
        if re.fullmatch(re.sub(r"\\\{[^}]*\\\}", "[^/]+", re.escape(template)), path):
            return sorted(method.upper() for method in operations)
    return []


class ProblemMiddleware:
    """Catches what no handler caught, and rewrites the plain-text 413 that the body limit sends by itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = replaced = False

        async def guarded_send(message: Message) -> None:
            nonlocal started, replaced
            if replaced:
                return
            if message["type"] == "http.response.start":
                started = True
                if message["status"] == 413 and not _is_problem(message):
                    replaced = True
                    await problem_response(_too_large())(scope, receive, send)
                    return
            await send(message)

        try:
            await self._app(scope, receive, guarded_send)
        except Exception:
            log.exception("unhandled_error", method=scope["method"], path=scope["path"])
            if started:
                raise
            problem = Problem("internal-error", KINDS["internal-error"].meaning)
            await problem_response(problem, request_id=correlation_id.get())(scope, receive, send)


def _is_problem(start: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(MEDIA_TYPE.encode()) for name, value in start["headers"]
    )


def _too_large() -> Problem:
    error = FieldProblem("body", "is larger than this route's limit", "send only the end of the log, or fewer settings")
    return Problem("body-too-large", "the body is larger than this route's limit", (error,))
