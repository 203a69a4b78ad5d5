"""The full list of changes that another data-parallel strategy needs, as the real recipe needs it, and no more.

One table a direction. A row says which field, what it has to be, and why; it becomes a change only where another value
is in effect now. The four settings that make an override a Megatron FSDP one, and the strategy's name (rule B2), are
always written on a switch, so that the override also holds on a recipe that was edited since.

Precision is kept, never changed silently: Megatron FSDP does not read ``grad_reduce_in_fp32`` (rule B20), so a job that
accumulates gradients in FP32 gets ``ddp.megatron_fsdp_main_grads_dtype``, and one that does not, does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from estimator.changes import Change
from estimator.job.settings import Stack
from estimator.rules.facts import FSDP_STRATEGIES, Facts, section
from estimator.rules.rule import version_tuple

STRATEGIES = ("ddp", "distopt", "no_shard", "optim", "optim_grads", "optim_grads_params")
MAX_CONNECTIONS = 32
"""CUDA_DEVICE_MAX_CONNECTIONS of NVIDIA's own Megatron FSDP recipes (27 of 28 in megatron-bridge 0.6.2)."""


class _Keep:
    """Says that a row leaves its field as it is."""


KEEP = _Keep()


@dataclass(frozen=True, slots=True)
class Target:
    """A job and where it shall go: its facts now, the strategy, and the microbatches of a step after the change."""

    facts: Facts
    strategy: str
    micro: int

    @property
    def accumulates_in_fp32(self) -> bool:
        """Whether the job reduces and accumulates gradients in FP32 now, whatever its strategy."""
        facts = self.facts
        if facts.fsdp:
            return facts.main_grads_dtype == "float32"
        patterns = facts.ddp.get("param_name_patterns_for_fp32_local_accumulation")
        return bool(facts.ddp.get("grad_reduce_in_fp32") or patterns)

    @property
    def loads_before_wrapping(self) -> bool:
        """Whether weights come in before the model is wrapped: PEFT, ModelOpt (B/training/setup.py:340-373)."""
        return self.facts.peft is not None or bool(self.facts.model.get("restore_modelopt_state"))


@dataclass(frozen=True, slots=True)
class Companion:
    """One field of a strategy: what it must be (or KEEP), and why."""

    path: str
    wanted: Callable[[Target], Any]
    why: str
    family: str = "dp_strategy"
    always: bool = False
    """Written on a switch even where the value is in effect already."""


def _no_pipeline(value: Any) -> Callable[[Target], Any]:
    return lambda t: value if t.facts.pp > 1 else KEEP


def _folder(field: str, suffix: str) -> Callable[[Target], Any]:
    def wanted(t: Target) -> Any:
        folder = t.facts.checkpoint.get(field)
        return KEEP if not folder else str(folder).rstrip("/") + suffix

    return wanted


def _main_grads_dtype(t: Target) -> Any:
    if t.accumulates_in_fp32:
        return KEEP if t.facts.main_grads_dtype == "float32" else "float32"
    return KEEP if t.facts.fsdp or t.facts.main_grads_dtype != "float32" else None


def _fused_accumulation(t: Target) -> Any:
    core, engine = version_tuple(t.facts.stack.megatron_core), version_tuple(t.facts.stack.transformer_engine)
    overwrites = t.strategy == "optim" and t.micro != 1 and core < version_tuple("0.20.0")
    return False if overwrites or engine < version_tuple("2.10") else KEEP


def _meta_device(t: Target) -> Any:
    if t.strategy == "no_shard":
        return False
    keeps = t.loads_before_wrapping or t.facts.model.get("use_cpu_initialization")
    return KEEP if keeps else True


def _max_connections(t: Target) -> Any:
    return KEEP if t.facts.max_connections not in (None, "1") else MAX_CONNECTIONS


NO_PIPELINE: tuple[Companion, ...] = (
    Companion(
        "model.pipeline_model_parallel_size",
        _no_pipeline(1),
        "Megatron FSDP cannot be built with a pipeline (B1); its ranks join data parallelism.",
        "layout",
    ),
    *(
        Companion(f"model.{field}", _no_pipeline(off), "It describes a pipeline, and there is none any more.", "layout")
        for field, off in (
            ("virtual_pipeline_model_parallel_size", None),
            ("pipeline_model_parallel_layout", None),
            ("num_layers_in_first_pipeline_stage", None),
            ("num_layers_in_last_pipeline_stage", None),
            ("account_for_embedding_in_pipeline_split", False),
            ("account_for_loss_in_pipeline_split", False),
        )
    ),
)

TO_FSDP: tuple[Companion, ...] = (
    Companion("dist.use_megatron_fsdp", lambda t: True, "Switches Megatron FSDP on (A2).", always=True),
    Companion("ddp.use_megatron_fsdp", lambda t: True, "Wraps the model with Megatron FSDP (A2).", always=True),
    Companion(
        "ddp.data_parallel_sharding_strategy",
        lambda t: t.strategy,
        "Says what is sharded over the data-parallel ranks; Megatron-Core's default shards nothing (B2).",
        always=True,
    ),
    Companion(
        "ddp.average_in_collective",
        lambda t: KEEP if t.facts.ddp.get("disable_symmetric_registration") else False,
        "Megatron FSDP does not average inside the collective (A5).",
        always=True,
    ),
    Companion(
        "checkpoint.ckpt_format",
        lambda t: "fsdp_dtensor",
        "The only checkpoint format of Megatron FSDP (A7).",
        always=True,
    ),
    Companion(
        "checkpoint.save",
        _folder("save", "_fsdp"),
        "A new folder, so that checkpoints of two formats do not mix.",
    ),
    Companion(
        "checkpoint.load",
        _folder("load", "_fsdp"),
        "The folder that the job saves in, so that it resumes from its own checkpoints.",
    ),
    Companion(
        "checkpoint.pretrained_checkpoint",
        lambda t: KEEP if t.loads_before_wrapping else _folder("pretrained_checkpoint", "_fsdp")(t),
        "The pretrained checkpoint has to be converted to fsdp_dtensor first (B15).",
    ),
    Companion(
        "ddp.megatron_fsdp_main_params_dtype",
        lambda t: KEEP if t.facts.fsdp else "float32",
        "Main weights stay in FP32, as the job has them now.",
    ),
    Companion(
        "ddp.megatron_fsdp_main_grads_dtype",
        _main_grads_dtype,
        "Keeps gradient accumulation in the precision that the job has now; Megatron FSDP does not read "
        "grad_reduce_in_fp32 (B20).",
    ),
    Companion(
        "env.CUDA_DEVICE_MAX_CONNECTIONS",
        _max_connections,
        "Megatron FSDP refuses 1; 32 is what NVIDIA's own FSDP recipes set (A8).",
    ),
    Companion(
        "model.init_model_with_meta_device",
        _meta_device,
        "Builds the model without the whole of it on every GPU first; with no_shard that is not possible (B7).",
    ),
    Companion(
        "model.cuda_graph_impl",
        lambda t: "none",
        "CUDA graphs do not work with FSDP's module hooks (B9).",
    ),
    Companion(
        "model.gradient_accumulation_fusion",
        _fused_accumulation,
        "With the strategy optim the fused kernel loses gradients when there is more than one microbatch (B10).",
    ),
    Companion(
        "ddp.overlap_grad_reduce",
        lambda t: True if t.strategy in ("optim", "no_shard") else KEEP,
        "Without it gradients can be reduced twice (B18), and one bucket is the whole model (O7).",
    ),
    Companion(
        "model.defer_embedding_wgrad_compute",
        lambda t: False,
        "The deferred embedding gradient does not work with Megatron FSDP (B16).",
    ),
    Companion(
        "train.check_weight_hash_across_dp_replicas_interval",
        lambda t: None if t.strategy == "optim_grads_params" else KEEP,
        "Sharded weights have no replicas to compare (A10).",
    ),
    Companion("dist.use_tp_pp_dp_mapping", lambda t: False, "Not supported with Megatron FSDP (A11)."),
    Companion("dist.use_torch_fsdp2", lambda t: False, "Megatron FSDP and torch FSDP2 exclude each other (A1)."),
    Companion(
        "checkpoint.also_save_hf_checkpoint",
        lambda t: False,
        "Hugging Face weights cannot be written beside fsdp_dtensor checkpoints (A13).",
    ),
    Companion(
        "ddp.keep_fp8_transpose_cache",
        lambda t: False,
        "Drops the FP8 transposes, as NVIDIA's FSDP recipes do.",
        "fsdp_buffers",
    ),
    Companion(
        "optimizer.optimizer_cpu_offload",
        lambda t: False,
        "The CPU-offloading optimizer has no code for sharded parameters (B13).",
        "offload",
    ),
    Companion("model.moe_single_grouped_weight", lambda t: False, "Cannot be sharded by Megatron FSDP (B11)."),
    Companion("model.moe_single_grouped_bias", lambda t: False, "Cannot be sharded by Megatron FSDP (B11)."),
    Companion("model.hybrid_context_parallel", lambda t: False, "Not supported with Megatron FSDP (B12)."),
    Companion(
        "ddp.fsdp_double_buffer",
        lambda t: KEEP if t.strategy == "optim_grads_params" else False,
        "Only optim_grads_params has units to buffer (B5).",
        "fsdp_buffers",
    ),
)

FROM_FSDP: tuple[Companion, ...] = (
    Companion("dist.use_megatron_fsdp", lambda t: False, "Switches Megatron FSDP off; either flag turns it on (A2)."),
    Companion("ddp.use_megatron_fsdp", lambda t: False, "Switches Megatron FSDP off; either flag turns it on (A2)."),
    Companion(
        "checkpoint.ckpt_format",
        lambda t: "torch_dist" if t.facts.checkpoint.get("ckpt_format") == "fsdp_dtensor" else KEEP,
        "fsdp_dtensor checkpoints need Megatron FSDP (A12).",
    ),
    Companion(
        "checkpoint.save",
        _folder("save", "_torch_dist"),
        "A new folder, so that checkpoints of two formats do not mix.",
    ),
    Companion(
        "checkpoint.load",
        _folder("load", "_torch_dist"),
        "The folder that the job saves in, so that it resumes from its own checkpoints.",
    ),
    Companion(
        "ddp.grad_reduce_in_fp32",
        lambda t: t.accumulates_in_fp32,
        "Keeps gradient accumulation in the precision that the job has now.",
    ),
    Companion(
        "model.init_model_with_meta_device",
        lambda t: False,
        "Without Megatron FSDP nothing materialises parameters built on the meta device (B7).",
    ),
    Companion(
        "ddp.reuse_grad_buf_for_mxfp8_param_ag",
        lambda t: (
            True
            if t.strategy == "distopt"
            and t.facts.mixed.get("fp8_param_gather")
            and t.facts.mixed.get("fp8_recipe") == "mxfp8"
            else KEEP
        ),
        "Without Megatron FSDP, MXFP8 parameters are gathered through the gradient buffer (A17).",
    ),
    Companion("ddp.fsdp_double_buffer", lambda t: False, "It buffers FSDP units only (B17).", "fsdp_buffers"),
    Companion(
        "ddp.megatron_fsdp_max_pool_double_buffer",
        lambda t: False,
        "It buffers FSDP units only (B17).",
        "fsdp_buffers",
    ),
)

TO_DISTOPT: tuple[Companion, ...] = (
    Companion(
        "ddp.use_distributed_optimizer",
        lambda t: True,
        "Shards main weights and optimizer states over the data-parallel ranks.",
    ),
)

TO_DDP: tuple[Companion, ...] = (
    Companion(
        "ddp.use_distributed_optimizer", lambda t: False, "Every rank keeps all states; either flag turns it on (A16)."
    ),
    Companion(
        "optimizer.use_distributed_optimizer",
        lambda t: False,
        "Every rank keeps all states; either flag turns it on (A16).",
    ),
    Companion("ddp.overlap_param_gather", lambda t: False, "There are no sharded parameters to gather (D2)."),
    Companion("optimizer.overlap_param_gather", lambda t: False, "There are no sharded parameters to gather (D2)."),
    Companion("ddp.num_distributed_optimizer_instances", lambda t: 1, "Instances need the distributed optimizer (D6)."),
)

NEEDS_RAW = frozenset(
    {
        "ddp.use_distributed_optimizer",
        "optimizer.use_distributed_optimizer",
        "ddp.overlap_param_gather",
        "optimizer.overlap_param_gather",
        "dist.use_megatron_fsdp",
        "ddp.use_megatron_fsdp",
    }
)
"""Fields that Bridge switches on by itself: what is written counts, not only what is in effect."""


def strategy_changes(
    values: Mapping[str, Any],
    effective: Mapping[str, Any],
    strategy: str,
    world_size: int,
    gpu_family: str = "",
    stack: Stack | None = None,
) -> tuple[Change, ...]:
    """Every change that takes the job to ``strategy`` (ddp, distopt, no_shard, optim, optim_grads, optim_grads_params).

    ``values`` is the job as written, ``effective`` after Bridge's own adjustments. Empty where the job is there already
    and nothing needs repair. The result is not judged: ``check_rules`` on the changed job says whether a rule still
    stands against it (a precision-aware optimizer without sharding, say). Raises ValueError for an unknown strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"no strategy {strategy!r}: one of {', '.join(STRATEGIES)}")
    facts = Facts(values, effective, world_size, gpu_family, stack or Stack())
    to_fsdp = strategy in FSDP_STRATEGIES
    dp = facts.dp * (facts.pp if to_fsdp else 1)
    per_step = facts.mbs * dp
    target = Target(facts, strategy, facts.gbs // per_step if per_step else 0)
    rows: tuple[Companion, ...] = (*NO_PIPELINE, *TO_FSDP) if to_fsdp else ()
    if not to_fsdp and facts.fsdp:
        rows += FROM_FSDP
    if strategy == "distopt":
        rows += TO_DISTOPT
    elif strategy == "ddp":
        rows += TO_DDP
    switches = facts.fsdp != to_fsdp
    found = [_change(row, target, values, effective, switches) for row in rows]
    return tuple(change for change in found if change is not None)


def fsdp_companions(
    values: Mapping[str, Any],
    effective: Mapping[str, Any],
    world_size: int,
    strategy: str = "optim_grads_params",
    gpu_family: str = "",
    stack: Stack | None = None,
) -> tuple[Change, ...]:
    """``strategy_changes`` to a Megatron FSDP strategy."""
    return strategy_changes(values, effective, strategy, world_size, gpu_family, stack)


def _change(
    row: Companion, target: Target, values: Mapping[str, Any], effective: Mapping[str, Any], switches: bool
) -> Change | None:
    wanted = row.wanted(target)
    if isinstance(wanted, _Keep):
        return None
    if row.path in ("checkpoint.save", "checkpoint.load", "checkpoint.pretrained_checkpoint") and not switches:
        return None
    name, _, field = row.path.partition(".")
    current = section(effective, "env_vars" if name == "env" else name).get(field)
    if not (row.always and switches) and _same(current, wanted):
        raw = section(values, name).get(field)
        if row.path not in NEEDS_RAW or _same(raw, wanted) or wanted:
            return None
        current = raw
    return Change(row.path, current, wanted, row.why, row.family)


def _same(current: Any, wanted: Any) -> bool:
    if current is None and wanted is False:
        return True
    return bool(current == wanted)
