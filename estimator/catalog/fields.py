"""Every section, class, field, type, default and choice of megatron-bridge 0.6.2's ``ConfigContainer``.

The table is generated (``scripts/regenerate_catalog.py``) from the released package; this module only reads it, lazily.
A *class* is named by its ``_target_`` ("megatron.bridge.models.gpt_provider.GPTModelProvider").
"""

from __future__ import annotations

import difflib
import functools
import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

MISSING = object()
"""Default of a field that has none."""

DEFAULT_CLASSES = {
    "model": "megatron.bridge.models.gpt_provider.GPTModelProvider",
    "dataset": "megatron.bridge.training.config.GPTDatasetConfig",
}
"""The class a section is read as when neither recipe nor ``_target_`` says one and Bridge accepts several."""

TARGET_KEYS = frozenset({"_target_", "_call_", "_args_", "_partial_", "_name_"})
"""Keys of Bridge's YAML that describe an object, not a field of it (megatron-core 0.19.2,
training/config/yaml_utils.py)."""


KIND_WORDS = {
    "any": "any value",
    "bool": "true or false",
    "callable": "a function's name",
    "dict": "a mapping",
    "dtype": "a dtype (bfloat16, float32 ...)",
    "enum": "a name",
    "float": "a number",
    "int": "an integer",
    "list": "a list",
    "object": "an object with _target_",
    "str": "a text",
}
"""Kinds of value in words, for messages."""


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """What one field takes. ``kinds``: bool, int, float, str, dtype, enum, callable, list, dict, object, none, any."""

    name: str
    kinds: tuple[str, ...]
    default: Any = MISSING
    choices: tuple[Any, ...] = ()
    members: tuple[tuple[str, Any], ...] = ()
    """Of an enum field: member name and value."""

    @property
    def nullable(self) -> bool:
        return "none" in self.kinds or "any" in self.kinds or self.default is None

    @property
    def required(self) -> bool:
        return self.default is MISSING

    def describe(self) -> str:
        """Type in words, for messages: "an integer or null"."""
        if self.choices:
            words = [json.dumps(choice) for choice in self.choices]
        elif self.members:
            words = [name for name, _ in self.members]
        else:
            words = [KIND_WORDS[kind] for kind in self.kinds if kind != "none"] or ["null"]
        if self.nullable and "null" not in words:
            words.append("null")
        return " or ".join(words)


@dataclass(frozen=True, slots=True)
class SectionSpec:
    """A field of ``ConfigContainer`` itself: which classes it may hold, whether it may be null or must be given."""

    name: str
    classes: tuple[str, ...]
    nullable: bool
    required: bool
    kinds: tuple[str, ...]

    @property
    def default_class(self) -> str | None:
        return DEFAULT_CLASSES.get(self.name) or (self.classes[0] if self.classes else None)


@functools.cache
def _table() -> dict[str, Any]:
    data = resources.files("estimator.catalog").joinpath("data/fields.json.gz").read_bytes()
    table: dict[str, Any] = json.loads(gzip.decompress(data))
    return table


@functools.cache
def sections() -> Mapping[str, SectionSpec]:
    """Section name -> its classes, in ConfigContainer's order of names."""
    return {
        name: SectionSpec(name, tuple(s["classes"]), "none" in s["t"], s["required"], tuple(s["t"]))
        for name, s in sorted(_table()["sections"].items())
    }


def versions() -> dict[str, str]:
    """Package versions that the table was generated from."""
    return dict(_table()["versions"])


def is_known_class(target: str) -> bool:
    return target in _table()["classes"]


def base_classes(target: str) -> tuple[str, ...]:
    """Known base classes of a known class, nearest first."""
    return tuple(_table()["classes"][target]["bases"])


def is_subclass(target: str, parent: str) -> bool:
    """Whether ``target`` is ``parent`` or derives from it, as far as the table knows both."""
    return target == parent or (is_known_class(target) and parent in base_classes(target))


@functools.cache
def class_fields(target: str) -> Mapping[str, FieldSpec]:
    """Field name -> spec of a known class, inherited fields included. Raises KeyError for an unknown class."""
    table = _table()
    entry = table["classes"][target]
    fields = dict(class_fields(entry["base"])) if entry["base"] else {}
    for name, number in entry["fields"].items():
        spec = table["specs"][number]
        fields[name] = FieldSpec(
            name=name,
            kinds=tuple(spec["t"]),
            default=spec.get("d", MISSING),
            choices=tuple(spec.get("c", ())),
            members=tuple(spec.get("e", {}).items()),
        )
    return fields


def section_accepts(section: str, target: str) -> bool:
    """Whether a known class may stand in this section: one of its classes or a subclass, or a base it is derived from.

    Recipes use megatron-core's own ``DistributedDataParallelConfig`` where Bridge declares its subclass, and dataset or
    model classes that Bridge duck-types, so those sections take any class of the table that is of the same family.
    """
    classes = sections()[section].classes
    if any(is_subclass(target, c) or is_subclass(c, target) for c in classes):
        return True
    family = {"model": "Provider", "dataset": "Dataset", "peft": ""}.get(section)
    return family is not None and is_known_class(target) and family in target.rpartition(".")[2]


def class_by_short_name(short: str) -> str | None:
    """``CommOverlapConfig`` -> its ``_target_``; Bridge's class before megatron-core's of the same name."""
    found = [name for name in _table()["classes"] if name.rpartition(".")[2] == short]
    return min(found, key=lambda name: (not name.startswith("megatron.bridge."), name), default=None)


def new_object(target: str) -> dict[str, Any]:
    """Document of a fresh object of a known class: ``_target_`` and every default; fields without default are left
    out."""
    fields = class_fields(target)
    return {"_target_": target, **{n: _copy(f.default) for n, f in fields.items() if f.default is not MISSING}}


def expand(value: Any) -> Any:
    """Fill in the class defaults of every ``_target_`` mapping in ``value``, at every depth; returns new containers."""
    if isinstance(value, list):
        return [expand(item) for item in value]
    if not isinstance(value, dict):
        return value
    target = value.get("_target_")
    given = {key: expand(item) for key, item in value.items()}
    return {**new_object(target), **given} if isinstance(target, str) and is_known_class(target) else given


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


@functools.cache
def precision_recipes() -> Mapping[str, Mapping[str, Any]]:
    """Name of a mixed-precision recipe -> the fields in which it differs from ``MixedPrecisionConfig()``.

    Source: megatron-bridge 0.6.2, training/mixed_precision.py:167-440.
    """
    recipes: Mapping[str, Mapping[str, Any]] = _table()["precision"]
    return recipes


def precision_config(name: str) -> dict[str, Any]:
    """Document of the ``MixedPrecisionConfig`` that a recipe name ("bf16_mixed", "bf16-mixed") stands for.

    Raises KeyError for an unknown name.
    """
    changed = precision_recipes()[name.replace("-", "_")]
    return {**new_object("megatron.bridge.training.mixed_precision.MixedPrecisionConfig"), **changed}


def nearest(word: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Known names that look most like ``word``, best first; also those that contain all of its ``_`` parts."""
    names = list(known)
    close = difflib.get_close_matches(word[:200], names, n=count, cutoff=0.6)
    if len(close) < count:
        parts = [part for part in word[:200].lower().split("_") if part]
        close += [n for n in names if n not in close and parts and all(p in n.lower() for p in parts)]
    return close[:count]
