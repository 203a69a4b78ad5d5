"""Six measured rows, one a strategy: 8 layers of Llama-3-8B, sequence 4096, 8 ranks, rank 0 simulated on one H200.

Settings of all rows: Transformer Engine layers, untied, RMSNorm, SwiGLU, RoPE, no biases, dropout 0, BF16 parameters,
FP32 main gradients, native fused cross entropy, gradient accumulation fusion off, overlaps on, one bucket, clip_grad
1.0, no
recompute, one microbatch. Stack: torch 2.11.0+cu130, megatron-core 0.19.2, transformer-engine 2.12.0.
"""

from __future__ import annotations

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
from estimator.step import StepTimeline, step_timeline

SOURCE = "one H200, fake process group, 2026; torch.cuda.memory_allocated / max_memory_allocated per phase"
PARAMETERS = 2_795_573_248

# strategy: (after wrap, after optimizer build, first forward-backward peak, first step peak, second forward-backward
# peak, second step peak, allocated after the second step)
MEASURED = {
    "distopt": (16773440000, 18171264512, 28128996864, 21069681664, 30958188032, 21069701120, 21069681664),
    "optim_grads_params": (3495780864, 3495781888, 18563069952, 9804573696, 21358803968, 9804573696, 9804573696),
    "optim_grads": (8388870656, 8388871680, 25359868928, 11287268352, 28155503616, 11287275520, 11287268352),
    "optim": (18172609024, 18172610048, 28130323968, 21071006720, 30959513088, 21071013888, 21071006720),
    "no_shard": (27955732992, 27955734016, 37913447936, 50423081984, 60311588352, 52524428800, 50423081984),
    "ddp": (16773440000, 27955734016, 37913447936, 50423081984, 60311588352, 52524428800, 50423081984),
}

# Section M of the rules: bytes a parameter, at 8 shards with FP32 gradients: weights, main weights, gradients, Adam.
BYTES_PER_PARAMETER = {
    "ddp": 2 + 4 + 4 + 8,
    "distopt": 2 + 4 + (4 + 8) / 8,
    "no_shard": 2 + 4 + 4 + 8,
    "optim": 2 + 4 / 8 + 4 + 8 / 8,
    "optim_grads": 2 + 4 / 8 + 4 / 8 + 8 / 8,
    "optim_grads_params": (2 + 4 + 4 + 8) / 8,
}


def _timeline(strategy: str) -> StepTimeline:
    fsdp = strategy not in ("ddp", "distopt")
    settings = Settings(
        model=ModelSettings(
            8,
            4096,
            14336,
            32,
            8,
            128,
            128256,
            4096,
            cross_entropy_fusion_impl="native",
            gradient_accumulation_fusion=False,
        ),
        parallel=ParallelSettings(8),
        sharding=ShardingSettings(strategy, bucket_size=None, main_grads_dtype="float32" if fsdp else None),
        # The fake group sums nothing, so the norm of a shard alone stayed below clip_grad: these runs did not clip.
        optimizer=OptimizerSettings(clipping_active=strategy in ("ddp", "no_shard")),
        recompute=RecomputeSettings(),
        batch=BatchSettings(1, 8),
    )
    return step_timeline(settings, 0)


@pytest.mark.parametrize("strategy", MEASURED)
def test_phases_agree_with_the_measurement(strategy: str) -> None:
    wrap, optimizer, first, first_step, second, second_step, persistent = MEASURED[strategy]
    phases = {p.name: p for p in _timeline(strategy).timeline.phases()}
    assert phases["model_build"].allocated_bytes == pytest.approx(wrap, rel=0.001)
    assert phases["optimizer_build"].allocated_bytes == pytest.approx(optimizer, rel=0.001)
    assert phases["steady_optimizer_step"].allocated_bytes == pytest.approx(persistent, rel=0.002)
    for name, peak, tolerance in (
        ("first_forward_backward", first, 0.005),
        ("first_optimizer_step", first_step, 0.03),
        ("steady_forward_backward", second, 0.005),
        ("steady_optimizer_step", second_step, 0.03),
    ):
        assert phases[name].peak_bytes == pytest.approx(peak, rel=tolerance), name


@pytest.mark.parametrize("strategy", MEASURED)
def test_resident_states_agree_with_the_formulas(strategy: str) -> None:
    """Gathered non-unit weights are no states here: they are counted as gathered parameters."""
    states = _timeline(strategy).resident_state_bytes
    assert states == pytest.approx(PARAMETERS * BYTES_PER_PARAMETER[strategy], rel=0.01)


@pytest.mark.parametrize("strategy", MEASURED)
def test_components_add_up_to_the_peak(strategy: str) -> None:
    timeline = _timeline(strategy).timeline
    for phase in timeline.phases():
        assert sum(timeline.components_at_peak(phase).values()) == phase.peak_bytes
