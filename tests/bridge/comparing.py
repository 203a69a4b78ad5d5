"""How two configurations are compared: what differs, what an override did not write, what Bridge overwrote."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from estimator.changes import Change, routed

MOVED = ("validation.eval_iters", "validation.eval_interval")
"""Bridge moves the deprecated fields of train here (training/config.py:1518-1525)."""
INITIALISERS = ("model.init_method", "model.output_layer_init_method", "model.embedding_init_method")


def ignored(path: str) -> bool:
    """Paths that do not describe memory: data, logging, the learning rate, initial values."""
    return path.startswith(("dataset.", "tokenizer.", "logger.", "scheduler.", *INITIALISERS, *MOVED))


def differences(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """Leaves in which two documents differ; tuples and lists are alike."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for name in sorted({*a, *b}):
            if not name.startswith("_"):
                yield from differences(a.get(name), b.get(name), f"{path}.{name}" if path else name)
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if list(a) != list(b):
            yield f"{path}: {a!r} != {b!r}"
    elif a != b:
        yield f"{path}: {a!r} != {b!r}"


def unknown_fields(cfg: Any, text: str) -> list[str]:
    """Assignments of a Python form to attributes that the config does not have (rule O3: Bridge would not say so)."""
    unknown = []
    for node in ast.parse(text).body:
        if not isinstance(node, ast.Assign):
            continue
        target, names = node.targets[0], []
        while isinstance(target, ast.Attribute):
            names.append(target.attr)
            target = target.value
        owner: Any = cfg
        for name in reversed(names):
            if not hasattr(owner, name):
                unknown.append(".".join(reversed(names)))
                break
            owner = getattr(owner, name)
    return unknown


def value_at(document: Mapping[str, Any], path: str) -> Any:
    value: Any = document
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def missing_settings(document: Mapping[str, Any], changes: tuple[Change, ...], values: Mapping[str, Any]) -> list[str]:
    """Changes that the override does not write."""
    return [
        change.path
        for change in routed(changes, values)
        if not change.path.startswith("env.") and value_at(document, change.path) != change.to
    ]


def silently_overwritten(
    document: Mapping[str, Any], changes: tuple[Change, ...], values: Mapping[str, Any]
) -> list[str]:
    """Changes that hold no longer after runtime_config_update, at the place where Megatron reads them."""
    lost = []
    for change in {change.path: change for change in changes}.values():
        if change.path.startswith("env."):
            continue
        if value_at(document, change.path) != change.to:
            lost.append(f"{change.path}: {change.to!r} became {value_at(document, change.path)!r}")
    return lost
