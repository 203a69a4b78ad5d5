"""Facts that stand outside of failure messages: how many GPUs and which, allocator setting, recipe, root cause."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator

from estimator.catalog.gpus import list_gpus
from estimator.catalog.recipes import list_recipes
from estimator.diagnose.evidence import Fact, Span

_NUMBERS: tuple[tuple[str, str, re.Pattern[str]], ...] = (
    ("world_size", "world size", re.compile(r"(?:using )?world size\s{0,2}[:=]\s{0,2}(\d{1,7})\b")),
    ("world_size", "world_size", re.compile(r"world_size\W{1,6}(\d{1,7})\b")),
    ("world_size", "WORLD_SIZE", re.compile(r"WORLD_SIZE\s?[=:]\s?(\d{1,7})\b")),
    ("data_parallel_size", "data-parallel size", re.compile(r"\bdata-parallel size: (\d{1,7})\b")),
    ("context_parallel_size", "context-parallel size", re.compile(r"[^-]context-parallel size: (\d{1,7})\b")),
    ("tensor_model_parallel_size", "tensor-model-parallel", re.compile(r"tensor-model-parallel size: (\d{1,7})\b")),
    (
        "pipeline_model_parallel_size",
        "pipeline-model-parallel",
        re.compile(r"pipeline-model-parallel size: (\d{1,7})\b"),
    ),
    ("parameters_on_rank", "number of parameters on", re.compile(r"number of parameters on .{0,60}: (\d{1,15})\b")),
    ("gpus_per_node", "LOCAL_WORLD_SIZE", re.compile(r"LOCAL_WORLD_SIZE\s?[=:]\s?(\d{1,4})\b")),
)
_LAST = frozenset({"iteration"})
_GPU = re.compile(
    r"NVIDIA [A-Z][A-Za-z0-9]{1,8}(?:[ \-][A-Za-z0-9]{1,12}){0,5}|\b(?:H100|H200|H800|H20|A100|A800"
    r"|B200|B300|GB200|GB300|GH200|L40S)(?:[ \-](?:SXM\d?|PCIe|NVL|\d{2,3} ?GB|HBM3e?)){0,3}\b"
)
_SEGMENTS = re.compile(r"expandable_segments\s?[:=]\s?(True|False|true|false|1|0)\b")
_ADVICE = re.compile(r"(?:[Tt]ry setting|avoid fragmentation)")
_RECIPE = re.compile(r"\b[a-z][a-z0-9_]{5,90}_config\b")
_ROOT_RANK = re.compile(r"\brank\s{0,8}: (\d{1,7})\b")
_CONNECTIONS = re.compile(r"CUDA_DEVICE_MAX_CONNECTIONS\s?[=:]\s?['\"]?(\d{1,4})\b")

_GPU_WORDS = (
    "NVIDIA ",
    "H100",
    "H200",
    "A100",
    "GB200",
    "GB300",
    "B200",
    "B300",
    "H800",
    "A800",
    "L40S",
    "H20",
    "GH200",
)
FACT_NEEDLES = (
    *dict.fromkeys(needle for _, needle, _ in _NUMBERS),
    "NVIDIA ",
    "H100",
    "H200",
    "A100",
    "GB200",
    "GB300",
    "expandable_segments",
    "_pretrain_",
    "_sft_",
    "_peft_",
    "_finetune_",
    "Root Cause",
    "CUDA_DEVICE_MAX_CONNECTIONS",
)


def outside_facts(text: str, in_root_cause: bool, place: Callable[[int, int], Span]) -> Iterator[tuple[Fact, bool]]:
    """(fact, whether a later one of that name replaces it)."""
    for name, needle, pattern in _NUMBERS:
        if needle in text and (match := pattern.search(text)) and int(match[1]) > 0:
            yield Fact(name, int(match[1]), place(match.start(), match.end())), name in _LAST
    if in_root_cause and (match := _ROOT_RANK.search(text)):
        yield Fact("root_cause_rank", int(match[1]), place(match.start(), match.end())), False
    if "expandable_segments" in text and (match := _SEGMENTS.search(text)):
        advice = _ADVICE.search(text, max(0, match.start() - 120), match.end() + 80)
        if not advice:
            on = match[1].lower() in ("true", "1")
            setting = "expandable_segments" if on else "default"
            yield Fact("allocator_setting", setting, place(match.start(), match.end())), False
    if "CUDA_DEVICE_MAX_CONNECTIONS" in text and (match := _CONNECTIONS.search(text)):
        yield Fact("cuda_device_max_connections", int(match[1]), place(match.start(), match.end())), False
    if "_config" in text:
        for count, match in enumerate(_RECIPE.finditer(text)):
            if count < 8 and (recipe := known_recipe(match.group())):
                yield Fact("recipe", recipe, place(match.start(), match.end())), False
                break
    if not any(word in text for word in _GPU_WORDS):
        return
    for count, match in enumerate(_GPU.finditer(text)):
        if count == 4:
            break
        if gpu := known_gpu(match.group()):
            yield Fact("gpu", gpu, place(match.start(), match.end())), False
            break


def known_recipe(name: str) -> str | None:
    return name if name in _recipe_names() else None


@functools.cache
def _recipe_names() -> frozenset[str]:
    return frozenset(name for recipe in list_recipes() for name in (recipe.name, *recipe.aliases))


def known_gpu(name: str) -> str | None:
    """The GPU whose name or alias is the longest beginning of these words."""
    words = name.replace("-", " ").split()
    for count in range(len(words), 0, -1):
        gpu = _gpu_names().get("".join(words[:count]).lower().removeprefix("nvidia"))
        if gpu is not None:
            return gpu
    return None


@functools.cache
def _gpu_names() -> dict[str, str]:
    """Names and aliases as :func:`estimator.catalog.gpus.find_gpu` compares them: without blanks and punctuation."""
    return {
        re.sub(r"[^a-z0-9]", "", alias.lower().removeprefix("nvidia")): gpu.name
        for gpu in list_gpus()
        for alias in (gpu.name, *gpu.aliases)
    }
