"""Small jobs and records that the profiler's tests share."""

from __future__ import annotations

from typing import Any

from estimator.job.settings import (
    BatchSettings,
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    RecomputeSettings,
    Settings,
    ShardingSettings,
)
from estimator.profiling import ProfileJob
from estimator.profiling.record import new_record

GIB = 2**30


def small_settings(strategy: str = "distopt", **model: Any) -> Settings:
    """A job that the profiler's CPU rehearsal runs in seconds."""
    dimensions: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "vocab_size": 256,
        "seq_length": 32,
        "normalization": "LayerNorm",
        "transformer_impl": "local",
        "attention_backend": "local",
        "apply_rope_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "cross_entropy_loss_fusion": False,
        "gradient_accumulation_fusion": strategy in ("ddp", "distopt"),
    }
    return Settings(
        model=ModelSettings(**{**dimensions, **model}),
        parallel=ParallelSettings(world_size=4),
        sharding=ShardingSettings(strategy, overlap_param_gather=strategy != "ddp", bucket_size=40_000_000),
        optimizer=OptimizerSettings(),
        recompute=RecomputeSettings(),
        batch=BatchSettings(1, 8),
    )


def small_job(run_id: str = "job", **more: Any) -> ProfileJob:
    return ProfileJob(run_id, small_settings(), **more)


def measured(job: ProfileJob, outcome: str = "ok", **values: Any) -> dict[str, Any]:
    """What a runner would return."""
    return {
        **new_record(job),
        "outcome": outcome,
        "peak_allocated_bytes": GIB,
        "peak_reserved_bytes": 2 * GIB,
        **values,
    }
