"""The real Megatron-Bridge as an oracle for ``runtime_config_update``.

Importing this module is cheap; everything else imports Bridge on the CPU, with ``scripts/bridge_stubs.py``.
Configurations are built from our own documents with Bridge's own classes, so that no Hugging Face files are needed;
with OOMBUDSMAN_HF_CONFIGS (a folder of ``ORG/NAME/config.json``) ``recipe`` calls the real recipe functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from estimator.catalog import fields as catalog

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
HF_VARIABLE = "OOMBUDSMAN_HF_CONFIGS"
CLEARED = ("CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_CPU_OFFLOAD_V1")


def installed() -> bool:
    try:
        return importlib.util.find_spec("megatron.bridge") is not None
    except ModuleNotFoundError:
        return False


@functools.cache
def load() -> Any:
    """Import Bridge; returns the catalogue script's module, whose ``plain`` gives a configuration's document."""
    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))
    import bridge_stubs
    import regenerate_catalog

    folder = os.environ.get(HF_VARIABLE)
    bridge_stubs.prepare(Path(folder) if folder else None)
    return regenerate_catalog


def recipe(module: str, name: str, gpu: str | None) -> Any:
    """ConfigContainer of the real recipe function; needs the Hugging Face files."""
    load().bridge_stubs.describe_gpu(gpu)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return getattr(importlib.import_module(module), name)()


def container(document: Mapping[str, Any]) -> Any:
    """ConfigContainer with Bridge's own section classes and the values of a document."""
    load()
    from megatron.bridge.training.config import ConfigContainer

    built = ConfigContainer.__new__(ConfigContainer)
    for field in dataclasses.fields(ConfigContainer):
        if field.name in document:
            value = document[field.name]
            is_object = isinstance(value, dict) and "_target_" in value
            setattr(built, field.name, _object(value) if is_object else value)
        else:
            setattr(built, field.name, _default(field))
    return built


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _object(document: Mapping[str, Any]) -> Any:
    """An object of the class that ``_target_`` names, its fields set without running the constructor."""
    import torch

    module, _, name = document["_target_"].rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    specs = catalog.class_fields(document["_target_"])
    built = cls.__new__(cls)
    for field in dataclasses.fields(cls):
        spec = specs.get(field.name)
        value = document.get(field.name)
        if field.name not in document or spec is None:
            value = _default(field)
        elif "dtype" in spec.kinds and isinstance(value, str):
            value = getattr(torch, value)
        elif isinstance(value, dict) and catalog.is_known_class(str(value.get("_target_"))):
            value = _object(value)
        elif isinstance(value, dict) and "_target_" in value:
            value = None
        elif isinstance(value, str) and not {"str", "enum"} & set(spec.kinds):
            value = value if field.name == "activation_func" else _default(field)  # a function known by name only
        object.__setattr__(built, field.name, value)
    return built


def run(config: Any, world_size: int, python: str = "", env: Mapping[str, str] | None = None) -> tuple[Any, str | None]:
    """(document after ``runtime_config_update``, the exception's text or None); ``python`` is executed with ``cfg``."""
    script = load()
    import torch
    from megatron.bridge.training.config import runtime_config_update

    saved = dict(os.environ)
    error = None
    try:
        for name in CLEARED:
            os.environ.pop(name, None)
        os.environ.update({"WORLD_SIZE": str(world_size), "RANK": "0", "LOCAL_RANK": "0", **(env or {})})
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            exec(compile(python, "<override>", "exec"), {"cfg": config, "torch": torch})
            try:
                runtime_config_update(config)
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
        return script.plain(config), error
    finally:
        os.environ.clear()
        os.environ.update(saved)
