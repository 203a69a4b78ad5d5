"""One change of a job, where it has to be written so that Megatron-Bridge keeps it, and a job with changes applied.

Two configs overwrite fields of the same name elsewhere, silently, before validate():

- ``cfg.mixed_precision`` overwrites ``model``, ``optimizer`` and ``ddp`` (rule O1,
  megatron-bridge 0.6.2 training/mixed_precision.py:126-157);
- ``cfg.comm_overlap`` overwrites ``model``, and with the distributed optimizer ``ddp`` and ``optimizer`` too (rule O2,
  training/comm_overlap.py:562-586,636-643).

A change of such a field is written on the config that wins: ``routed`` says where.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from estimator.catalog import fields as catalog

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

PRECISION_CLASS = "megatron.bridge.training.mixed_precision.MixedPrecisionConfig"
OVERLAP_CLASS = "megatron.bridge.training.comm_overlap.CommOverlapConfig"

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


@functools.cache
def precision_fields() -> frozenset[str]:
    """Names of MixedPrecisionConfig's fields: what it overwrites on model, optimizer and ddp."""
    return frozenset(catalog.class_fields(PRECISION_CLASS))


def named_mixed_precision(name: str) -> dict[str, Any] | None:
    """The mixed-precision recipe of that name ("bf16_mixed", "bf16-mixed") as a document, None if there is none."""
    known = name.replace("-", "_") in catalog.precision_recipes()
    return catalog.precision_config(name) if known else None


def written_path(path: str, values: Mapping[str, Any], distributed_optimizer: bool = True) -> str:
    """Where a field must be written so that neither mixed_precision nor comm_overlap undoes it (rules O1, O2)."""
    section, _, field = path.partition(".")
    if section not in ("model", "ddp", "optimizer"):
        return path
    if field in precision_fields() and values.get("mixed_precision") is not None:
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
    if section == "comm_overlap":
        return {**catalog.new_object(OVERLAP_CLASS), "tp_comm_overlap": False}
    return {}


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
