"""Errors that a caller can show to a person: each says what is wrong, where, and what would be right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """One thing wrong in a request: ``path`` is a dotted path ("job.config.model.hidden_size", "job.overrides[2]")."""

    path: str
    message: str
    suggestion: str | None = None


class EstimatorError(Exception):
    """Base of every error that this library raises on purpose."""


class JobError(EstimatorError):
    """The job cannot be read: syntax, an unknown name, a wrong type or an impossible number (HTTP 422 or 400)."""

    def __init__(self, problems: Sequence[FieldProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{p.path}: {p.message}" for p in self.problems))


class NotModelled(EstimatorError):
    """The job is well formed, but of a kind this estimator has no memory model for (HTTP 422 ``not-modelled``)."""

    def __init__(self, fields: Sequence[FieldProblem]) -> None:
        self.fields = tuple(fields)
        super().__init__("not modelled yet: " + ", ".join(f.path for f in self.fields))
