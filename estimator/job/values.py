"""Single values of a job document: their canonical form, and whether a field takes them.

Canonical: dtypes as "bfloat16", "float32", "float16" ...; functions, classes and enum members by bare name; everything
else as JSON has it. Bridge's YAML objects (``{_target_: torch.bfloat16, _call_: false}``) become such names; nothing is
imported.
"""

from __future__ import annotations

import math
from typing import Any

from estimator.catalog import fields as catalog
from estimator.catalog.fields import FieldSpec
from estimator.errors import FieldProblem

MAX_INTEGER = 2**63 - 1
MAX_DEPTH = 24
MAX_ITEMS = 200_000

DTYPES = {
    **dict.fromkeys(("float32", "fp32", "float", "32", "32-true"), "float32"),
    **dict.fromkeys(("float16", "fp16", "half", "16", "16-mixed"), "float16"),
    **dict.fromkeys(("bfloat16", "bf16", "bf16-mixed"), "bfloat16"),
    **dict.fromkeys(("float64", "double"), "float64"),
    **{name: name for name in ("uint8", "int8", "int32", "int64", "float8_e4m3fn", "float8_e5m2")},
    "fp8": "float8_e4m3fn",
}
"""Spellings of a dtype. Source: megatron-bridge 0.6.2, utils/activation_map.py, and torch's own names."""

INERT_PREFIXES = ("transformers.", "megatron.", "torch.", "nemo.")
"""Classes outside the table that a nested object may name; they are kept as data."""

SIZE_LIMITS = {
    "num_layers": 100_000,
    "hidden_size": 10_000_000,
    "ffn_hidden_size": 100_000_000,
    "num_attention_heads": 1_000_000,
    "num_query_groups": 1_000_000,
    "kv_channels": 1_000_000,
    "vocab_size": 1_000_000_000,
    "make_vocab_size_divisible_by": 10_000_000,
    "seq_length": 1_000_000_000,
    "micro_batch_size": 10_000_000,
    "global_batch_size": 1_000_000_000,
    "tensor_model_parallel_size": 1_000_000,
    "pipeline_model_parallel_size": 1_000_000,
    "virtual_pipeline_model_parallel_size": 1_000_000,
    "context_parallel_size": 1_000_000,
    "expert_model_parallel_size": 1_000_000,
    "expert_tensor_parallel_size": 1_000_000,
    "num_moe_experts": 1_000_000,
    "moe_ffn_hidden_size": 100_000_000,
    "num_distributed_optimizer_instances": 1_000_000,
    "bucket_size": 10**13,
    "num_buckets": 10**9,
    "suggested_communication_unit_size": 10**13,
    "recompute_num_layers": 100_000,
    "num_layers_in_first_pipeline_stage": 100_000,
    "num_layers_in_last_pipeline_stage": 100_000,
}
"""Counts and sizes that have to be at least 1, and the most that can be meant."""

ZERO_ALLOWED = frozenset({"num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "num_moe_experts"})
"""Fields whose class default is 0 ("not given"); a given 0 is still refused where the model needs it (document.py)."""


def dtype_name(value: Any) -> str | None:
    """Canonical name of a dtype, None if ``value`` names none."""
    if not isinstance(value, str):
        return None
    return DTYPES.get(value.strip().removeprefix("torch."))


def reduce_objects(value: Any, depth: int = 0) -> Any:
    """Bridge's YAML objects to names; plain containers to fresh ones. Raises ValueError for what is nested too deep."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, (list, tuple)):
        return [reduce_objects(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    target = value.get("_target_")
    if isinstance(target, str) and not catalog.is_known_class(target):
        last = target.rpartition(".")[2]
        if "_name_" in value:
            return value["_name_"]
        if value.get("_partial_") is True or value.get("_call_") is False:
            return dtype_name(target) or last
        if isinstance(value.get("_args_"), list) and len(value["_args_"]) == 1:
            return {"_target_": target, "_args_": list(value["_args_"])}
        if last == "from_dict" and isinstance(value.get("config_dict"), dict):
            sizes = {k: v for k, v in value["config_dict"].items() if isinstance(v, (int, float, str))}
            return {"_target_": target.removesuffix(".from_dict"), **sizes}
    return {key: reduce_objects(item, depth + 1) for key, item in value.items() if key != "_call_"}


def check_value(spec: FieldSpec, value: Any, path: str, problems: list[FieldProblem]) -> Any:
    """The canonical form of ``value`` for this field; what is wrong with it is added to ``problems``."""
    if isinstance(value, dict) and set(value) == {"_target_", "_args_"}:  # an enum member by value
        names = [name for name, number in spec.members if number == value["_args_"][0]]
        value = names[0] if names else value["_args_"][0]
    if value is None:
        if not spec.nullable:
            problems.append(FieldProblem(path, "must not be null", f"{spec.describe()}"))
        return value
    if isinstance(value, float) and not math.isfinite(value):
        if spec.default == str(value):  # a default of Bridge's own, such as "no limit"
            return spec.default
        problems.append(FieldProblem(path, "must be a finite number", spec.describe()))
        return value
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MAX_INTEGER:
        problems.append(FieldProblem(path, "is too large a number for any field", spec.describe()))
        return 0
    if "any" in spec.kinds or "callable" in spec.kinds:
        return _check_loose(spec, value, path, problems)
    canonical, fits = _fit(spec, value)
    if not fits:
        problems.append(FieldProblem(path, f"must be {spec.describe()}, not {describe(value)}", _hint(spec, value)))
        return value
    _check_size(spec.name, canonical, path, problems)
    return canonical


def _check_loose(spec: FieldSpec, value: Any, path: str, problems: list[FieldProblem]) -> Any:
    """Fields that Bridge itself does not type; a size among them must still be one."""
    default = None if spec.required else spec.default
    if isinstance(default, bool) and not isinstance(value, bool):
        problems.append(FieldProblem(path, f"must be true or false, not {describe(value)}"))
    elif isinstance(default, int) and not isinstance(default, bool) and isinstance(value, (bool, str)):
        problems.append(FieldProblem(path, f"must be a number, not {describe(value)}"))
    _check_size(spec.name, value, path, problems)
    return value


def _fit(spec: FieldSpec, value: Any) -> tuple[Any, bool]:
    """(canonical value, whether any kind of the field takes it)."""
    kinds = spec.kinds
    if spec.choices and not ({"list", "dict", "object"} & set(kinds) and isinstance(value, (list, dict))):
        same = [c for c in spec.choices if c == value and isinstance(c, bool) == isinstance(value, bool)]
        if same:
            return same[0], True
        if not ({"int", "float"} & set(kinds) and isinstance(value, (int, float)) and not isinstance(value, bool)):
            return value, False
        return value, not all(isinstance(c, (int, float)) for c in spec.choices)
    if isinstance(value, bool):
        return value, "bool" in kinds
    if isinstance(value, int):
        if "int" in kinds:
            return value, True
        return (float(value), True) if "float" in kinds else (value, False)
    if isinstance(value, float):
        return value, "float" in kinds
    if isinstance(value, str):
        return _fit_text(spec, value)
    if isinstance(value, list):
        return value, "list" in kinds
    if isinstance(value, dict):
        return value, bool({"dict", "object"} & set(kinds))
    return value, False


def _fit_text(spec: FieldSpec, value: str) -> tuple[Any, bool]:
    kinds = spec.kinds
    if "dtype" in kinds and (name := dtype_name(value)):
        return name, True
    if "enum" in kinds:
        bare = value.rpartition(".")[2]
        if bare in dict(spec.members):
            return bare, True
    return value, "str" in kinds


def _check_size(name: str, value: Any, path: str, problems: list[FieldProblem]) -> None:
    limit = SIZE_LIMITS.get(name)
    if limit is None or isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    if value > limit:
        problems.append(FieldProblem(path, f"{value} is larger than any real job has", f"at most {limit}"))
    elif value < 0 or (value == 0 and name not in ZERO_ALLOWED):
        problems.append(FieldProblem(path, f"must be at least 1, not {value}"))


def _hint(spec: FieldSpec, value: Any) -> str | None:
    if isinstance(value, str):
        known = [name for name, _ in spec.members] + [c for c in spec.choices if isinstance(c, str)]
        if "dtype" in spec.kinds:
            known += ["float32", "bfloat16", "float16"]
        close = catalog.nearest(value, known, 1)
        if close:
            return close[0]
        if {"int", "float"} & set(spec.kinds) and _is_number(value):
            return f"{value.strip()} without quotes"
        if "bool" in spec.kinds and value.strip().lower() in ("true", "false"):
            return f"{value.strip().lower()} without quotes"
    return None


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text[:40]))
    except ValueError:
        return False


def describe(value: Any) -> str:
    """A short word for a value in a message."""
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if value is None:
        return "null"
    if isinstance(value, str):
        return f"the text {value[:60]!r}"
    if isinstance(value, (int, float)):
        return f"the number {value}"
    if isinstance(value, list):
        return "a list"
    return "a mapping" if isinstance(value, dict) else str(type(value).__name__)
