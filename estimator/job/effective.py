"""What Megatron-Bridge makes of a job before it trains: ``runtime_config_update`` as a pure function.

Environment defaults, then ``mixed_precision``, then ``comm_overlap``, then ``ConfigContainer.validate()`` overwrite
what the job says. Only the overwriting is modelled here; what Bridge refuses is told by ``estimator.rules``, so nothing
raises. Source: megatron-bridge 0.6.2, training/config.py:1158-1534 and 1853-1890, training/mixed_precision.py:93-157,
training/comm_overlap.py:431-643; megatron-core 0.19.2 ``__post_init__`` of the configurations. Sections that nothing
changes are shared with the input, the others are shallow copies: a call for one candidate costs well under a
millisecond.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from estimator.catalog import fields as catalog
from estimator.job import effective_model

COMM_FIELDS = (
    "tp_comm_overlap",
    "tp_comm_overlap_cfg",
    "tp_comm_bootstrap_backend",
    "overlap_p2p_comm",
    "batch_p2p_comm",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "overlap_param_gather_with_optimizer_step",
    "align_param_gather",
    "bucket_size",
    "defer_embedding_wgrad_compute",
    "wgrad_deferral_limit",
    "overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute",
)
"""What ``comm_overlap`` hands on; a field left None there still overwrites with None. Source:
comm_overlap.py:380-403."""

OVERLAP_BUCKET_SIZE = 128 * 1024 * 1024
"""Elements. Source: comm_overlap.py:575."""


@dataclass(frozen=True, slots=True)
class EffectiveChange:
    """One overwritten value; ``rule`` is the number in docs/rules or the step of ``runtime_config_update``."""

    path: str
    from_: Any
    to: Any
    rule: str


@dataclass(frozen=True, slots=True)
class EffectiveJob:
    values: dict[str, Any]
    changes: tuple[EffectiveChange, ...]
    data_parallel_size: int
    environment: dict[str, str]
    """Environment variables as the process sees them: exported ones win over ``env_vars``."""


class Draft:
    """Copy-on-write view of a document that records every change."""

    __slots__ = ("changes", "owned", "values")

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values: dict[str, Any] = dict(values)
        self.owned: set[str] = set()
        self.changes: list[EffectiveChange] = []

    def get(self, section: str, name: str, default: Any = None) -> Any:
        owner = self.values.get(section)
        return owner.get(name, default) if isinstance(owner, dict) else default

    def has(self, section: str, name: str) -> bool:
        owner = self.values.get(section)
        return isinstance(owner, dict) and name in owner

    def set(self, section: str, name: str, value: Any, rule: str) -> None:
        owner = self.values.get(section)
        if not isinstance(owner, dict):
            return
        before = owner.get(name)
        if before == value and type(before) is type(value) and name in owner:
            return
        if section not in self.owned:
            owner = self.values[section] = dict(owner)
            self.owned.add(section)
        owner[name] = value
        self.changes.append(EffectiveChange(f"{section}.{name}", before, value, rule))

    def net_changes(self) -> tuple[EffectiveChange, ...]:
        """One entry a path, from what the job says to what holds in the end; there and back is no change."""
        net: dict[str, EffectiveChange] = {}
        for change in self.changes:
            first = net.get(change.path)
            net[change.path] = replace(change, from_=first.from_) if first else change
        return tuple(change for change in net.values() if change.from_ != change.to)

    def replace(self, section: str, value: Any, rule: str) -> None:
        self.changes.append(EffectiveChange(section, self.values.get(section), value, rule))
        self.values[section] = value
        self.owned.add(section)


def effective_document(
    values: Mapping[str, Any],
    world_size: int,
    gpu_family: str = "hopper",
    env: Mapping[str, str] | None = None,
) -> EffectiveJob:
    """The document after ``runtime_config_update`` on ``world_size`` ranks.

    ``env``: variables exported outside the job; they win over ``env_vars`` (config.py:1832-1850). ``gpu_family`` is
    taken for what later versions key on it; 0.6.2 changes nothing by it. Never raises for a well-formed document.
    """
    draft = Draft(values)
    environment = _environment(draft, env)
    _mixed_precision(draft)
    data_parallel_size = _data_parallel_size(draft, world_size)
    _comm_overlap(draft, data_parallel_size)
    _validate(draft)
    return EffectiveJob(draft.values, draft.net_changes(), data_parallel_size, environment)


def _environment(draft: Draft, env: Mapping[str, str] | None) -> dict[str, str]:
    own = draft.values.get("env_vars")
    own = own if isinstance(own, dict) else {}
    for name, value in (env or {}).items():
        if str(own.get(name)) != str(value):
            draft.set("env_vars", name, str(value), "exported values win over env_vars")
    return {**{name: str(value) for name, value in own.items()}, **{n: str(v) for n, v in (env or {}).items()}}


def _data_parallel_size(draft: Draft, world_size: int) -> int:
    """World size over TP*PP*CP, at least 1; that it divides is a rule's business (A18)."""
    size = 1
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        size *= max(1, draft.get("model", name) or 1)
    return max(1, world_size // size)


# ------------------------------------------------------------------------------------------- mixed precision


def _mixed_precision(draft: Draft) -> None:
    """O1: every field of the precision configuration that model, optimizer or ddp have too is overwritten there."""
    precision = draft.values.get("mixed_precision")
    if isinstance(precision, str):
        if precision.replace("-", "_") not in catalog.precision_recipes():
            return
        precision = catalog.precision_config(precision)
        for param, gather in (("fp8_param", "fp8_param_gather"), ("fp4_param", "fp4_param_gather")):
            precision[param] = precision.get(gather)
        draft.replace("mixed_precision", precision, "O1 name resolved")
    if not isinstance(precision, dict):
        return
    for param, gather in (("fp8_param", "fp8_param_gather"), ("fp4_param", "fp4_param_gather")):
        if precision.get(param) is None:
            draft.set("mixed_precision", param, precision.get(gather), "O1 finalize")
    precision = draft.values["mixed_precision"]
    for section in ("model", "optimizer", "ddp"):
        owner = draft.values.get(section)
        if isinstance(owner, dict):
            for name, value in precision.items():
                if name in owner and name != "_target_" and owner[name] != value:
                    draft.set(section, name, value, "O1 mixed_precision")


# ------------------------------------------------------------------------------------------- communication overlap


def _comm_overlap(draft: Draft, data_parallel_size: int) -> None:
    """O2: what ``comm_overlap`` leaves open is decided here, and model, optimizer and ddp are overwritten."""
    overlap = draft.values.get("comm_overlap")
    model = draft.values.get("model")
    if not isinstance(overlap, dict) or not isinstance(model, dict):
        return
    draft.set("comm_overlap", "data_parallel_size", data_parallel_size, "O2 finalize")
    chosen = {name: overlap.get(name) for name in COMM_FIELDS}
    tensor = max(1, model.get("tensor_model_parallel_size") or 1)
    if chosen["tp_comm_overlap"] is True and (tensor < 2 or not model.get("sequence_parallel")):
        chosen["tp_comm_overlap"] = False
    pipelined = (model.get("pipeline_model_parallel_size") or 1) > 1
    interleaved = (model.get("virtual_pipeline_model_parallel_size") or 1) > 1
    usual: dict[str, Any] = dict.fromkeys(COMM_FIELDS)
    usual.update(
        tp_comm_overlap=False,
        defer_embedding_wgrad_compute=False,
        wgrad_deferral_limit=-1,
        overlap_moe_expert_parallel_comm=False,
        delay_wgrad_compute=False,
        overlap_p2p_comm=pipelined and interleaved,
        batch_p2p_comm=pipelined and not interleaved,
    )
    _apply_overlap(draft, "model", usual, chosen)
    if draft.get("model", "tp_comm_overlap") and draft.has("model", "tp_comm_overlap_cfg"):
        layers = chosen["tp_comm_overlap_cfg"]
        draft.set("model", "tp_comm_overlap_cfg", _without_nulls(layers), "O2 comm_overlap")
    if draft.get("ddp", "use_distributed_optimizer"):
        sharded = data_parallel_size > 1
        usual = dict.fromkeys(COMM_FIELDS)
        usual.update(
            bucket_size=OVERLAP_BUCKET_SIZE if sharded else None,
            overlap_grad_reduce=sharded,
            overlap_param_gather=sharded,
            overlap_param_gather_with_optimizer_step=False,
            align_param_gather=sharded and pipelined and interleaved,
        )
        _apply_overlap(draft, "optimizer", usual, chosen)
        _apply_overlap(draft, "ddp", usual, chosen)


def _apply_overlap(draft: Draft, section: str, usual: Mapping[str, Any], chosen: Mapping[str, Any]) -> None:
    owner = draft.values.get(section)
    if not isinstance(owner, dict):
        return
    for name in COMM_FIELDS:
        if name in owner:
            value = chosen[name] if chosen[name] is not None else usual[name]
            draft.set(section, name, value, "O2 comm_overlap")


def _without_nulls(layers: Any) -> Any:
    if not isinstance(layers, dict):
        return None
    return {
        name: {k: v for k, v in value.items() if k != "_target_"} if isinstance(value, dict) else value
        for name, value in layers.items()
        if value is not None and name != "_target_"
    }


# ------------------------------------------------------------------------------------------- validate()


def _validate(draft: Draft) -> None:
    """The overwriting of ``ConfigContainer.validate()``, in its order."""
    _dataset(draft)
    if draft.get("ddp", "megatron_fsdp_max_pool_double_buffer"):
        draft.set("ddp", "fsdp_double_buffer", True, "A25")
    _optimizer(draft)
    effective_model.finalize(draft)
    samples, batch = draft.get("train", "train_samples"), draft.get("train", "global_batch_size")
    if samples and batch:
        draft.set("train", "train_iters", samples // batch, "train.finalize")
    if draft.get("rng", "te_rng_tracker") or draft.get("model", "use_te_rng_tracker"):
        draft.set("model", "use_te_rng_tracker", True, "TE RNG tracker synced")
        draft.set("rng", "te_rng_tracker", True, "TE RNG tracker synced")
    for name in ("global_batch_size", "micro_batch_size"):
        if draft.has("validation", f"eval_{name}") and draft.get("validation", f"eval_{name}") is None:
            draft.set("validation", f"eval_{name}", draft.get("train", name), "evaluation batch from training")
    if draft.get("dist", "use_megatron_fsdp") or draft.get("ddp", "use_megatron_fsdp"):
        _megatron_fsdp(draft)
    _sync_distributed_optimizer(draft)
    if draft.get("dist", "lazy_mpu_init") and not draft.get("model", "use_cpu_initialization"):
        draft.set("model", "use_cpu_initialization", draft.get("dist", "lazy_mpu_init"), "dist.lazy_mpu_init")


def _dataset(draft: Draft) -> None:
    if draft.has("dataset", "pad_to_max_length") and not draft.get("dataset", "pad_to_max_length"):
        fixed = any((draft.get("model", f"{n}_model_parallel_size") or 1) > 1 for n in ("pipeline", "expert"))
        if fixed:
            draft.set("dataset", "pad_to_max_length", True, "fixed sequence length for PP or EP")


def _optimizer(draft: Draft) -> None:
    """Derived flag of megatron-core 0.19.2, optimizer/optimizer_config.py:404-411."""
    name = "use_precision_aware_optimizer_no_fp8_or_ds_fp8"
    if not isinstance(draft.values.get("optimizer"), dict):
        return
    aware = draft.get("optimizer", "use_precision_aware_optimizer")
    plain = (
        draft.get("optimizer", "main_params_dtype") != "float32"
        or draft.get("optimizer", "fp8_recipe") in (None, "delayed")
        or draft.get("optimizer", "optimizer_cpu_offload")
    )
    if draft.has("optimizer", name):
        draft.set("optimizer", name, bool(aware and plain), "A22")


def _megatron_fsdp(draft: Draft) -> None:
    draft.set("dist", "use_megatron_fsdp", True, "A2")
    draft.set("ddp", "use_megatron_fsdp", True, "A2")
    draft.set("ddp", "use_distributed_optimizer", True, "A3")
    draft.set("optimizer", "use_distributed_optimizer", True, "A3")
    if draft.get("optimizer", "use_precision_aware_optimizer"):
        draft.set("ddp", "megatron_fsdp_use_decoupled_grad", True, "A4")
    if draft.get("ddp", "average_in_collective") and not draft.get("ddp", "disable_symmetric_registration"):
        draft.set("ddp", "average_in_collective", False, "A5")
    for section in ("ddp", "optimizer"):
        if draft.get(section, "reuse_grad_buf_for_mxfp8_param_ag"):
            draft.set("ddp", "reuse_grad_buf_for_mxfp8_param_ag", False, "A6")
            draft.set("optimizer", "reuse_grad_buf_for_mxfp8_param_ag", False, "A6")
    if draft.get("ddp", "nccl_ub"):
        draft.set("ddp", "fsdp_manual_registration", True, "A9")


def _sync_distributed_optimizer(draft: Draft) -> None:
    """A16: either flag switches both on."""
    for name in ("use_distributed_optimizer", "overlap_param_gather"):
        if draft.get("ddp", name) or draft.get("optimizer", name):
            draft.set("ddp", name, True, "A16")
            draft.set("optimizer", name, True, "A16")
