"""Everything that goes wrong, as one RFC 9457 problem: what, where, and what would be right. Free of any framework."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from estimator.errors import EstimatorError, FieldProblem, JobError, NotModelled

PROBLEM_PATH = "/problems/"


@dataclass(frozen=True, slots=True)
class Kind:
    """One type of problem: a row of ``GET /problems/{slug}``."""

    status: int
    title: str
    meaning: str


KINDS: Mapping[str, Kind] = {
    "invalid-json": Kind(
        400, "The body is not valid JSON", "The body must be one JSON document in UTF-8, without NaN."
    ),
    "invalid-request": Kind(
        422, "The request is not valid", "A key is unknown or missing, or a value is of a wrong type."
    ),
    "invalid-job": Kind(
        422, "The job cannot be read", "The job names something unknown, or holds an impossible value."
    ),
    "not-modelled": Kind(
        422,
        "This kind of job is not modelled yet",
        "The job may be right, but there is no memory model for it: see fields.",
    ),
    "unauthorized": Kind(401, "A key is needed", "Send Authorization: Bearer with an API key of this service."),
    "forbidden": Kind(403, "This key may not do that", "Each key has scopes: read, recommend, ingest, admin."),
    "too-many-requests": Kind(429, "Too many requests", "Wait as long as the Retry-After header says."),
    "not-found": Kind(404, "Not found", "There is nothing at this address."),
    "ambiguous": Kind(409, "The name is not unique", "Several things have this name: say which."),
    "not-ready": Kind(409, "Not ready yet", "Something else has to be done first: see detail, and try again."),
    "method-not-allowed": Kind(
        405, "Method not allowed", "The address exists, for other methods: see the Allow header."
    ),
    "body-too-large": Kind(413, "The body is too large", "Each route has its own limit."),
    "unsupported-media-type": Kind(415, "The body must be JSON", "Send Content-Type: application/json."),
    "http-error": Kind(400, "The request was refused", "See the status."),
    "storage-full": Kind(507, "There is no room for the upload", "Uploads have a quota and expire: try again later."),
    "internal-error": Kind(500, "Something went wrong here", "It is not your request. The log has the request id."),
    "unavailable": Kind(503, "The database cannot be reached", "Nothing was stored. Try again in a moment."),
}


PHRASES = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "list_type": "must be a list",
    "string_type": "must be a string",
    "string_too_short": "must have at least {min_length} character(s)",
    "string_too_long": "must have at most {max_length} characters",
    "too_long": "must have at most {max_length} entries",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "int_parsing": "must be a whole number",
}
"""pydantic's error types in this service's words; the others keep pydantic's message."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One failed request."""

    slug: str
    detail: str
    errors: tuple[FieldProblem, ...] = ()
    status: int = 0
    """0 = the kind's own."""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def http_status(self) -> int:
        return self.status or KINDS[self.slug].status

    def as_dict(self) -> dict[str, Any]:
        """The body of application/problem+json."""
        errors = [{"path": e.path, "message": e.message, "suggestion": e.suggestion} for e in self.errors]
        body: dict[str, Any] = {
            "type": PROBLEM_PATH + self.slug,
            "title": KINDS[self.slug].title,
            "status": self.http_status,
            "detail": printable(self.detail),
            "errors": [{key: printable(value) for key, value in error.items()} for error in errors],
        }
        if self.slug == "not-modelled":
            body["fields"] = [error["path"] for error in body["errors"]]
        return body


def printable(text: str | None) -> str | None:
    """The text with lone surrogates replaced, so that it can be sent as UTF-8."""
    return None if text is None else text.encode("utf-8", "replace").decode()


def of_estimator_error(error: EstimatorError) -> Problem:
    """What the estimator refused."""
    if isinstance(error, NotModelled):
        return Problem("not-modelled", str(error), error.fields)
    if isinstance(error, JobError):
        return Problem("invalid-job", str(error), error.problems)
    return Problem("internal-error", "the estimate failed")


def of_validation_error(error: ValidationError, model: type[BaseModel]) -> Problem:
    """What pydantic refused in a body of this model."""
    return of_pydantic_errors(error.errors(include_url=False), model)


def of_pydantic_errors(errors: Sequence[Mapping[str, Any]], model: type[BaseModel] | None) -> Problem:
    """One problem for all of pydantic's findings; a value that fits no branch of a union is reported once."""
    found: dict[str, FieldProblem] = {}
    for error in errors:
        problem = _field_problem(error, model)
        found.setdefault(problem.path, problem)
    problems = tuple(found.values())
    return Problem("invalid-request", "; ".join(f"{p.path}: {p.message}" for p in problems), problems)


def _field_problem(error: Mapping[str, Any], model: type[BaseModel] | None) -> FieldProblem:
    location = tuple(error["loc"])
    path = dotted(location) or "body"
    kind = error["type"]
    if kind == "extra_forbidden":
        return FieldProblem(path, "is not a known key", _nearest_key(location, model))
    if kind == "missing":
        return FieldProblem(path, "is required")
    phrase = PHRASES.get(kind)
    if phrase is not None:
        return FieldProblem(path, phrase.format_map(error.get("ctx") or {}))
    message = str(error["msg"]).removeprefix("Value error, ")
    return FieldProblem(path, message[:1].lower() + message[1:])


def dotted(location: Iterable[Any]) -> str:
    """("job", "overrides", 2) as "job.overrides[2]"."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part != "[key]":
            path += f".{str(part)[:200]}" if path else str(part)[:200]
    return path


def _nearest_key(location: Sequence[Any], model: type[BaseModel] | None) -> str | None:
    if model is None:
        return None
    known = _keys(model)
    parent, key = dotted(location[:-1]), str(location[-1])
    siblings = {path.rpartition(".")[2]: path for path in known if path.rpartition(".")[0] == parent}
    elsewhere = {path.rpartition(".")[2]: path for path in known}
    for names in (siblings, elsewhere):
        close = difflib.get_close_matches(key[:200].lower(), names, n=1, cutoff=0.6 if names is siblings else 0.85)
        if close:
            return f"did you mean {names[close[0]]}?"
    return "known here: " + ", ".join(sorted(siblings)) if siblings else None


def _keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    paths = []
    for name, info in model.model_fields.items():
        paths.append(prefix + name)
        child = _model_of(info.annotation)
        if child is not None:
            paths += _keys(child, f"{prefix}{name}.")
    return paths


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return next(filter(None, map(_model_of, typing.get_args(annotation))), None)
    return None
