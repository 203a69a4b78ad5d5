"""What a rule is, and what a breach of one reads like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from estimator.rules.facts import Facts

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One rule that a job breaks: which fields, what is wrong, what would be right, and where that is written."""

    rule_id: str
    severity: Severity
    fields: tuple[str, ...]
    message: str
    fix: str
    source: str

    def as_dict(self) -> dict[str, Any]:
        """The problem as the API answers it."""
        return {
            "rule_id": self.rule_id,
            "severity": self.severity,
            "fields": list(self.fields),
            "message": self.message,
            "fix": self.fix,
            "source": self.source,
        }


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a rule table.

    ``breached`` answers from the facts of one job; ``message`` and ``fix`` are format strings over them (``{f.tp}``,
    ``{f.model[num_layers]}``). The rule holds for megatron-core releases from ``since`` on and before ``fixed_in``.
    """

    rule_id: str
    severity: Severity
    fields: tuple[str, ...]
    breached: Callable[[Facts], Any]
    message: str
    fix: str
    source: str
    since: str = "0.19.0"
    fixed_in: str | None = None

    def holds_in(self, megatron_core: str) -> bool:
        """Whether this megatron-core has the rule. A development version counts as before its release."""
        version = version_tuple(megatron_core)
        return self.fixed_in is None or version < version_tuple(self.fixed_in)

    def problem(self, facts: Facts) -> Problem:
        """The breach in words."""
        named = facts.for_words()
        return Problem(
            self.rule_id,
            self.severity,
            self.fields,
            self.message.format(f=named),
            self.fix.format(f=named),
            self.source,
        )


@lru_cache(maxsize=256)
def version_tuple(version: str) -> tuple[int, int, int, int]:
    """("0.19.2") -> (0, 19, 2, 1); a development, alpha or release-candidate version ends in 0 and sorts before it."""
    numbers = [0, 0, 0]
    released = 1
    for i, part in enumerate(version.split("+", maxsplit=1)[0].split(".")[:4]):
        digits = ""
        for character in part:
            if not character.isdigit():
                break
            digits += character
        if len(digits) < len(part):
            released = 0
        if i < 3 and digits:
            numbers[i] = int(digits)
    return numbers[0], numbers[1], numbers[2], released
