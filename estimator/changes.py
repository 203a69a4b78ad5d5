"""One change of a job, where it has to be written so that Megatron-Bridge keeps it, and a job with changes applied.

Two configs overwrite fields of the same name elsewhere, silently, before validate():

- ``cfg.mixed_precision`` overwrites ``model``, ``optimizer`` and ``ddp`` (rule O1,
  megatron-bridge 0.6.2 training/mixed_precision.py:126-157);
- ``cfg.comm_overlap`` overwrites ``model``, and with the distributed optimizer ``ddp`` and ``optimizer`` too (rule O2,
  training/comm_overlap.py:562-586,636-643).

A change of such a field is written on the config that wins: ``routed`` says where.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

FAMILIES = (
    "allocator",
    "dp_strategy",
    "recompute",
    "micro_batch",
    "fsdp_buffers",
    "cross_entropy",
    "layout",
    "offload",
    "optimizer_precision",
    "gradient_precision",
    "more_gpus",
)

MIXED_PRECISION_DEFAULTS: dict[str, Any] = {
    "fp32": False,
    "fp16": False,
    "bf16": False,
    "params_dtype": None,
    "pipeline_dtype": None,
    "autocast_dtype": None,
    "autocast_enabled": False,
    "grad_reduce_in_fp32": True,
    "fp8": None,
    "fp8_recipe": "tensorwise",
    "first_last_layers_bf16": False,
    "fp8_margin": 0,
    "fp8_amax_history_len": 1,
    "fp8_amax_compute_algo": "most_recent",
    "fp8_wgrad": True,
    "fp8_dot_product_attention": False,
    "fp8_multi_head_attention": False,
    "fp8_param": False,
    "fp8_param_gather": False,
    "fp4": None,
    "fp4_recipe": "nvfp4",
    "fp4_param": False,
    "fp4_param_gather": False,
    "loss_scale": None,
    "initial_loss_scale": 4294967296,
    "min_loss_scale": 1.0,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "num_layers_at_start_in_bf16": 0,
    "num_layers_at_end_in_bf16": 0,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
}
"""Fields of MixedPrecisionConfig. Source: megatron-bridge 0.6.2, training/mixed_precision.py:35-72."""

_BF16 = {"bf16": True, "params_dtype": "bfloat16", "pipeline_dtype": "bfloat16"}
_FP16 = {"fp16": True, "params_dtype": "float16", "pipeline_dtype": "float16", "grad_reduce_in_fp32": False}
_PARAM = {"fp8_param": True, "fp8_param_gather": True}
_FP4 = {"fp4": "e2m1", "fp4_param": True, "fp4_param_gather": True}
_DELAYED = {
    "fp8": "hybrid",
    "fp8_recipe": "delayed",
    "fp8_amax_history_len": 1024,
    "fp8_amax_compute_algo": "max",
    **_PARAM,
}
_MXFP8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8", "reuse_grad_buf_for_mxfp8_param_ag": True, **_PARAM}
_SUBCHANNEL = {"fp8": "hybrid", "fp8_recipe": "blockwise"}


def _bf16_ends(start: int, end: int) -> dict[str, Any]:
    return {
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": start,
        "num_layers_at_end_in_bf16": end,
    }


MIXED_PRECISION_RECIPES: dict[str, dict[str, Any]] = {
    "bf16_mixed": _BF16,
    "fp16_mixed": _FP16,
    "bf16_with_fp8_delayed_scaling_mixed": {**_BF16, **_DELAYED},
    "fp16_with_fp8_delayed_scaling_mixed": {**_FP16, **_DELAYED},
    "bf16_with_mxfp8_mixed": {**_BF16, **_MXFP8},
    "fp16_with_mxfp8_mixed": {**_FP16, **_MXFP8},
    "bf16_with_fp8_current_scaling_mixed": {**_BF16, "fp8": "hybrid", **_PARAM, **_bf16_ends(1, 1)},
    "fp16_with_fp8_current_scaling_mixed": {**_FP16, "fp8": "hybrid", **_PARAM, **_bf16_ends(1, 1)},
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": {**_BF16, "fp8": "hybrid", **_PARAM, **_bf16_ends(2, 2)},
    "nanov2_bf16_with_fp8_current_scaling_mixed": {**_BF16, **_SUBCHANNEL, **_PARAM, **_bf16_ends(2, 2)},
    "bf16_with_fp8_subchannel_scaling_mixed": {**_BF16, **_SUBCHANNEL},
    "fp16_with_fp8_subchannel_scaling_mixed": {**_FP16, **_SUBCHANNEL},
    "bf16_with_nvfp4_mixed": {**_BF16, **_FP4},
    "nemotron_3_super_bf16_with_nvfp4_mixed": {**_BF16, **_FP4, **_bf16_ends(0, 14)},
    "nemotron_3_ultra_bf16_with_nvfp4_mixed": {**_BF16, **_FP4, **_bf16_ends(0, 16)},
}
"""What each named recipe sets beside the defaults. Source: training/mixed_precision.py:186-442 (0.6.2), executed."""

COMM_OVERLAP_FIELDS: dict[str, frozenset[str]] = {
    "model": frozenset(
        {
            "tp_comm_overlap",
            "tp_comm_overlap_cfg",
            "tp_comm_bootstrap_backend",
            "overlap_p2p_comm",
            "batch_p2p_comm",
            "defer_embedding_wgrad_compute",
            "wgrad_deferral_limit",
            "overlap_moe_expert_parallel_comm",
            "delay_wgrad_compute",
        }
    ),
    "ddp": frozenset({"bucket_size", "overlap_grad_reduce", "overlap_param_gather", "align_param_gather"}),
    "optimizer": frozenset({"overlap_param_gather", "overlap_param_gather_with_optimizer_step"}),
}
"""Section -> fields that a set ``comm_overlap`` overwrites (ddp and optimizer: only with the distributed optimizer)."""


@dataclass(frozen=True, slots=True)
class Change:
    """One setting that changes.

    ``path`` is a dotted path below ``cfg`` ("ddp.use_megatron_fsdp"), or ``env.NAME`` for an environment variable,
    which is exported and written in ``cfg.env_vars`` too. ``from_`` is the value in effect now. dtypes are strings
    ("float32").
    """

    path: str
    from_: Any
    to: Any
    why: str
    family: str

    def as_dict(self) -> dict[str, Any]:
        """The change as the API answers it."""
        return {"path": self.path, "from": self.from_, "to": self.to, "why": self.why, "family": self.family}


def named_mixed_precision(name: str) -> dict[str, Any] | None:
    """All fields of the mixed-precision recipe of that name ("bf16_mixed", "bf16-mixed"), None if there is none."""
    fields = MIXED_PRECISION_RECIPES.get(name.replace("-", "_"))
    return None if fields is None else {**MIXED_PRECISION_DEFAULTS, **fields}


def written_path(path: str, values: Mapping[str, Any], distributed_optimizer: bool = True) -> str:
    """Where a field must be written so that neither mixed_precision nor comm_overlap undoes it (rules O1, O2)."""
    section, _, field = path.partition(".")
    if section not in ("model", "ddp", "optimizer"):
        return path
    if field in MIXED_PRECISION_DEFAULTS and values.get("mixed_precision") is not None:
        return f"mixed_precision.{field}"
    overlapped = values.get("comm_overlap") is not None and field in COMM_OVERLAP_FIELDS[section]
    if overlapped and (section == "model" or distributed_optimizer):
        return f"comm_overlap.{field}"
    return path


def routed(changes: Iterable[Change], values: Mapping[str, Any]) -> tuple[Change, ...]:
    """The same changes, each on the config that wins, once each (the last one of a path counts).

    comm_overlap overwrites ddp only if the distributed optimizer is on when it is applied, that is in
    ``ddp.use_distributed_optimizer`` as written, before validate() switches it on for Megatron FSDP.
    """
    changes = tuple(changes)
    distributed = bool(_section(values, "ddp").get("use_distributed_optimizer"))
    for change in changes:
        if change.path == "ddp.use_distributed_optimizer":
            distributed = bool(change.to)
    result: dict[str, Change] = {}
    for change in changes:
        path = written_path(change.path, values, distributed)
        result[path] = change if path == change.path else replace(change, path=path)
    return tuple(result.values())


def apply_changes(values: Mapping[str, Any], changes: Iterable[Change]) -> dict[str, Any]:
    """``values`` with the changes written where they count; sections that do not change are shared, not copied.

    ``env.NAME`` is written in ``env_vars``: what is exported wins over it, so both hold the same value. A variable that
    is unset (to = None) leaves ``env_vars``.
    """
    document = dict(values)
    copied: set[str] = set()
    for change in routed(changes, values):
        section, _, field = change.path.partition(".")
        if section == "env":
            section = "env_vars"
        if section not in copied:
            document[section] = _editable(section, document.get(section))
            copied.add(section)
        if section == "env_vars" and change.to is None:
            document[section].pop(field, None)
            continue
        _write(document[section], field, change.to)
    return document


def _editable(section: str, current: Any) -> dict[str, Any]:
    """A fresh dict for a section: a named mixed-precision recipe becomes its fields, comm_overlap its required one."""
    if isinstance(current, Mapping):
        return dict(current)
    if section == "mixed_precision" and isinstance(current, str):
        return named_mixed_precision(current) or {}
    return {"tp_comm_overlap": False} if section == "comm_overlap" else {}


def _write(section: dict[str, Any], field: str, value: Any) -> None:
    head, dot, rest = field.partition(".")
    if not dot:
        section[head] = value
        return
    child = section.get(head)
    section[head] = dict(child) if isinstance(child, Mapping) else {}
    _write(section[head], rest, value)


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = values.get(name)
    return section if isinstance(section, Mapping) else {}
