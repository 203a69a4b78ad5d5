"""What the rules ask about a job, read once from the effective document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from estimator.job.settings import Stack
from estimator.rules.rule import version_tuple

FSDP_STRATEGIES = frozenset({"no_shard", "optim", "optim_grads", "optim_grads_params"})
BEFORE_BLACKWELL = ("volta", "turing", "ampere", "ada", "hopper", "a100", "a800", "h100", "h200", "h800", "h20")
_EMPTY: Mapping[str, Any] = {}
_SECTIONS = ("model", "train", "validation", "dataset", "ddp", "optimizer", "dist", "checkpoint", "comm_overlap")


def section(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of a document, an empty mapping where it is absent, None or a recipe's name."""
    value = document.get(name)
    return value if isinstance(value, Mapping) else _EMPTY


def strategy_of(document: Mapping[str, Any]) -> str:
    """ddp | distopt | torch_fsdp2 | the Megatron FSDP strategy, of an effective document."""
    dist, ddp = section(document, "dist"), section(document, "ddp")
    if dist.get("use_megatron_fsdp") or ddp.get("use_megatron_fsdp"):
        return str(ddp.get("data_parallel_sharding_strategy") or "no_shard")
    if dist.get("use_torch_fsdp2"):
        return "torch_fsdp2"
    sharded = ddp.get("use_distributed_optimizer") or section(document, "optimizer").get("use_distributed_optimizer")
    return "distopt" if sharded else "ddp"


class Facts:
    """A job as the rules see it: sections of the effective document, sizes, and the questions that many rules ask.

    ``dp`` is the data-parallel size world / (tp * pp * cp), 0 where it is not a whole number; ``micro`` the
    microbatches a rank runs in a step, 0 where the batch does not divide.
    """

    __slots__ = (
        *_SECTIONS,
        "values",
        "mixed",
        "raw_mixed",
        "peft",
        "rerun",
        "env_vars",
        "stack",
        "world",
        "tp",
        "pp",
        "cp",
        "ep",
        "etp",
        "vp",
        "dp",
        "mbs",
        "gbs",
        "micro",
        "fsdp",
        "fsdp2",
        "distopt",
        "strategy",
        "instances",
        "before_blackwell",
        "gpu_family",
        "granularity",
        "recompute",
        "offload",
    )

    def __init__(
        self,
        values: Mapping[str, Any],
        effective: Mapping[str, Any],
        world_size: int,
        gpu_family: str,
        stack: Stack,
    ) -> None:
        get = effective.get
        self.model: Mapping[str, Any] = get("model") or _EMPTY
        self.train: Mapping[str, Any] = get("train") or _EMPTY
        self.validation: Mapping[str, Any] = get("validation") or _EMPTY
        self.dataset: Mapping[str, Any] = get("dataset") or _EMPTY
        self.ddp: Mapping[str, Any] = get("ddp") or _EMPTY
        self.optimizer: Mapping[str, Any] = get("optimizer") or _EMPTY
        self.dist: Mapping[str, Any] = get("dist") or _EMPTY
        self.checkpoint: Mapping[str, Any] = get("checkpoint") or _EMPTY
        self.comm_overlap: Mapping[str, Any] = get("comm_overlap") or _EMPTY
        self.rerun: Mapping[str, Any] = get("rerun_state_machine") or _EMPTY
        self.env_vars: Mapping[str, Any] = get("env_vars") or _EMPTY
        self.peft = get("peft")
        self.mixed = section(effective, "mixed_precision")
        self.raw_mixed = values.get("mixed_precision")
        self.values = values
        self.stack, self.world, self.gpu_family = stack, world_size, gpu_family

        model = self.model.get
        self.tp = model("tensor_model_parallel_size") or 1
        self.pp = model("pipeline_model_parallel_size") or 1
        self.cp = model("context_parallel_size") or 1
        self.ep = model("expert_model_parallel_size") or 1
        self.etp = model("expert_tensor_parallel_size") or (1 if model("num_moe_experts") else self.tp)
        self.vp = model("virtual_pipeline_model_parallel_size") or 1
        parallel = self.tp * self.pp * self.cp
        self.dp = world_size // parallel if world_size % parallel == 0 else 0
        self.mbs = self.train.get("micro_batch_size") or 0
        self.gbs = self.train.get("global_batch_size") or 0
        per_step = self.mbs * self.dp
        self.micro = self.gbs // per_step if per_step and self.gbs % per_step == 0 else 0
        self.granularity = model("recompute_granularity")
        self.recompute = (model("recompute_modules") or ("core_attn",)) if self.granularity == "selective" else ()
        self.offload = (model("offload_modules") or ()) if model("fine_grained_activation_offloading") else ()

        self.fsdp = bool(self.dist.get("use_megatron_fsdp") or self.ddp.get("use_megatron_fsdp"))
        self.fsdp2 = bool(self.dist.get("use_torch_fsdp2"))
        self.distopt = bool(
            self.ddp.get("use_distributed_optimizer") or self.optimizer.get("use_distributed_optimizer")
        )
        self.strategy = self.ddp.get("data_parallel_sharding_strategy") or "no_shard"
        self.instances = self.ddp.get("num_distributed_optimizer_instances") or 1
        self.before_blackwell = str(gpu_family).lower().startswith(BEFORE_BLACKWELL)

    @property
    def saves_or_loads(self) -> bool:
        return self.checkpoint.get("save") is not None or self.checkpoint.get("load") is not None

    @property
    def shard_group_ranks(self) -> int:
        """Ranks that share the dense states: DP * CP."""
        return self.dp * self.cp

    @property
    def expert_dp(self) -> int:
        """Ranks that share an expert's states, 0 where it is not a whole number."""
        size = self.etp * self.ep * self.pp
        return self.world // size if self.world % size == 0 else 0

    @property
    def finetunes(self) -> bool:
        """Whether the dataset is one of Bridge's fine-tuning ones (training/config.py:1440-1448)."""
        kind = str(self.dataset.get("_target_") or self.dataset.get("type") or "")
        return kind.rpartition(".")[2] in {
            "GPTSFTDatasetConfig",
            "DirectHFSFTDatasetConfig",
            "EnergonDatasetConfig",
            "MockVLMSFTDatasetConfig",
        }

    @property
    def max_connections(self) -> str | None:
        """CUDA_DEVICE_MAX_CONNECTIONS as the recipe sets it, None where it does not."""
        value = self.env_vars.get("CUDA_DEVICE_MAX_CONNECTIONS")
        return None if value is None else str(value)

    @property
    def main_grads_dtype(self) -> str:
        """What Megatron FSDP accumulates gradients in: megatron_fsdp_main_grads_dtype, else the parameters' dtype."""
        return str(self.ddp.get("megatron_fsdp_main_grads_dtype") or self.model.get("params_dtype") or "bfloat16")

    def before(self, package: str, version: str) -> bool:
        """Whether the stack's package ("torch", "transformer_engine") is older than that version."""
        return version_tuple(getattr(self.stack, package)) < version_tuple(version)

    def written(self, section_name: str, field: str) -> Any:
        """The field as the job says it, before Bridge's own adjustments."""
        return section(self.values, section_name).get(field)

    def for_words(self) -> FactWords:
        """The facts for format strings: a field that a section does not have reads as None."""
        return FactWords(self)


class FactWords:
    """``{f.tp}`` and ``{f.model[num_layers]}`` of a rule's format strings."""

    __slots__ = ("facts",)

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.facts, name)
        return _FieldWords(value) if isinstance(value, Mapping) else value


class _FieldWords:
    __slots__ = ("fields",)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    def __getitem__(self, name: str) -> Any:
        return self.fields.get(name)
