"""From changes to assignments: the one list that every form is written from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from estimator.changes import OVERLAP_CLASS, Change, named_mixed_precision, routed

BRIDGE_PRECISION = "megatron.bridge.training.mixed_precision"
BRIDGE_OVERLAP = "megatron.bridge.training.comm_overlap"


@dataclass(frozen=True, slots=True)
class Assignment:
    """``cfg.<section>.<field> = value``; ``field`` may be dotted; ``delete`` removes an entry of env_vars."""

    section: str
    field: str
    value: Any
    delete: bool = False

    @property
    def path(self) -> str:
        return f"{self.section}.{self.field}"


@dataclass(frozen=True, slots=True)
class SectionStart:
    """A section that is not an object yet and must become one before its fields can be set.

    ``python`` creates it and needs ``imports``; ``structured`` is the same object, with its changed fields, for Hydra
    and YAML. None where the recipe's name is not known.
    """

    section: str
    python: str
    imports: tuple[str, ...]
    structured: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Assignments:
    """Everything an override writes: sections to create first, fields to set, variables to export (None: unset)."""

    starts: tuple[SectionStart, ...]
    fields: tuple[Assignment, ...]
    env: Mapping[str, str | None]


def assignments(changes: Iterable[Change], values: Mapping[str, Any]) -> Assignments:
    """The changes as assignments, each where Bridge keeps it (rules O1, O2), env_vars and exports in step.

    ``cfg.env_vars`` only fills in what is not exported (training/config.py:1832-1850), so a variable is both exported
    and written, and one to unset leaves both.
    """
    fields: list[Assignment] = []
    env: dict[str, str | None] = {}
    env_vars = values.get("env_vars") or {}
    for change in routed(changes, values):
        section, _, field = change.path.partition(".")
        if section not in ("env", "env_vars"):
            fields.append(Assignment(section, field, change.to))
            continue
        env[field] = None if change.to is None else str(change.to)
        if change.to is None:
            if field in env_vars:
                fields.append(Assignment("env_vars", field, None, delete=True))
        elif str(env_vars.get(field)) != str(change.to):
            fields.append(Assignment("env_vars", field, change.to))
    fields = list({item.path: item for item in fields}.values())
    starts = tuple(_starts(fields, values))
    return Assignments(starts, tuple(fields), env)


def _starts(fields: Iterable[Assignment], values: Mapping[str, Any]) -> Iterable[SectionStart]:
    sections = dict.fromkeys(item.section for item in fields)
    changed = {name: {item.field: item.value for item in fields if item.section == name} for name in sections}
    if "mixed_precision" in sections and isinstance(values.get("mixed_precision"), str):
        name = str(values["mixed_precision"]).replace("-", "_")
        known = named_mixed_precision(name)
        yield SectionStart(
            "mixed_precision",
            f"{name}()",
            (f"from {BRIDGE_PRECISION} import {name}",),
            None if known is None else {**known, **changed["mixed_precision"]},
        )
    if "comm_overlap" in sections and values.get("comm_overlap") is None:
        yield SectionStart(
            "comm_overlap",
            "CommOverlapConfig(tp_comm_overlap=False)",
            (f"from {BRIDGE_OVERLAP} import CommOverlapConfig",),
            {
                "_target_": OVERLAP_CLASS,
                "tp_comm_overlap": False,
                **changed["comm_overlap"],
            },
        )
