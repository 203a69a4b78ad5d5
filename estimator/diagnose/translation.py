"""Foreign vocabularies to Megatron-Bridge's fields: Megatron-LM arguments, Hugging Face, DeepSpeed, accelerate.

Everything here is tables and small pure functions; a value that cannot be translated is left out, never guessed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from estimator.catalog import fields as catalog

Assignments = dict[str, Any]
"""Dotted path below ``cfg`` -> value."""

_ENUM = re.compile(r"<(?:\w{1,60}\.){1,4}(\w{1,60})(?:: .{0,80})?>|(?:AttnBackend|ModelType|LayerType)\.(\w{1,60})")
_NUMBER = re.compile(r"[+-]?\d{1,18}")
_FLOAT = re.compile(r"[+-]?(?:\d{1,18}\.\d{0,18}|\.\d{1,18}|\d{1,18})(?:[eE][+-]?\d{1,3})?")
MISSING = object()


def literal(text: str) -> Any:
    """A printed Python value (None, True, 12, 1e-5, 'x', torch.bfloat16, <Enum.member: 3>, [1, 2]), MISSING for
    anything else. Nothing is evaluated."""
    text = text.strip()
    if len(text) > 2_000:
        return MISSING
    words = {"None": None, "null": None, "True": True, "true": True, "False": False, "false": False}
    if text in words:
        return words[text]
    if _NUMBER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
        return text[1:-1]
    if text.startswith("torch.") and text[6:].isidentifier():
        return text[6:]
    if match := _ENUM.fullmatch(text):
        return match[1] or match[2]
    if text.startswith("[") and text.endswith("]"):
        items = [literal(part) for part in text[1:-1].split(",") if part.strip()][:200]
        return MISSING if any(item is MISSING or isinstance(item, list) for item in items) else items
    if re.fullmatch(r"[\w./\-+:@]{1,400}", text):
        return text
    return MISSING


# ---------------------------------------------------------------------- Megatron-LM

_SECTIONS = ("model", "ddp", "optimizer", "train", "checkpoint", "dist")
_CHECKPOINT_FIELDS = frozenset({"save", "load", "ckpt_format", "save_interval", "async_save", "pretrained_checkpoint"})


@functools.cache
def _section_of() -> Mapping[str, str]:
    """Argument name -> the section that has a field of that name, the first of :data:`_SECTIONS`."""
    found: dict[str, str] = {}
    for section in _SECTIONS:
        target = catalog.sections()[section].default_class
        for name in catalog.class_fields(target) if target else ():
            if section != "checkpoint" or name in _CHECKPOINT_FIELDS:
                found.setdefault(name, section)
    return found


def _both(*paths: str) -> Callable[[Any], Assignments]:
    return lambda value: dict.fromkeys(paths, value)


def _negated(path: str) -> Callable[[Any], Assignments]:
    return lambda value: {path: not value}


def _when(true: Assignments) -> Callable[[Any], Assignments]:
    return lambda value: dict(true) if value is True else {}


MEGATRON: Mapping[str, Callable[[Any], Assignments]] = {
    "swiglu": _when({"model.gated_linear_unit": True, "model.activation_func": "silu"}),
    "squared_relu": _when({"model.activation_func": "squared_relu"}),
    "untie_embeddings_and_output_weights": _negated("model.share_embeddings_and_output_weights"),
    "disable_bias_linear": _negated("model.add_bias_linear"),
    "num_experts": _both("model.num_moe_experts"),
    "vocab_size": _both("model.vocab_size"),
    "padded_vocab_size": lambda value: {"model.vocab_size": value, "model.should_pad_vocab": False},
    "accumulate_allreduce_grads_in_fp32": _both("mixed_precision.grad_reduce_in_fp32", "ddp.grad_reduce_in_fp32"),
    "grad_reduce_in_fp32": _both("mixed_precision.grad_reduce_in_fp32", "ddp.grad_reduce_in_fp32"),
    "bf16": _when({"mixed_precision": "bf16_mixed"}),
    "fp16": _when({"mixed_precision": "fp16_mixed"}),
    "fp8": _both("mixed_precision.fp8"),
    "fp8_recipe": _both("mixed_precision.fp8_recipe"),
    "ddp_bucket_size": _both("ddp.bucket_size"),
    "use_distributed_optimizer": _both("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer"),
    "overlap_param_gather": _both("ddp.overlap_param_gather", "optimizer.overlap_param_gather"),
    "use_custom_fsdp": _both("dist.use_megatron_fsdp", "ddp.use_megatron_fsdp"),
    "use_megatron_fsdp": _both("dist.use_megatron_fsdp", "ddp.use_megatron_fsdp"),
    "use_torch_fsdp2": _both("dist.use_torch_fsdp2"),
    "params_dtype": lambda value: {},
    "fp32_residual_connection": _both("model.fp32_residual_connection"),
    "encoder_num_layers": lambda value: {},
    "rotary_interleaved": lambda value: {},
}
"""Arguments that have another name, another sense or two places in Bridge. Source: megatron-core 0.19.2
training/arguments.py; every other argument goes to the field of its name, if there is one."""

EXTRA = ("world_size", "data_parallel_size", "padded_vocab_size", "rank")


def from_megatron(arguments: Mapping[str, Any]) -> Assignments:
    """Bridge's fields for Megatron-LM's arguments (``args.NAME``). What is None stays Bridge's default."""
    result: Assignments = {}
    for name, value in arguments.items():
        if value is None or value is MISSING or isinstance(value, dict):
            continue
        translate = MEGATRON.get(name)
        if translate is not None:
            result.update(translate(value))
        elif name in _section_of():
            result[f"{_section_of()[name]}.{name}"] = value
    if arguments.get("padded_vocab_size"):
        result["model.vocab_size"] = arguments["padded_vocab_size"]
    if arguments.get("group_query_attention") is False:
        result.pop("model.num_query_groups", None)
    return result


# ---------------------------------------------------------------------- Hugging Face

HUGGING_FACE: Mapping[str, Callable[[Any], Assignments]] = {
    "num_hidden_layers": _both("model.num_layers"),
    "n_layer": _both("model.num_layers"),
    "hidden_size": _both("model.hidden_size"),
    "n_embd": _both("model.hidden_size"),
    "intermediate_size": _both("model.ffn_hidden_size"),
    "num_attention_heads": _both("model.num_attention_heads"),
    "n_head": _both("model.num_attention_heads"),
    "num_key_value_heads": _both("model.num_query_groups"),
    "head_dim": _both("model.kv_channels"),
    "vocab_size": _both("model.vocab_size"),
    "tie_word_embeddings": _both("model.share_embeddings_and_output_weights"),
    "attention_bias": _both("model.add_qkv_bias"),
    "num_local_experts": _both("model.num_moe_experts"),
    "num_experts": _both("model.num_moe_experts"),
    "n_routed_experts": _both("model.num_moe_experts"),
    "num_experts_per_tok": _both("model.moe_router_topk"),
    "moe_intermediate_size": _both("model.moe_ffn_hidden_size"),
    "rms_norm_eps": lambda value: {"model.normalization": "RMSNorm"},
    "layer_norm_eps": lambda value: {"model.normalization": "LayerNorm"},
    "hidden_act": lambda value: (
        {"model.gated_linear_unit": True, "model.activation_func": "silu"} if value in ("silu", "swish") else {}
    ),
}
"""Keys of a ``config.json``. ``max_position_embeddings`` is what the model can take, not what the job trains with: it
is only the likely value of ``seq_length``."""


def from_hugging_face(config: Mapping[str, Any]) -> Assignments:
    """Bridge's fields for a decoder's ``config.json``; nested text configs are looked into."""
    for nested in ("text_config", "llm_config"):
        if isinstance(config.get(nested), dict):
            config = config[nested]
    result: Assignments = {}
    for key, translate in HUGGING_FACE.items():
        value = config.get(key)
        if value is not None and not isinstance(value, (dict, list)):
            result.update(translate(value))
    if result.get("model.gated_linear_unit"):
        result.setdefault("model.add_bias_linear", False)
        result.setdefault("model.position_embedding_type", "rope")
    return result


# ---------------------------------------------------------------------- DeepSpeed, accelerate, torch FSDP

_OPTIMIZER_SHARDED: Assignments = {"ddp.use_distributed_optimizer": True, "optimizer.use_distributed_optimizer": True}
_PLAIN: Assignments = {
    "ddp.use_distributed_optimizer": False,
    "optimizer.use_distributed_optimizer": False,
    "ddp.overlap_param_gather": False,
    "optimizer.overlap_param_gather": False,
}


def _megatron_fsdp(strategy: str) -> Assignments:
    return {
        "dist.use_megatron_fsdp": True,
        "ddp.use_megatron_fsdp": True,
        "ddp.data_parallel_sharding_strategy": strategy,
    }


ZERO_STAGES: Mapping[int, Assignments] = {
    0: _PLAIN,
    1: _OPTIMIZER_SHARDED,
    2: _megatron_fsdp("optim_grads"),
    3: _megatron_fsdp("optim_grads_params"),
}
FSDP_STRATEGIES: Mapping[str, Assignments] = {
    "FULL_SHARD": ZERO_STAGES[3],
    "1": ZERO_STAGES[3],
    "SHARD_GRAD_OP": ZERO_STAGES[2],
    "2": ZERO_STAGES[2],
    "NO_SHARD": ZERO_STAGES[0],
    "3": ZERO_STAGES[0],
    "HYBRID_SHARD": ZERO_STAGES[3],
    "4": ZERO_STAGES[3],
}
"""accelerate writes the name or torch's number of it (torch/distributed/fsdp/api.py ShardingStrategy)."""


def from_deepspeed(config: Mapping[str, Any]) -> Assignments:
    """What a DeepSpeed or accelerate configuration says about sharding and batches, in Bridge's closest terms."""
    result: Assignments = {}
    zero = config.get("zero_optimization")
    nested = config.get("deepspeed_config")
    stage = zero.get("stage") if isinstance(zero, dict) else config.get("zero_stage")
    if stage is None and isinstance(nested, dict):
        stage = nested.get("zero_stage")
    if isinstance(stage, int) and not isinstance(stage, bool) and stage in ZERO_STAGES:
        result.update(ZERO_STAGES[stage])
    fsdp = config.get("fsdp_config")
    if config.get("distributed_type") == "FSDP" or isinstance(fsdp, dict):
        strategy = (fsdp or {}).get("fsdp_sharding_strategy", "FULL_SHARD") if isinstance(fsdp, dict) else "FULL_SHARD"
        result.update(FSDP_STRATEGIES.get(str(strategy).upper().rpartition(".")[2], {}))
    for name, path in (
        ("train_micro_batch_size_per_gpu", "train.micro_batch_size"),
        ("train_batch_size", "train.global_batch_size"),
    ):
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            result[path] = value
    return result
