"""Templates, response headers, and pages that say what went wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jinja2
import structlog
from fastapi import Request, Response
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from app.api.errors import ProblemError
from app.db.migrations import DatabaseNotReady
from app.problems import KINDS, of_estimator_error
from app.web.groups import GROUPS
from estimator import ESTIMATOR_VERSION
from estimator.errors import EstimatorError

HERE = Path(__file__).resolve().parent
STATIC = HERE / "static"
GIB = 1 << 30

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
MEDIA_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}

log = structlog.get_logger("oombudsman.web")


@functools.cache
def environment() -> jinja2.Environment:
    """Everything that a template shows is escaped."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"gib": gib, "words": words, "percent": percent, "factor": factor, "value": shown_value}
    found.globals |= {"version": ESTIMATOR_VERSION, "groups": GROUPS}
    return found


def gib(num_bytes: float | None) -> str:
    if num_bytes is None:
        return "not known"
    value = num_bytes / GIB
    return f"{value:.1f} GiB" if abs(value) >= 0.95 else f"{value:.2f} GiB"


def words(name: str) -> str:
    return str(name).replace("_", " ")


def percent(share: float | None) -> str:
    """A probability; never rounded up to certainty, nor down to impossibility."""
    if share is None:
        return "not known"
    if share >= 0.9995:
        return "over 99.9 %"
    return "under 0.1 %" if share < 0.0005 else f"{100 * share:.3g} %"


def factor(relative: float | None) -> str:
    return "not known" if relative is None else f"{relative:.2f}x"


def shown_value(value: Any) -> str:
    """A setting as a person reads it."""
    return "unset" if value is None else str(value)


def page(template: str, status: int = 200, **context: Any) -> HTMLResponse:
    """A page; templates are strict about what they are given."""
    text = environment().get_template(template).render(**context)
    return HTMLResponse(text, status, headers=HEADERS)


def error_page(status: int, title: str, text: str, what_to_do: str) -> HTMLResponse:
    return page("error.html", status, title=title, text=text, what_to_do=what_to_do)


class PageRoute(APIRoute):
    """Turns failures into pages that say what to do, and refuses forms that another site has sent."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def page_handler(request: Request) -> Response:
            if request.method == "POST" and not is_same_origin(request):
                return error_page(
                    403, "Refused", "This form was sent from another site.", "Open the page here and send it again."
                )
            try:
                return await handler(request)
            except ProblemError as error:
                problem = error.problem
                advice = next((e.suggestion for e in problem.errors if e.suggestion), None)
                return error_page(
                    problem.http_status, KINDS[problem.slug].title, problem.detail, advice or "Go back and change it."
                )
            except EstimatorError as error:
                problem = of_estimator_error(error)
                return error_page(
                    problem.http_status, KINDS[problem.slug].title, problem.detail, "Go back and change it."
                )
            except (OperationalError, InterfaceError, PoolTimeoutError, DatabaseNotReady) as error:
                log.error("database_unavailable", error=type(error).__name__)
                text = str(error) if isinstance(error, DatabaseNotReady) else "The database does not answer."
                return error_page(503, "Not available", text, "Nothing was stored. Try again in a moment.")

        return page_handler


def is_same_origin(request: Request) -> bool:
    """Browsers say where a form comes from; a program that says nothing has no cookies to abuse."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = request.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("host", "")


@functools.cache
def static_file(name: str) -> tuple[bytes, str] | None:
    """A file of the static folder with its media type; None for every other name."""
    path = STATIC / name
    if "/" in name or path.suffix not in MEDIA_TYPES or not path.is_file():
        return None
    return path.read_bytes(), MEDIA_TYPES[path.suffix]
