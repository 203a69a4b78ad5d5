"""From evidence to a job: what the text says fills it, what it does not say is asked for by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from estimator.catalog import fields as catalog
from estimator.catalog.gpus import list_gpus
from estimator.catalog.recipes import find_recipe
from estimator.diagnose.commands import Command, read_command
from estimator.diagnose.evidence import Evidence, Fragment
from estimator.diagnose.facts_outside import known_gpu, known_recipe
from estimator.diagnose.translation import MISSING, from_deepspeed, from_hugging_face, literal, printed_arguments
from estimator.errors import EstimatorError, JobError
from estimator.job import build_document
from estimator.job.megatron_lm import Assignments, from_megatron
from estimator.requests import ClusterRequest, JobRequest

MAX_YAML_CHARS = 300_000
MAX_YAML_DEPTH = 40
MAX_ITEMS = 50_000
MAX_REPAIRS = 6
CAPACITY_TOLERANCE = 0.005
"""A card is recognised by its capacity when it is this close to a known one's."""

_SUMMARY_SECTION = re.compile(r"\s{0,4}\[([a-z_]{2,20})\]")
_SUMMARY_FIELD = re.compile(r"\s{1,8}([A-Za-z_0-9]{1,80}): (.{1,2000}?)(?:  \(Mcore default: .{0,2000}\))?$")
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")


@dataclass(frozen=True, slots=True)
class Missing:
    """What nobody said. ``likely`` is the most likely value, None if nothing speaks for one."""

    path: str
    likely: Any = None

    def as_dict(self) -> dict[str, Any]:
        return {"path": self.path, "likely": self.likely}


@dataclass(frozen=True, slots=True)
class Proposal:
    """A job and a cluster as the evidence has them. ``job`` is readable unless something is ``missing``."""

    job: JobRequest | None
    cluster: ClusterRequest | None
    missing: tuple[Missing, ...] = ()
    sources: tuple[str, ...] = ()
    """Where the job comes from: "megatron_arguments (line 12)"."""
    notes: tuple[str, ...] = ()
    known_of_cluster: Mapping[str, Any] = field(default_factory=dict)
    """What is known of the cluster, also where it does not suffice for one: gpu, num_gpus, gpus_per_node."""


@dataclass(slots=True)
class _Found:
    recipe: str | None = None
    assignments: Assignments = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    num_gpus: int | None = None
    gpus_per_node: int | None = None
    gpu: str | None = None
    max_positions: int | None = None
    sources: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def job_from_evidence(evidence: Evidence, known_cluster: ClusterRequest | None = None) -> Proposal:
    """Later sources win over earlier ones: recipe < Hugging Face < DeepSpeed < Megatron's arguments < Bridge's summary
    < Bridge's YAML < overrides on the command line. Never raises; nothing in the text is executed."""
    found = _Found()
    recipe = evidence.fact("recipe")
    if recipe is not None and isinstance(recipe.value, str):
        found.recipe = recipe.value
        found.sources.append(f"recipe (line {recipe.span.line})")
    order = ("json", "accelerate", "command", "megatron_arguments", "bridge_summary", "bridge_yaml", "python")
    for kind in order:
        for piece in evidence.fragments:
            if piece.kind == kind:
                _take(found, piece)
    _from_facts(found, evidence)
    config = _nested(found.assignments)
    _merge(config, found.config)
    cluster, missing = _cluster(found, evidence, known_cluster)
    job, problems = _readable(found, config)
    if job is None:
        missing = [*_missing_of_job(found, config, cluster), *missing]
    if problems:
        found.notes.append(
            "left out, because they cannot be read as Megatron-Bridge's settings: " + ", ".join(problems[:8])
        )
    known = {
        name: value for name in ("gpu", "num_gpus", "gpus_per_node") if (value := getattr(found, name)) is not None
    }
    return Proposal(job, cluster, tuple(missing), tuple(found.sources), tuple(found.notes), known)


# ---------------------------------------------------------------------- pieces


def _take(found: _Found, piece: Fragment) -> None:
    readers = {
        "json": _take_json,
        "accelerate": _take_yaml_foreign,
        "command": _take_command,
        "megatron_arguments": _take_arguments,
        "bridge_summary": _take_summary,
        "bridge_yaml": _take_bridge,
        "python": _take_python,
    }
    if readers[piece.kind](found, piece.text):
        found.sources.append(f"{piece.kind} (line {piece.line})")


def _take_json(found: _Found, text: str) -> bool:
    try:
        value = json.loads(text[: text.rfind("}") + 1])
    except (ValueError, RecursionError):
        return False
    if not isinstance(value, dict):
        return False
    assignments = {**from_hugging_face(value), **from_deepspeed(value)}
    positions = value.get("max_position_embeddings")
    if isinstance(positions, int) and not isinstance(positions, bool) and positions > 0:
        found.max_positions = positions
    if not assignments and "model" in value and isinstance(value["model"], dict):  # a job document as JSON
        _merge(found.config, {k: v for k, v in value.items() if k in catalog.sections()})
        return True
    found.assignments.update(assignments)
    return bool(assignments)


def _take_yaml_foreign(found: _Found, text: str) -> bool:
    value = safe_yaml(text)
    if not isinstance(value, dict):
        return False
    found.assignments.update(from_deepspeed(value))
    processes = value.get("num_processes")
    if isinstance(processes, int) and not isinstance(processes, bool) and processes > 0:
        found.num_gpus = processes
    return True


def _take_command(found: _Found, text: str) -> bool:
    command: Command = read_command(text)
    found.num_gpus = command.world_size or found.num_gpus
    found.gpus_per_node = command.gpus_per_node or found.gpus_per_node
    if command.recipe and known_recipe(command.recipe):
        found.recipe = command.recipe
    if command.gpu:
        found.gpu = known_gpu(command.gpu) or found.gpu
    found.overrides += command.overrides
    found.assignments.update(from_megatron(command.arguments))
    setting = command.environment.get("PYTORCH_CUDA_ALLOC_CONF") or command.environment.get("PYTORCH_ALLOC_CONF")
    if setting:
        found.assignments["env_vars.PYTORCH_CUDA_ALLOC_CONF"] = setting
    return bool(command.world_size or command.recipe or command.overrides or command.arguments)


def _take_arguments(found: _Found, text: str) -> bool:
    arguments = printed_arguments(text)
    if len(arguments) < 3:
        return False
    found.assignments.update(from_megatron(arguments))
    world = arguments.get("world_size")
    if isinstance(world, int) and not isinstance(world, bool) and world > 0:
        found.num_gpus = world
    return True


def _take_summary(found: _Found, text: str) -> bool:
    section = None
    count = 0
    for line in text.split("\n"):
        if match := _SUMMARY_SECTION.match(line):
            section = match[1] if match[1] in catalog.sections() else None
            continue
        field_match = _SUMMARY_FIELD.match(line) if section else None
        if field_match and (value := literal(field_match[2])) is not MISSING:
            found.assignments[f"{section}.{field_match[1]}"] = value
            count += 1
    return count > 0


def _take_bridge(found: _Found, text: str) -> bool:
    value = safe_yaml(text)
    if not isinstance(value, dict):
        return False
    known = {str(k): v for k, v in value.items() if str(k) in catalog.sections()}
    if not known and len(value) == 1:  # wrapped once more, as some launchers do
        inner = next(iter(value.values()))
        known = {str(k): v for k, v in inner.items() if str(k) in catalog.sections()} if isinstance(inner, dict) else {}
    _merge(found.config, known)
    return bool(known)


def _take_python(found: _Found, text: str) -> bool:
    found.overrides += [line.strip() for line in text.split("\n") if line.strip()][:400]
    return True


def safe_yaml(text: str) -> Any:
    """YAML by the safe loader, refused when it is long, deep or expands; None for what is not YAML.

    A log may follow the document: the longest beginning that is YAML counts, tried at a few cuts.
    """
    text = text[:MAX_YAML_CHARS]
    lines = text.split("\n")
    depth = 0
    for char in text:
        depth += (char in "[{") - (char in "]}")
        if depth > MAX_YAML_DEPTH:
            return None
    if any(len(line) - len(line.lstrip(" -?")) > 4 * MAX_YAML_DEPTH for line in lines) or text.count("*") > 500:
        return None
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for _ in range(4):
        try:
            value = yaml.load("\n".join(lines), Loader=loader)  # noqa: S506 (both are safe)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            if mark is None or mark.line < 2 or mark.line >= len(lines):
                return None
            lines = lines[: mark.line]
            continue
        except (yaml.YAMLError, ValueError, TypeError, RecursionError, OverflowError):
            return None
        return value if _is_small(value) else None
    return None


def _is_small(value: Any) -> bool:
    stack = [(value, 0)]
    seen = 0
    while stack:
        item, depth = stack.pop()
        seen += 1
        if seen > MAX_ITEMS or depth > MAX_YAML_DEPTH:
            return False
        if isinstance(item, dict):
            stack.extend((child, depth + 1) for child in item.values())
        elif isinstance(item, list):
            stack.extend((child, depth + 1) for child in item)
    return True


# ---------------------------------------------------------------------- a document


def _from_facts(found: _Found, evidence: Evidence) -> None:
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        fact = evidence.fact(name)
        if fact is not None:
            found.assignments.setdefault(f"model.{name}", fact.value)
    fact = evidence.fact("allocator_setting")
    if fact is not None and fact.value == "expandable_segments":
        found.assignments.setdefault("env_vars.PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if (world := evidence.fact("world_size")) is not None and isinstance(world.value, int):
        found.num_gpus = found.num_gpus or world.value
    if (node := evidence.fact("gpus_per_node")) is not None and isinstance(node.value, int):
        found.gpus_per_node = found.gpus_per_node or node.value
    if (gpu := evidence.fact("gpu")) is not None and isinstance(gpu.value, str):
        found.gpu = found.gpu or gpu.value


def _nested(assignments: Mapping[str, Any]) -> dict[str, Any]:
    """Assignments of known fields as a document; a precision recipe becomes the fields it stands for."""
    config: dict[str, Any] = {}
    precision = assignments.get("mixed_precision")
    if isinstance(precision, str) and precision.replace("-", "_") in catalog.precision_recipes():
        config["mixed_precision"] = catalog.precision_config(precision)
    for path, value in assignments.items():
        section, dot, name = path.partition(".")
        if not dot or section not in catalog.sections():
            continue
        if section == "mixed_precision" and "mixed_precision" not in config:
            continue
        if section != "env_vars":
            target = catalog.sections()[section].default_class
            if target is None or name not in catalog.class_fields(target):
                continue
        config.setdefault(section, {})[name] = value
    return config


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for name, section in other.items():
        if isinstance(section, dict) and isinstance(into.get(name), dict):
            into[name] = {**into[name], **section}
        else:
            into[name] = section


def _readable(found: _Found, config: dict[str, Any]) -> tuple[JobRequest | None, list[str]]:
    """The request if Bridge's document can be built from it, without the settings that it does not know."""
    overrides = list(found.overrides)
    recipe = found.recipe
    module = None
    dropped: list[str] = []
    for _ in range(MAX_REPAIRS):
        try:
            build_document(recipe=recipe, module=module, config=config or None, overrides=overrides)
        except JobError as error:
            removed = _repair(config, overrides, [p.path for p in error.problems])
            if any(p.path == "job.module" for p in error.problems) and recipe is not None and module is None:
                module = _likely_module(recipe)
                continue
            if not removed:
                return None, dropped
            dropped += removed
            continue
        except (EstimatorError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None, dropped
        if recipe is None and not (config.get("model") or overrides):
            return None, dropped
        return JobRequest(recipe, module, config or None, tuple(overrides)), dropped
    return None, dropped


def _likely_module(recipe: str) -> str | None:
    """Where several modules export a recipe, the one of the library rather than of the performance harness."""
    try:
        return find_recipe(recipe).module
    except JobError as error:
        words = [p.suggestion or "" for p in error.problems]
        names = re.findall(r"megatron\.bridge\.[\w.]{1,120}", " ".join(words))
        return min(names, key=lambda n: ("perf" in n, n), default=None)


def _repair(config: dict[str, Any], overrides: list[str], paths: Iterable[str]) -> list[str]:
    """Take out what the problems name; returns what was taken out."""
    removed: list[str] = []
    indices: set[int] = set()
    for path in paths:
        if match := re.match(r"job\.overrides\[(\d{1,6})\]", path):
            indices.add(int(match[1]))
            continue
        parts = path.removeprefix("job.config.").split(".")
        section = config.get(parts[0])
        if len(parts) > 1 and isinstance(section, dict) and parts[1] in section:
            del section[parts[1]]
            removed.append(".".join(parts[:2]))
        elif len(parts) == 1 and parts[0] in config:
            del config[parts[0]]
            removed.append(parts[0])
    for index in sorted(indices, reverse=True):
        if index < len(overrides):
            removed.append(overrides.pop(index)[:80])
    return removed


# ---------------------------------------------------------------------- cluster, and what is missing


def _cluster(
    found: _Found, evidence: Evidence, known: ClusterRequest | None
) -> tuple[ClusterRequest | None, list[Missing]]:
    if known is not None:
        return known, []
    total = evidence.first.value("total_bytes") if evidence.first else None
    gpu = found.gpu
    if gpu is None and total is not None:
        gpu = gpu_of_capacity(total)
        if gpu is not None:
            found.notes.append(f"the GPU is taken for a {gpu} by its capacity of {total} bytes")
            found.gpu = gpu
    missing = []
    if gpu is None:
        likely = _nearest_gpu(total) if total else None
        missing.append(Missing("cluster.gpu", likely))
    highest = max(evidence.ranks, default=-1) + 1
    if found.num_gpus is None:
        missing.append(Missing("cluster.num_gpus", _round_up(highest) if highest > 1 else 8))
    if gpu is None or found.num_gpus is None:
        return None, missing
    per_node = found.gpus_per_node if found.gpus_per_node and found.gpus_per_node <= 1024 else None
    return ClusterRequest(gpu=gpu, num_gpus=found.num_gpus, gpus_per_node=per_node, total_bytes=total), missing


def gpu_of_capacity(total_bytes: int) -> str | None:
    """The GPU whose total memory is nearest, if within :data:`CAPACITY_TOLERANCE`."""
    gpu = min(list_gpus(), key=lambda g: (abs(g.total_bytes - total_bytes), g.name))
    return gpu.name if abs(gpu.total_bytes - total_bytes) <= CAPACITY_TOLERANCE * total_bytes else None


def _nearest_gpu(total_bytes: int) -> str:
    return min(list_gpus(), key=lambda g: abs(g.total_bytes - total_bytes)).name


def _round_up(count: int) -> int:
    """Ranks seen to a number of GPUs that people have: the next power of two."""
    return 1 << max(0, count - 1).bit_length()


def _missing_of_job(found: _Found, config: Mapping[str, Any], cluster: ClusterRequest | None) -> list[Missing]:
    raw_model, raw_train = config.get("model"), config.get("train")
    model = raw_model if isinstance(raw_model, dict) else {}
    train = raw_train if isinstance(raw_train, dict) else {}
    if not model and found.recipe is None:
        return [Missing("job.recipe")]
    missing = [Missing(f"job.config.model.{name}") for name in _REQUIRED if not model.get(name)]
    if not model.get("vocab_size"):
        missing.append(Missing("job.config.model.vocab_size"))
    if not model.get("seq_length"):
        missing.append(Missing("job.config.model.seq_length", min(found.max_positions or 4096, 8192)))
    micro = train.get("micro_batch_size")
    if not micro:
        missing.append(Missing("job.config.train.micro_batch_size", 1))
    if not train.get("global_batch_size"):
        width = (model.get("tensor_model_parallel_size") or 1) * (model.get("pipeline_model_parallel_size") or 1)
        size = cluster.num_gpus // max(1, int(width)) if cluster and isinstance(width, int) else 1
        missing.append(Missing("job.config.train.global_batch_size", max(1, size) * (micro if micro else 1)))
    return missing
