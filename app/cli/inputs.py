"""Options, positional words and files as the body of a request, checked as the API checks it."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from app.cli.failures import Failure
from app.problems import Problem, of_validation_error
from app.schemas import Body
from estimator.errors import FieldProblem

UNITS = {
    "b": 1,
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", start=1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", start=1)},
}
QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*")
GPUS = re.compile(r"(\d+)\s*[x*×]\s*(.+)", re.IGNORECASE)
MAX_DEPTH = 64

BodyType = TypeVar("BodyType", bound=Body)


@dataclass(frozen=True, slots=True)
class Options:
    """What a user typed."""

    words: Sequence[str] = ()
    recipe: str | None = None
    module: str | None = None
    config: Path | None = None
    overrides: Sequence[str] = ()
    stack: Sequence[str] = ()
    gpu: str | None = None
    num_gpus: int | None = None
    gpus_per_node: int | None = None
    memory_limit: str | None = None
    reserved: str | None = None
    total_memory: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further top-level keys of the body."""
    megatron_args: Path | None = None


def build(options: Options, model: type[BodyType]) -> BodyType:
    """The body; raises Failure that names the option."""
    words = _sorted_words(options)
    job = {
        "recipe": words.recipe,
        "module": options.module,
        "config": None if options.config is None else read_config(options.config),
        "megatron_lm_args": None if options.megatron_args is None else read_arguments(options.megatron_args),
        "overrides": words.overrides,
    }
    cluster = {
        "gpu": words.gpu,
        "num_gpus": words.num_gpus,
        "gpus_per_node": options.gpus_per_node,
        "memory_limit_bytes": quantity(options.memory_limit, "--memory-limit"),
        "reserved_bytes": quantity(options.reserved, "--reserved"),
        "total_bytes": quantity(options.total_memory, "--total-memory"),
    }
    if not any(job.values()):
        raise refusal("--recipe", "no job was given", "--recipe llama3_8b_pretrain_config, or --config run_config.yaml")
    body = {"job": _given(job), "cluster": _given(cluster), **_given({"stack": pairs(options.stack), **options.more})}
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise Failure(of_validation_error(error, model)) from error


@dataclass(frozen=True, slots=True)
class _Words:
    recipe: str | None
    gpu: str | None
    num_gpus: int | None
    overrides: list[str]


def _sorted_words(options: Options) -> _Words:
    recipe, gpu, num_gpus = options.recipe, options.gpu, options.num_gpus
    overrides: list[str] = []
    for word in options.words:
        gpus = GPUS.fullmatch(word)
        if "=" in word or word.startswith("~"):
            overrides.append(word)
        elif gpus and gpu is None and num_gpus is None:
            num_gpus, gpu = int(gpus[1]), gpus[2]
        elif recipe is None:
            recipe = word
        else:
            raise refusal("arguments", f"{word!r} is one word too many", "RECIPE 2xh100-80gb section.field=value")
    return _Words(recipe, gpu, num_gpus, [*overrides, *options.overrides])


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, [], {})}


def pairs(stack: Sequence[str]) -> dict[str, str]:
    """Versions by name, from name=version; raises Failure."""
    pairs = {}
    for item in stack:
        name, equals, version = item.partition("=")
        if not equals:
            raise refusal("--stack", f"{item!r} has no version", "megatron_core=0.19.2")
        pairs[name.strip()] = version.strip()
    return pairs


def quantity(text: str | None, option: str) -> int | None:
    """Bytes from "70", "70GiB", "75000 MiB" or "80GB" (decimal); a bare number is GiB."""
    if text is None:
        return None
    match = QUANTITY.fullmatch(text)
    unit = UNITS.get(match[2].lower() or "gib") if match else None
    if match is None or unit is None:
        raise refusal(option, f"{text!r} is not an amount of memory", "70, 70GiB or 71680MiB")
    return int(float(match[1]) * unit)


def read_text(path: Path, option: str) -> str:
    """The file's text, or standard input for -."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise refusal(option, f"{path}: {error.strerror}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise refusal(option, f"{path} is not UTF-8: byte {data[error.start]:#04x} at offset {error.start}") from error


def read_log(path: Path) -> str:
    """A log, of which some bytes may be broken."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise refusal("--log", f"{path}: {error.strerror}") from error
    return data.decode("utf-8", "replace").replace("\x00", "\ufffd")


def read_arguments(path: Path) -> dict[str, Any]:
    """Megatron-LM's arguments: the block that it prints, also within a log, or a mapping."""
    from estimator.diagnose.translation import printed_arguments

    text = read_text(path, "--megatron-args")
    return printed_arguments(text) or _mapping(text, path, "--megatron-args", "num_layers: 32 and the like")


def read_config(path: Path) -> dict[str, Any]:
    """A YAML or JSON document, read without running anything in it."""
    return _mapping(read_text(path, "--config"), path, "--config", "sections such as model: and train: at the top")


def _mapping(text: str, path: Path, option: str, right: str) -> dict[str, Any]:
    import yaml

    try:
        document = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise refusal(option, f"{path} is not YAML{where}: {what}") from error
    if not isinstance(document, dict):
        raise refusal(option, f"{path} holds no mapping", right)
    _require_json(document, "job.config" if option == "--config" else "job.megatron_lm_args")
    return document


def _require_json(document: Any, path: str) -> None:
    """YAML can say what JSON cannot: dates, sets, keys that are no strings, NaN, itself within itself."""
    pending = [(document, path, 1)]
    while pending:
        value, where, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise refusal(where[:200], f"is nested more than {MAX_DEPTH} deep")
        if isinstance(value, dict):
            for key, item in value.items():
                if not isinstance(key, str):
                    raise refusal(where, f"the key {key!r} is not a string", f'"{key}"')
                pending.append((item, f"{where}.{key}", depth + 1))
        elif isinstance(value, list):
            pending += [(item, f"{where}[{n}]", depth + 1) for n, item in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            raise refusal(where, f"is {value}, which is no number here")
        elif value is not None and not isinstance(value, str | int | float):
            raise refusal(where, f"is a {type(value).__name__}, which JSON does not have", "put it in quotes")


def refusal(path: str, message: str, suggestion: str | None = None) -> Failure:
    """Bad input at this option."""
    return Failure(Problem("invalid-request", f"{path}: {message}", (FieldProblem(path, message, suggestion),)))
