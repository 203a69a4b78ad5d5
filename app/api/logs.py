"""Structured logs on standard error: one line a request, with its id. Bodies are never logged."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import structlog
from asgi_correlation_id import correlation_id
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.typing import EventDict, Processor

from app.settings import Settings

log = structlog.get_logger("oombudsman.access")


def configure(settings: Settings) -> None:
    """Set up structlog for this process."""
    renderer: Processor = (
        structlog.processors.JSONRenderer() if settings.log_format == "json" else structlog.dev.ConsoleRenderer()
    )
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        _add_request_id,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if settings.log_format == "json":
        processors.append(structlog.processors.dict_tracebacks)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[settings.log_level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )


def _add_request_id(_logger: Any, _method: str, event: EventDict) -> EventDict:
    request_id = correlation_id.get()
    if request_id is not None:
        event["request_id"] = request_id
    return event


class AccessLogMiddleware:
    """One line a request: method, path, status, milliseconds."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in ("/livez", "/readyz"):
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        finally:
            milliseconds = round(1000 * (time.perf_counter() - started), 1)
            log.info("request", method=scope["method"], path=scope["path"], status=status, milliseconds=milliseconds)
