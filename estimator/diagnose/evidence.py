"""What was read in a text: facts with the place they stand at, failures, memory readings and pieces of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from estimator.diagnose.kinds import Kind


@dataclass(frozen=True, slots=True)
class Span:
    """Where a fact stands: 1-based line, 0-based column in characters, and the text itself as it stands there."""

    line: int
    column: int
    text: str


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that the text says. ``value`` None = the text says that it is unknown (or says something impossible).

    Names that end in ``_bytes`` are exact to ``resolution_bytes``, the width of the last printed digit.
    """

    name: str
    value: int | float | str | None
    span: Span
    resolution_bytes: int = 0
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The fact as the API answers it."""
        plain: dict[str, Any] = {
            "name": self.name,
            "value": self.value,
            "line": self.span.line,
            "column": self.span.column,
            "text": self.span.text,
        }
        if self.resolution_bytes:
            plain["resolution_bytes"] = self.resolution_bytes
        if self.note:
            plain["note"] = self.note
        return plain


@dataclass(frozen=True, slots=True)
class Failure:
    """One report of a failure: what kind, on which rank and device, with the facts of its own message."""

    kind: Kind
    rank: int | None
    span: Span
    facts: tuple[Fact, ...] = ()
    phase: str | None = None
    """Phase of the step, from the traceback that ends in this failure (:mod:`estimator.diagnose.phases`)."""
    sites: tuple[str, ...] = ()
    """What the innermost frames were doing ("logits", "attention" ...), innermost first."""
    frames: tuple[str, ...] = ()
    """The last frames, outermost first: "file:line function"."""
    iteration: int | None = None
    """Iterations that the log had reported on when the failure came; None = none reported."""
    time: str = ""

    def value(self, name: str) -> int | None:
        """The first fact of that name if it is a known whole number."""
        for fact in self.facts:
            if fact.name == name and isinstance(fact.value, int):
                return fact.value
        return None

    def fact(self, name: str) -> Fact | None:
        return next((f for f in self.facts if f.name == name), None)

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind.kind_id,
            "place": self.kind.place,
            "rank": self.rank,
            "line": self.span.line,
            "text": self.span.text,
            "phase": self.phase,
            "sites": list(self.sites),
            "iteration": self.iteration,
        }


@dataclass(frozen=True, slots=True)
class Reading:
    """A line in which a program reports memory of a healthy step. Names: allocated_bytes, max_allocated_bytes,
    reserved_bytes, max_reserved_bytes, weight_and_optimizer_bytes ..."""

    source: str
    rank: int | None
    iteration: int | None
    facts: tuple[Fact, ...]

    def value(self, name: str) -> int | None:
        for fact in self.facts:
            if fact.name == name and isinstance(fact.value, int):
                return fact.value
        return None


@dataclass(frozen=True, slots=True)
class Fragment:
    """A piece of the job that the text contains: "megatron_arguments", "bridge_yaml", "bridge_summary", "command",
    "hf_config", "deepspeed", "accelerate", "python"."""

    kind: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that one text says. ``first`` is the failure that counts, None if the text shows none."""

    failures: tuple[Failure, ...] = ()
    first: Failure | None = None
    noise: tuple[Failure, ...] = ()
    """Reports that only follow from a failure elsewhere: watchdogs, aborted communicators, terminated siblings."""
    warnings: tuple[Failure, ...] = ()
    readings: tuple[Reading, ...] = ()
    """The first, the last and the highest of each source and rank."""
    facts: tuple[Fact, ...] = ()
    """Facts outside of failures: world size, GPU name, recipe, allocator setting, root cause rank ..."""
    fragments: tuple[Fragment, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    """Kind id -> how often it was seen, the ones beyond the kept failures included."""
    ranks: tuple[int, ...] = ()
    iteration: int | None = None
    num_lines: int = 0
    num_bytes: int = 0
    truncated: bool = False
    """More was in the text than is kept."""

    def fact(self, name: str) -> Fact | None:
        return next((f for f in self.facts if f.name == name), None)

    def all_facts(self) -> tuple[Fact, ...]:
        """Facts of the failure that counts, then those outside of failures, then of the readings."""
        own = self.first.facts if self.first else ()
        return (*own, *self.facts, *(f for r in self.readings for f in r.facts))
