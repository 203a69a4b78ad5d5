"""Foreign vocabularies to Megatron-Bridge's fields: Hugging Face, DeepSpeed, accelerate, and how values are printed.
Megatron-LM's arguments: ``estimator.job.megatron_lm``.

Everything here is tables and small pure functions; a value that cannot be translated is left out, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from estimator.job.megatron_lm import Assignments, both

_ENUM = re.compile(r"<(?:\w{1,60}\.){1,4}(\w{1,60})(?:: .{0,80})?>|(?:AttnBackend|ModelType|LayerType)\.(\w{1,60})")
_NUMBER = re.compile(r"[+-]?\d{1,18}")
_FLOAT = re.compile(r"[+-]?(?:\d{1,18}\.\d{0,18}|\.\d{1,18}|\d{1,18})(?:[eE][+-]?\d{1,3})?")
_ARGUMENT = re.compile(r"\s{0,4}([a-z_0-9]{2,80}) \.{0,60} ?(.{0,2000})$")
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


def printed_arguments(text: str) -> dict[str, Any]:
    """Name -> value of the lines "name ..... value" that Megatron-LM prints at its start; other lines are left out."""
    arguments: dict[str, Any] = {}
    for line in text.split("\n"):
        match = _ARGUMENT.match(line)
        if match and (value := literal(match[2])) is not MISSING:
            arguments[match[1]] = value
    return arguments


# ---------------------------------------------------------------------- Hugging Face

HUGGING_FACE: Mapping[str, Callable[[Any], Assignments]] = {
    "num_hidden_layers": both("model.num_layers"),
    "n_layer": both("model.num_layers"),
    "hidden_size": both("model.hidden_size"),
    "n_embd": both("model.hidden_size"),
    "intermediate_size": both("model.ffn_hidden_size"),
    "num_attention_heads": both("model.num_attention_heads"),
    "n_head": both("model.num_attention_heads"),
    "num_key_value_heads": both("model.num_query_groups"),
    "head_dim": both("model.kv_channels"),
    "vocab_size": both("model.vocab_size"),
    "tie_word_embeddings": both("model.share_embeddings_and_output_weights"),
    "attention_bias": both("model.add_qkv_bias"),
    "num_local_experts": both("model.num_moe_experts"),
    "num_experts": both("model.num_moe_experts"),
    "n_routed_experts": both("model.num_moe_experts"),
    "num_experts_per_tok": both("model.moe_router_topk"),
    "moe_intermediate_size": both("model.moe_ffn_hidden_size"),
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
