"""Strict JSON: UTF-8, no NaN or Infinity (nor 1e999), no key twice, no lone surrogates, no bottomless nesting."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from app.api.errors import ProblemError
from app.problems import Problem
from estimator.errors import FieldProblem

MAX_DEPTH = 64
BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})


class StrictRequest(Request):
    """A request whose body is parsed strictly."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = parse(await self.body())
        return self._json


class StrictRoute(APIRoute):
    """A route that reads its body with StrictRequest, and only as JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict_handler(request: Request) -> Response:
            if request.method in BODY_METHODS and _has_body(request) and not _is_json(request):
                found = request.headers.get("content-type", "nothing")[:100]
                error = FieldProblem("header.content-type", f"says {found}", "Content-Type: application/json")
                raise ProblemError(Problem("unsupported-media-type", "the body must be JSON", (error,)))
            return await handler(StrictRequest(request.scope, request.receive))

        return strict_handler


def _has_body(request: Request) -> bool:
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers


def _is_json(request: Request) -> bool:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return media_type == "application/json" or (media_type.startswith("application/") and media_type.endswith("+json"))


def parse(body: bytes) -> Any:
    """The document; raises ProblemError (400) that says what is wrong and where."""
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _refused(f"is not UTF-8: byte {body[error.start]:#04x} at offset {error.start}") from error
    try:
        document = json.loads(text, parse_constant=_constant, parse_float=_float, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise _refused(
            f"is not JSON: {error.msg[:1].lower()}{error.msg[1:]} at line {error.lineno}, column {error.colno}"
        ) from error
    except RecursionError as error:
        raise _refused(f"is nested more than {MAX_DEPTH} deep") from error
    except ValueError as error:  # an integer of thousands of digits
        raise _refused("holds a number that is too long") from error
    _check(document)
    return document


def _refused(message: str) -> ProblemError:
    return ProblemError(Problem("invalid-json", f"the body {message}", (FieldProblem("body", message),)))


def _constant(name: str) -> Any:
    raise _refused(f"holds {name}, which JSON does not have")


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _refused(f"holds {digits[:40]}, which is beyond every number")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _refused(f"has the key {_shown(twice)} twice in one object")
    return found


def _check(document: Any) -> None:
    pending = [(document, 1)]
    while pending:
        value, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise _refused(f"is nested more than {MAX_DEPTH} deep")
        if isinstance(value, str):
            if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
                raise _refused(f"holds text that is not Unicode (a lone surrogate): {_shown(value)}")
        elif isinstance(value, dict):
            pending += [(key, depth) for key in value]
            pending += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list):
            pending += [(item, depth + 1) for item in value]


def _shown(text: str) -> str:
    return ascii(text[:60])
