"""Measured ranks of jobs beyond the plain ones: several optimizer instances and hybrid Megatron FSDP.

All: 4 layers of h 2048, f 7168, 16 heads, 8 query groups, V 32000, sequence 4096, micro batch 1, 8 ranks (rank 0),
BF16, FP32 gradients, Transformer Engine cross entropy, no clipping. Measured bytes lie up to 0.4 % above: the allocator does
not split a block of 2 MiB steps whose rest is below 1 MiB, and counts the whole block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from estimator.job.settings import (
    BatchSettings,
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    RecomputeSettings,
    Settings,
    ShardingSettings,
)
from estimator.step import step_timeline

SOURCE = "one H200, fake process group, Bridge's _ddp_wrap, torch 2.11, megatron-core 0.19.2, TE 2.12.0, 2026"

FSDP = ShardingSettings("optim_grads_params", bucket_size=40_000_000, main_grads_dtype="float32")
DISTOPT = ShardingSettings("distopt", bucket_size=40_000_000)
BASE = Settings(
    ModelSettings(4, 2048, 7168, 16, 8, 128, 32000, 4096, cross_entropy_fusion_impl="te"),
    ParallelSettings(8),
    DISTOPT,
    OptimizerSettings(clipping_active=False),
    RecomputeSettings(),
    BatchSettings(1, 8),
)


def job(**parts: Any) -> Settings:
    return replace(BASE, **parts)


# settings; allocated after wrap, first forward-backward peak, allocated after the first step, second forward-backward
# peak, allocated after the second
MEASURED = {
    "two optimizer instances": (
        job(sharding=replace(DISTOPT, num_distributed_optimizer_instances=2)),
        (2145497600, 4227121152, 3567418368, 5055533056, 3567418368),
    ),
    "hybrid FSDP": (
        job(sharding=replace(FSDP, num_distributed_optimizer_instances=2)),
        (895955456, 3676327936, 2676980736, 4475621376, 2676980736),
    ),
    "hybrid FSDP, states over all": (
        job(sharding=replace(FSDP, num_distributed_optimizer_instances=2, outer_dp_sharding_strategy="optim")),
        (717898240, 3498303488, 2142800896, 3943030784, 2142800896),
    ),
}


@pytest.mark.parametrize("name", MEASURED)
def test_phases_agree_with_the_measurement(name: str) -> None:
    settings, (wrapped, first, after_first, second, after_second) = MEASURED[name]
    phases = {p.name: p for p in step_timeline(settings, 0).timeline.phases()}
    assert phases["first_forward_backward"].peak_bytes == pytest.approx(first, rel=0.003)
    assert phases["steady_forward_backward"].peak_bytes == pytest.approx(second, rel=0.003)
    assert phases["model_build"].allocated_bytes == pytest.approx(wrapped, rel=0.004)
    assert phases["first_optimizer_step"].allocated_bytes == pytest.approx(after_first, rel=0.004)
    assert phases["steady_optimizer_step"].allocated_bytes == pytest.approx(after_second, rel=0.004)
