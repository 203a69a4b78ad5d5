"""Small jobs with experts and latent attention, for tests."""

from __future__ import annotations

from typing import Any

from estimator.job.settings import (
    BatchSettings,
    MlaSettings,
    ModelSettings,
    MoeSettings,
    OptimizerSettings,
    ParallelSettings,
    RecomputeSettings,
    Settings,
    ShardingSettings,
)

LATENTS = MlaSettings(q_lora_rank=192, kv_lora_rank=128, qk_head_dim=64, qk_pos_emb_head_dim=32, v_head_dim=64)


def model_of(mla: MlaSettings | None = None, layers: int = 4, **changes: Any) -> ModelSettings:
    sizes: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": 512,
        "ffn_hidden_size": 1024,
        "num_attention_heads": 8,
        "num_query_groups": 8,
        "kv_channels": 64,
        "vocab_size": 32000,
        "seq_length": 2048,
        "qk_layernorm": True,
        "mla": mla,
    }
    return ModelSettings(**{**sizes, **changes})


def moe_of(pattern: tuple[int, ...] = (0, 1, 1, 1), **changes: Any) -> MoeSettings:
    sizes: dict[str, Any] = {
        "num_experts": 16,
        "ffn_hidden_size": 256,
        "topk": 4,
        "pattern": pattern,
        "permute_fusion": True,
        "router_dtype": "float32",
        "router_fusion": True,
        "aux_losses": 1,
        "shared_size": 512,
    }
    return MoeSettings(**{**sizes, **changes})


def job_of(model: ModelSettings, strategy: str = "distopt", world: int = 8, **changes: Any) -> Settings:
    """``changes``: of ParallelSettings, ``modules`` or ``recompute``, ``imbalance``, ``micro_batch_size``."""
    modules, recompute = changes.pop("modules", ()), changes.pop("recompute", None)
    imbalance, micro = changes.pop("imbalance", 1.0), changes.pop("micro_batch_size", 1)
    if modules:
        recompute = RecomputeSettings("selective", recompute_modules=modules)
    fsdp = strategy not in ("ddp", "distopt")
    return Settings(
        model=model,
        parallel=ParallelSettings(world, **changes),
        sharding=ShardingSettings(strategy, bucket_size=40_000_000, main_grads_dtype="float32" if fsdp else None),
        optimizer=OptimizerSettings(),
        recompute=recompute or RecomputeSettings(),
        batch=BatchSettings(micro, 32),
        moe_load_imbalance=imbalance,
    )
