"""Writes ``estimator/catalog/data`` anew from an installed megatron-bridge.

    python scripts/regenerate_catalog.py HF_CONFIGS [--out estimator/catalog/data] [--only SUBSTRING]

HF_CONFIGS is a folder with ``ORG/NAME/config.json`` for the models that recipes name (download them from Hugging Face,
each under its own licence; only the resulting dimensions enter the catalogue).  A recipe whose file is missing is
reported and left out.  Needs megatron-bridge, megatron-core, transformers and CPU torch; no GPU, and no network at run
time.

Written: ``fields.json.gz`` (every section, class, field, type, default and choice of ``ConfigContainer``) and
``recipes.json.gz`` (names, facts and which sections each recipe has) and ``recipe_sections.gz`` (the distinct sections,
one a line, as differences to the class defaults).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import functools
import gzip
import importlib
import importlib.metadata
import inspect
import io
import json
import math
import os
import pkgutil
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bridge_stubs

DROP = object()
RECIPE_PACKAGES = (("library", "megatron.bridge.recipes"), ("perf", "megatron.bridge.perf_recipes"))
MODEL_PACKAGES = ("megatron.bridge.models", "megatron.bridge.peft", "megatron.bridge.data", "megatron.bridge.diffusion")


def class_path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def plain(value: Any) -> Any:  # noqa: C901
    """JSON form of a configuration value: dtypes, functions and enum members become names, dataclasses get
    ``_target_``."""
    import torch
    from transformers import PretrainedConfig

    if isinstance(value, str) and not isinstance(value, enum.Enum):
        return value.replace(
            f"{Path.cwd()}{os.sep}", ""
        )  # recipes put the working directory before their output folders
    if value is None or isinstance(value, (bool, int)):
        return value.name if isinstance(value, enum.Enum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [item for item in map(plain, value) if item is not DROP]
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value), key=str)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, PretrainedConfig):  # nested vision and text towers: sizes only
        numbers = {k: v for k, v in value.to_dict().items() if isinstance(v, (int, float)) and not k.startswith("_")}
        return {"_target_": class_path(type(value)), **{k: plain(v) for k, v in sorted(numbers.items())}}
    if isinstance(value, functools.partial):
        return plain(value.func)
    if isinstance(value, type) or inspect.isroutine(value):
        return activation_name(value) or getattr(value, "__name__", str(value))
    if type(value).__name__ == "ModuleSpec":
        return "ModuleSpec"
    if type(value).__name__ == "PipelineParallelLayerLayout":
        return plain(value.input_data)
    if hasattr(value, "to_cfg_dict") and not isinstance(value, type):
        return {key: plain(item) for key, item in value.to_cfg_dict().items()}
    if dataclasses.is_dataclass(value):
        fields = (f.name for f in dataclasses.fields(value) if not f.name.startswith("_"))
        return {"_target_": class_path(type(value)), **{name: plain(getattr(value, name)) for name in fields}}
    return {"_target_": class_path(type(value))}


def activation_name(function: Any) -> str | None:
    from megatron.bridge.utils.activation_map import callable_to_str

    return callable_to_str(function)


# ---------------------------------------------------------------------------------------------- fields


def type_names(annotation: Any) -> tuple[list[str], list[Any], dict[str, Any], list[type]]:
    """(kinds, literal choices, enum members name -> value, dataclasses) of one annotation."""
    import torch

    kinds: list[str] = []
    choices: list[Any] = []
    members: dict[str, Any] = {}
    classes: list[type] = []
    origin = typing.get_origin(annotation)
    if annotation is None or annotation is type(None):
        kinds.append("none")
    elif annotation in (bool, int, float, str):
        kinds.append(annotation.__name__)
    elif annotation is torch.dtype:
        kinds.append("dtype")
    elif origin is typing.Literal:
        choices.extend(plain(choice) for choice in typing.get_args(annotation))
        kinds.extend(sorted({"none" if choice is None else type(choice).__name__ for choice in choices}))
    elif origin in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            more = type_names(part)
            kinds.extend(more[0])
            choices.extend(more[1])
            members.update(more[2])
            classes.extend(more[3])
        if str in typing.get_args(annotation):
            choices = []
    elif origin in (list, tuple, set, frozenset) or annotation in (list, tuple, set):
        kinds.append("list")
    elif origin is dict or annotation is dict:
        kinds.append("dict")
    elif isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        kinds.append("enum")
        members.update({member.name: plain(member.value) for member in annotation})
    elif isinstance(annotation, type) and issubclass(annotation, Path):
        kinds.append("str")
    elif isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        kinds.append("object")
        classes.append(annotation)
    elif origin is not None and typing.get_origin(annotation) is not None and "Callable" in str(annotation):
        kinds.append("callable")
    else:
        kinds.append("any")
    return sorted(set(kinds)), choices, members, classes


def default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return plain(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return plain(field.default_factory())
    return DROP


def describe_class(cls: type) -> tuple[dict[str, dict[str, Any]], list[type]]:
    try:
        hints = typing.get_type_hints(cls)
    except Exception:
        hints = {}
    table: dict[str, dict[str, Any]] = {}
    found: list[type] = []
    for field in dataclasses.fields(cls):
        if field.name.startswith("_"):
            continue
        kinds, choices, members, classes = type_names(hints.get(field.name, typing.Any))
        entry: dict[str, Any] = {"t": kinds}
        default = default_of(field)
        if default is not DROP:
            entry["d"] = default
        if choices:
            entry["c"] = choices
        if members:
            entry["e"] = members
        table[field.name] = entry
        found.extend(classes)
    return table, found


def walk(packages: tuple[str, ...]) -> typing.Iterator[types.ModuleType]:
    for root in packages:
        try:
            package = importlib.import_module(root)
        except Exception:
            continue
        yield package
        for info in pkgutil.walk_packages(package.__path__, root + "."):
            try:
                module = importlib.import_module(info.name)
            except Exception as error:
                print(f"  skipped {info.name}: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
                continue
            yield module


def known_classes() -> list[type]:
    """ConfigContainer's own section classes and every provider, dataset, PEFT and precision class a section may
    hold."""
    from megatron.bridge.data.base import DataloaderConfig, DatasetProvider
    from megatron.bridge.models.model_provider import ModelProviderMixin
    from megatron.bridge.peft.base import PEFT
    from megatron.bridge.training import comm_overlap, config
    from megatron.core.transformer.transformer_config import TransformerConfig

    roots = (DataloaderConfig, DatasetProvider, ModelProviderMixin, PEFT, TransformerConfig)
    classes = {
        v
        for m in (config, comm_overlap)
        for v in vars(m).values()
        if isinstance(v, type) and dataclasses.is_dataclass(v)
    }
    for module in walk(MODEL_PACKAGES):
        for value in vars(module).values():
            if isinstance(value, type) and "__dataclass_fields__" in vars(value) and issubclass(value, roots):
                classes.add(value)
    return sorted((cls for cls in classes if isinstance(cls, type)), key=class_path)


def kind_of(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return "object" if "_target_" in value else "dict"
    return type(value).__name__


def widen(tables: dict[str, dict[str, dict[str, Any]]], documents: list[dict[str, Any]]) -> None:
    """Let a field take what the recipes themselves put into it, whatever its annotation says (``manual_gc_eval =
    100``)."""
    seen: dict[tuple[str, str], dict[str, Any]] = {}

    def look(value: Any) -> None:
        if isinstance(value, list):
            for item in value:
                look(item)
        if not isinstance(value, dict):
            return
        table = tables.get(value.get("_target_", ""), {})
        for name, item in value.items():
            look(item)
            if name in table:
                extra = seen.setdefault(
                    (name, json.dumps(table[name], sort_keys=True)), {"kinds": set(), "choices": []}
                )
                extra["kinds"].add(kind_of(item))
                if isinstance(item, str) and item not in extra["choices"]:
                    extra["choices"].append(item)

    for document in documents:
        for section in document.values():
            look(section)
    for table in tables.values():
        for name, spec in table.items():
            extra = seen.get((name, json.dumps(spec, sort_keys=True)))
            if extra is None or {"any", "callable"} & set(spec["t"]):
                continue
            kinds = set(extra["kinds"])
            if {"float", "dtype", "enum"} & set(spec["t"]):
                kinds -= {"int", "str"}
            table[name] = {**spec, "t": sorted(set(spec["t"]) | kinds)}
            if spec.get("c"):
                table[name]["c"] = spec["c"] + [choice for choice in extra["choices"] if choice not in spec["c"]]


def build_fields(extra: set[type], documents: list[dict[str, Any]]) -> dict[str, Any]:
    from megatron.bridge.training.config import ConfigContainer

    todo = [*known_classes(), *extra]
    tables: dict[str, dict[str, dict[str, Any]]] = {}
    real: dict[str, type] = {}
    while todo:
        cls = todo.pop()
        if class_path(cls) in tables or cls is ConfigContainer:
            continue
        tables[class_path(cls)], found = describe_class(cls)
        real[class_path(cls)] = cls
        todo.extend(found)
    widen(tables, documents)
    sections: dict[str, Any] = {}
    hints = typing.get_type_hints(ConfigContainer)
    for field in dataclasses.fields(ConfigContainer):
        if field.name.startswith("_"):
            continue
        kinds, _, _, classes = type_names(hints[field.name])
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        sections[field.name] = {"t": kinds, "classes": [class_path(c) for c in classes], "required": required}
    specs = sorted({json.dumps(e, sort_keys=True) for t in tables.values() for e in t.values()})
    number = {text: index for index, text in enumerate(specs)}
    packed: dict[str, Any] = {}
    for name in sorted(tables):
        base = max(
            (class_path(b) for b in real[name].__mro__[1:] if class_path(b) in tables),
            key=lambda b: sum(tables[name].get(f) == entry for f, entry in tables[b].items()),
            default=None,
        )
        own = {f: number[json.dumps(e, sort_keys=True)] for f, e in tables[name].items()}
        if base:
            own = {f: n for f, n in own.items() if tables[base].get(f) != tables[name][f]}
        bases = [class_path(b) for b in real[name].__mro__[1:] if class_path(b) in tables]
        packed[name] = {"base": base, "bases": bases, "fields": own}
    return {
        "versions": versions(),
        "sections": sections,
        "specs": [json.loads(text) for text in specs],
        "classes": packed,
        "precision": precision_recipes(),
    }


def precision_recipes() -> dict[str, Any]:
    from megatron.bridge.training.mixed_precision import MIXED_PRECISION_RECIPES, MixedPrecisionConfig

    default = plain(MixedPrecisionConfig())
    return {
        name: {k: v for k, v in plain(make()).items() if v != default[k]}
        for name, make in sorted(MIXED_PRECISION_RECIPES.items())
        if "-" not in name
    }


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("megatron-bridge", "megatron-core", "transformers")}


# ---------------------------------------------------------------------------------------------- recipes


def find_recipe_functions() -> list[dict[str, Any]]:
    """Every ``*_config`` function without required arguments of the two recipe packages, with its other exported
    names."""
    found: dict[Any, dict[str, Any]] = {}
    exported: dict[Any, set[str]] = {}
    for kind, root in RECIPE_PACKAGES:
        for module in walk((root,)):
            for name, value in vars(module).items():
                if not name.endswith("_config") or name.startswith("_") or not inspect.isfunction(value):
                    continue
                if not value.__module__.startswith(root) or value.__name__.startswith("_"):
                    continue
                exported.setdefault(value, set()).add(name)
                needs = [p for p in inspect.signature(value).parameters.values() if p.default is p.empty and p.kind < 2]
                if value.__module__ == module.__name__ and not needs:
                    found[value] = {"function": value, "module": value.__module__, "name": value.__name__, "kind": kind}
    for value, entry in found.items():
        entry["aliases"] = sorted(exported.get(value, set()) - {entry["name"]})
    return sorted(found.values(), key=lambda e: (e["name"], e["module"]))


def facts_from_name(name: str) -> dict[str, Any]:
    gpus = re.search(r"_(\d+)gpu_([a-z]+\d+)", name)
    task = next((t for t in ("peft", "sft") if f"_{t}_" in name), "pretrain")
    return {"num_gpus": int(gpus[1]) if gpus else None, "gpu": gpus[2] if gpus else None, "task": task}


def differences(value: Any, defaults: dict[str, dict[str, Any]]) -> Any:
    """Leave out, at every depth, what the class says by itself."""
    if isinstance(value, list):
        return [differences(item, defaults) for item in value]
    if not isinstance(value, dict):
        return value
    known = defaults.get(value.get("_target_", ""), {})
    return {
        key: differences(item, defaults)
        for key, item in value.items()
        if key == "_target_" or key not in known or known[key] != item
    }


def classes_in(value: Any, into: set[type]) -> None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        into.add(type(value))
        for field in dataclasses.fields(value):
            classes_in(getattr(value, field.name, None), into)
    elif isinstance(value, (list, tuple)):
        for item in value:
            classes_in(item, into)


def summary(document: dict[str, Any]) -> dict[str, Any]:
    model, train = document["model"], document["train"]
    names = [
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "vocab_size",
        "seq_length",
        "num_moe_experts",
        "moe_router_topk",
        "multi_latent_attention",
        "mtp_num_layers",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "sequence_parallel",
        "recompute_granularity",
    ]
    precision = document.get("mixed_precision")
    if isinstance(precision, dict):
        name = next((kind for kind in ("bf16", "fp16") if precision.get(kind)), "fp32")
        extra = f" + fp8 {precision['fp8_recipe']}" if precision.get("fp8") else ""
        precision = name + (" + nvfp4" if precision.get("fp4") else extra)
    return {
        "model_class": model["_target_"].rpartition(".")[2],
        **{name: model[name] for name in names if model.get(name) not in (None, False)},
        "micro_batch_size": train.get("micro_batch_size"),
        "global_batch_size": train.get("global_batch_size"),
        "precision": precision,
    }


def build_recipes(only: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], set[type]]:
    index, documents, classes = [], [], set()
    for entry in find_recipe_functions():
        if only not in entry["name"]:
            continue
        facts = facts_from_name(entry["name"])
        bridge_stubs.describe_gpu(facts["gpu"])
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                config = entry["function"]()
        except BaseException as error:
            print(f"  no {entry['name']}: {type(error).__name__}: {str(error)[:120]}", file=sys.stderr)
            continue
        if type(config).__name__ != "ConfigContainer":
            continue
        classes_in(config, classes)
        document = plain(config)
        document.pop("_target_")
        about = {k: entry[k] for k in ("name", "aliases", "module", "kind")} | facts
        index.append({**about, "summary": summary(document)})
        documents.append(document)
    return index, documents, classes


def write(path: Path, text: str) -> None:
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
        packed.write(text.encode())
    print(f"{path}: {path.stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hf_configs", type=Path)
    here = Path(__file__).resolve().parent
    parser.add_argument("--out", type=Path, default=here.parent / "estimator" / "catalog" / "data")
    parser.add_argument("--only", default="", help="recipes whose name contains this (for trying out)")
    options = parser.parse_args()
    bridge_stubs.prepare(options.hf_configs)
    index, documents, classes = build_recipes(options.only)
    fields = build_fields(classes, documents)
    defaults: dict[str, dict[str, Any]] = {}

    def table(name: str) -> dict[str, int]:
        entry = fields["classes"][name]
        return {**(table(entry["base"]) if entry["base"] else {}), **entry["fields"]}

    for name in fields["classes"]:
        specs = {f: fields["specs"][n] for f, n in table(name).items()}
        defaults[name] = {f: s["d"] for f, s in specs.items() if "d" in s}
    compact = functools.partial(json.dumps, separators=(",", ":"), sort_keys=True)
    numbers: dict[str, int] = {}
    for row, document in zip(index, documents, strict=True):
        texts = [compact(differences(document[name], defaults)) for name in sorted(document)]
        row["sections"] = [numbers.setdefault(text, len(numbers)) for text in texts]
    names = sorted(documents[0])
    options.out.mkdir(parents=True, exist_ok=True)
    write(options.out / "fields.json.gz", compact(fields))
    write(options.out / "recipes.json.gz", compact({"versions": versions(), "sections": names, "recipes": index}))
    write(options.out / "recipe_sections.gz", "\n".join(numbers))
    print(f"{len(index)} recipes, {len(fields['classes'])} classes")


if __name__ == "__main__":
    main()
