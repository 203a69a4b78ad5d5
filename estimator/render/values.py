"""One value in the notations of the rendered forms: a Python expression, a Hydra override, a YAML node.

A torch dtype has no literal in Hydra or YAML. Bridge's own run_config.yaml writes it as
``{_target_: torch.float32, _call_: false}``, and process_config_with_overrides instantiates such a dict again
(megatron-bridge 0.6.2, training/utils/omegaconf_utils.py:_apply_overrides), so that is how it is written here; the bare
string "torch.float32" would stay a string where the field is None now.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

DTYPES = {
    "float32": "torch.float32",
    "float16": "torch.float16",
    "bfloat16": "torch.bfloat16",
    "float64": "torch.float64",
    "uint8": "torch.uint8",
}
ENUMS = {"model.attention_backend": ("megatron.core.transformer.enums", "AttnBackend")}
"""Fields that hold an enum: module and class (megatron-core 0.19.2). Values are member names."""

_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./\-]*\Z")
_WORDS = frozenset({"true", "false", "null", "none", "nan", "inf", "yes", "no", "on", "off"})


def is_dtype(path: str, value: Any) -> bool:
    """Whether this is a torch dtype: the field's name ends in dtype, the value is a dtype's name."""
    return path.endswith("dtype") and isinstance(value, str) and value.removeprefix("torch.") in DTYPES


def python_expression(path: str, value: Any) -> tuple[str, tuple[str, ...]]:
    """The value as a Python expression, and the imports that it needs."""
    if is_dtype(path, value):
        return DTYPES[value.removeprefix("torch.")], ("import torch",)
    if path in ENUMS and isinstance(value, str):
        module, name = ENUMS[path]
        return f"{name}.{value}", (f"from {module} import {name}",)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False), ()
    return repr(value), ()


def structured(path: str, value: Any) -> Any:
    """The value as plain data that Bridge instantiates again: what YAML and Hydra write."""
    if is_dtype(path, value):
        return {"_target_": DTYPES[value.removeprefix("torch.")], "_call_": False}
    if path in ENUMS and isinstance(value, str):
        module, name = ENUMS[path]
        return {"_target_": f"{module}.{name}.{value}", "_call_": False}
    if isinstance(value, Mapping):
        return {key: structured(f"{path}.{key}", item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [structured(path, item) for item in value]
    return value


def hydra_literal(value: Any) -> str:
    """Plain data in Hydra's override grammar. Strings that are no plain word are quoted.

    Inside quotes a backslash is itself, except before a quote, where it is doubled (Hydra 1.3, override grammar).
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{hydra_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(hydra_literal(item) for item in value) + "]"
    text = str(value)
    if _PLAIN.match(text) and text.lower() not in _WORDS:
        return text
    quoted = re.sub(r'(\\*)("|\Z)', lambda found: found[1] * 2 + ('\\"' if found[2] else ""), text)
    return f'"{quoted}"'


def has_interpolation(value: Any) -> bool:
    """Whether OmegaConf would read a reference into the value: "${...}" in any string of it."""
    if isinstance(value, str):
        return "${" in value
    if isinstance(value, Mapping):
        return any(has_interpolation(item) for item in value.values())
    return isinstance(value, (list, tuple)) and any(has_interpolation(item) for item in value)
