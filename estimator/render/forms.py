"""The assignments as Python lines, a Hydra command line and a YAML fragment; None with a reason where one cannot."""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from estimator.render.assignments import Assignments
from estimator.render.values import has_interpolation, hydra_literal, python_expression, structured

Form = tuple[str | None, str | None]
"""(text, reason): one of the two is None."""

NOTHING = "nothing in cfg changes"
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""The same output, ten times faster where libyaml is there."""


def python_form(work: Assignments) -> Form:
    """Lines to paste below the recipe's cfg, imports first."""
    imports: dict[str, None] = {}
    lines: list[str] = []
    for start in work.starts:
        imports.update(dict.fromkeys(start.imports))
        lines.append(f"cfg.{start.section} = {start.python}")
    for item in work.fields:
        if item.delete:
            lines.append(f"cfg.env_vars.pop({item.field!r}, None)")
            continue
        expression, needed = python_expression(item.path, item.value)
        imports.update(dict.fromkeys(needed))
        target = f'cfg.env_vars["{item.field}"]' if item.section == "env_vars" else f"cfg.{item.path}"
        lines.append(f"{target} = {expression}")
    if not lines:
        return None, NOTHING
    return "\n".join([*sorted(imports), *lines]) + "\n", None


def hydra_arguments(work: Assignments) -> tuple[tuple[str, ...], str | None]:
    """Overrides for Bridge's command line, one an argument, as process_config_with_overrides parses them.

    A struct config refuses new keys, so entries of env_vars are written with ``++`` (add or override).
    """
    reason = _inexpressible(work)
    if reason is not None:
        return (), reason
    created = {start.section for start in work.starts}
    arguments = [
        f"++{start.section}={hydra_literal(structured(start.section, start.structured))}" for start in work.starts
    ]
    for item in work.fields:
        if item.section in created:
            continue
        if item.delete:
            arguments.append(f"~env_vars.{item.field}")
            continue
        prefix = "++" if item.section == "env_vars" else ""
        arguments.append(f"{prefix}{item.path}={hydra_literal(structured(item.path, item.value))}")
    return tuple(arguments), None if arguments else NOTHING


def hydra_form(work: Assignments) -> Form:
    """The same overrides as one line, quoted for a POSIX shell."""
    arguments, reason = hydra_arguments(work)
    return (None, reason) if reason is not None else (shlex.join(arguments), None)


def yaml_form(work: Assignments) -> Form:
    """A fragment that Bridge merges over the recipe (process_config_with_overrides(config_filepath=...))."""
    reason = _inexpressible(work)
    if reason is None and any(item.delete for item in work.fields):
        reason = "a YAML fragment is merged over the recipe and cannot take an entry out of env_vars"
    if reason is not None:
        return None, reason
    document: dict[str, Any] = {start.section: structured(start.section, start.structured) for start in work.starts}
    created = set(document)
    for item in work.fields:
        if item.section in created:
            continue
        node = document.setdefault(item.section, {})
        *parents, leaf = [item.field] if item.section == "env_vars" else item.field.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = structured(item.path, item.value)
    if not document:
        return None, NOTHING
    text = yaml.dump(document, Dumper=_DUMPER, sort_keys=False, default_flow_style=False, allow_unicode=True)
    return str(text), None


def _inexpressible(work: Assignments) -> str | None:
    """Why Hydra and YAML cannot say these assignments; None if they can."""
    for start in work.starts:
        if start.structured is None:
            return f"the fields of the mixed-precision recipe {start.python} are not known here; use the Python form"
    for item in work.fields:
        if has_interpolation(item.value):
            return f"{item.path}: OmegaConf would read ${{...}} in the value as a reference"
    return None
