"""Latent attention, experts over 16 and 8 ranks, HybridEP and multi-token prediction together, held against real runs.

A proxy of DeepSeek-V3 with 14 layers in Megatron-LM's continuous tests: 64 H100 and 32 GB200, torch's allocated bytes
on the last rank after the optimizer step and at the peak since the start (April and June 2026; how many GPUs they had
follows from the states alone). Nothing was tuned to them. Routing is not forced to balance, so that the peak holds an
unknown imbalance: the default must come near it, and balanced routing stay below.
"""

from __future__ import annotations

import pytest

from estimator.imbalance import DEFAULT_LOAD_IMBALANCE
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
from estimator.step import step_timeline

MODEL = {
    "num_layers": 14,
    "hidden_size": 7168,
    "ffn_hidden_size": 18432,
    "num_attention_heads": 128,
    "num_query_groups": 128,
    "kv_channels": 128,
    "vocab_size": 258560,
    "seq_length": 4096,
    "qk_layernorm": True,
    "mla": MlaSettings(1536, 512, 128, 64, 128),
    "moe": MoeSettings(
        64,
        2048,
        8,
        (0,) * 3 + (1,) * 11,
        "hybridep",
        permute_fusion=True,
        router_dtype="float32",
        aux_losses=1,
        shared_size=2048,
        num_groups=8,
        group_topk=4,
    ),
    "mtp_num_layers": 1,
}
RUNS = {
    # world, PP, EP, virtual stages, layout, micro batch, cross entropy, GPU, bytes after the step, bytes at the peak
    "H100": (64, 4, 16, 2, "Et*2|(tt|)*5t|tmL", 1, "native", "hopper", 33_393_932_288, 51_804_901_376),
    "GB200, TE cross entropy": (32, 2, 8, None, "Et*7|t*7mL", 4, "te", "blackwell", 58_534_105_088, 100_882_341_888),
    "GB200": (32, 2, 8, None, "Et*7|t*7mL", 4, "native", "blackwell", 58_584_178_688, 121_791_733_760),
}


def _settings(name: str, imbalance: float) -> Settings:
    world, stages, experts, virtual, layout, micro, entropy, *_ = RUNS[name]
    return Settings(
        model=ModelSettings(**MODEL, cross_entropy_fusion_impl=entropy),
        parallel=ParallelSettings(
            world,
            2,
            stages,
            expert_model_parallel_size=experts,
            sequence_parallel=True,
            virtual_pipeline_model_parallel_size=virtual,
            pipeline_model_parallel_layout=layout,
            overlap_p2p_comm=virtual is not None,
        ),
        sharding=ShardingSettings("distopt", bucket_size=40_000_000),
        optimizer=OptimizerSettings(),
        recompute=RecomputeSettings(),
        batch=BatchSettings(micro, 512),
        moe_load_imbalance=imbalance,
    )


@pytest.mark.parametrize("name", RUNS)
def test_real_runs_of_a_deepseek_v3_proxy(name: str) -> None:
    *_, family, allocated, peak = RUNS[name]
    for imbalance, low in ((1.0, 0.03), (DEFAULT_LOAD_IMBALANCE, 0.012)):
        settings = _settings(name, imbalance)
        step = step_timeline(settings, settings.parallel.pipeline_model_parallel_size - 1, family)
        phases = {p.name: p for p in step.timeline.phases()}
        assert phases["steady_optimizer_step"].allocated_bytes == pytest.approx(allocated, rel=2e-3)
        found = max(p.peak_bytes for p in phases.values())
        assert (1 - low) * peak <= found <= 1.005 * peak
