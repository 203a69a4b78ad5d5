"""What an override asks for, before anybody knows whether the document has such a field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Lookup = Callable[[tuple[str, ...]], Any]
"""Current value at a path of the document; raises KeyError if there is none."""

MAX_OVERRIDES = 2_000
MAX_OVERRIDE_CHARS = 100_000
MAX_TOTAL_CHARS = 400_000


class Unreadable(ValueError):
    """An override that cannot be read; ``suggestion`` says what would be right."""

    def __init__(self, message: str, suggestion: str | None = None) -> None:
        self.suggestion = suggestion
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Operation:
    """One assignment or removal. ``path`` is below ``cfg``; ``where`` names the override in messages."""

    kind: Literal["set", "add", "force", "delete"]
    """Hydra's ``a=b``, ``+a=b``, ``++a=b``, ``~a``; Python assignments are ``set``, ``del`` is ``delete``."""
    path: tuple[str, ...]
    value: Any
    """The value itself, or for Python a function of the current document that gives it."""
    where: str
    syntax: Literal["hydra", "python"]
    line: str = ""

    def evaluate(self, lookup: Lookup) -> Any:
        return self.value(lookup) if callable(self.value) else self.value
