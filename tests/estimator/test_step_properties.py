"""What must hold for every job that the timeline can be made for."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimator.allocator.trace import compile_ops
from estimator.components import ACTIVATIONS
from estimator.job.settings import (
    BatchSettings,
    Fp8Settings,
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    RecomputeSettings,
    Settings,
    ShardingSettings,
)
from estimator.layout import stage_shares
from estimator.search.bound import lower_bound
from estimator.step import steady_peak, step_timeline
from estimator.step.compose import _Composer, _CountingComposer

STRATEGIES = ("ddp", "distopt", "no_shard", "optim", "optim_grads", "optim_grads_params")


@st.composite
def layouts(draw: st.DrawFn, num_layers: int, num_stages: int) -> str:
    """Any deal of the layers to stages, also stages with none."""
    cuts = sorted(draw(st.lists(st.integers(0, num_layers), min_size=num_stages - 1, max_size=num_stages - 1)))
    counts = [b - a for a, b in itertools.pairwise([0, *cuts, num_layers])]
    return "E" + "|".join("t" * n for n in counts) + "L"


@st.composite
def fp8_settings(draw: st.DrawFn, primary: bool, sequence_parallel: bool) -> Fp8Settings:
    recipes = ("delayed", "tensorwise") if sequence_parallel else ("delayed", "tensorwise", "blockwise")
    ends = draw(st.sampled_from((0, 1)))
    return Fp8Settings(draw(st.sampled_from(recipes)), primary and draw(st.booleans()), ends, ends)


@st.composite
def jobs(draw: st.DrawFn) -> Settings:
    strategy = draw(st.sampled_from(STRATEGIES))
    fsdp = strategy not in ("ddp", "distopt")
    tensor, context = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2)))
    pipeline = 1 if fsdp else draw(st.sampled_from((1, 2, 4)))
    data = draw(st.sampled_from((1, 2, 8)))
    instances, outer = draw(st.sampled_from(((1, "no_shard"), (2, "no_shard"), (2, "optim"))))
    sequence_parallel = tensor > 1 and draw(st.booleans())
    num_layers = 8
    chunks = draw(st.sampled_from((1, 2))) if pipeline > 1 else 1
    layout = draw(st.none() | layouts(num_layers, pipeline * chunks)) if pipeline > 1 else None
    micro_batches = draw(st.sampled_from((1, 2, 3))) * pipeline if chunks > 1 else draw(st.sampled_from((1, 2, 5)))
    micro = draw(st.sampled_from((1, 2)))
    glu = draw(st.booleans())
    rope = draw(st.booleans())
    return Settings(
        model=ModelSettings(
            num_layers=num_layers,
            hidden_size=1024,
            ffn_hidden_size=2816,
            num_attention_heads=16,
            num_query_groups=draw(st.sampled_from((4, 8, 16))),
            kv_channels=64,
            vocab_size=32000,
            seq_length=2048,
            normalization=draw(st.sampled_from(("RMSNorm", "LayerNorm"))),
            gated_linear_unit=glu,
            activation_func="silu" if glu else "gelu",
            add_bias_linear=draw(st.booleans()),
            qk_layernorm=draw(st.booleans()),
            share_embeddings_and_output_weights=draw(st.booleans()),
            position_embedding_type="rope" if rope else "learned_absolute",
            apply_rope_fusion=draw(st.booleans()),
            bias_activation_fusion=draw(st.booleans()),
            hidden_dropout=draw(st.sampled_from((0.0, 0.1))),
            cross_entropy_loss_fusion=draw(st.booleans()),
            cross_entropy_fusion_impl=draw(st.sampled_from(("te", "native"))),
            fp8=draw(st.none() | fp8_settings(strategy == "distopt", sequence_parallel)),
            gradient_accumulation_fusion=draw(st.booleans()),
            init_model_with_meta_device=fsdp and strategy != "no_shard" and draw(st.booleans()),
        ),
        parallel=ParallelSettings(
            data * tensor * pipeline * context,
            tensor,
            pipeline,
            context,
            sequence_parallel=sequence_parallel,
            virtual_pipeline_model_parallel_size=chunks,
            pipeline_model_parallel_layout=layout,
            overlap_p2p_comm=chunks > 1 and draw(st.booleans()),
        ),
        sharding=ShardingSettings(
            strategy,
            bucket_size=draw(st.sampled_from((None, 1_000_000, 40_000_000))),
            main_grads_dtype=draw(st.sampled_from((None, "float32"))) if fsdp else None,
            grad_reduce_in_fp32=draw(st.booleans()),
            suggested_communication_unit_size=draw(st.sampled_from((None, 10_000_000))) if fsdp else None,
            fsdp_double_buffer=fsdp and draw(st.booleans()),
            num_distributed_optimizer_instances=1 if data * context % 2 or strategy == "ddp" else instances,
            outer_dp_sharding_strategy=outer,
        ),
        optimizer=OptimizerSettings(),
        recompute=draw(
            st.sampled_from(
                (
                    RecomputeSettings(),
                    RecomputeSettings("selective", recompute_modules=("core_attn",)),
                    RecomputeSettings("selective", recompute_modules=("mlp", "core_attn")),
                    RecomputeSettings("full", "uniform", 1),
                    RecomputeSettings("full", "uniform", 3),
                    RecomputeSettings("full", "block", 1),
                )
            )
        ),
        batch=BatchSettings(micro, micro * data * micro_batches),
    )


@settings(max_examples=150, deadline=None)
@given(jobs())
def test_every_timeline_is_consistent(job: Settings) -> None:
    for share in stage_shares(job.model, job.parallel):
        timeline = step_timeline(job, share.pipeline_rank).timeline
        running = 0
        for _, _, op in timeline.ops():
            running += op.num_bytes
            assert running >= 0
        phases = {p.name: p for p in timeline.phases()}
        worst = max(phases.values(), key=lambda p: p.peak_bytes)
        components = timeline.components_at_peak(worst)
        assert sum(components.values()) == worst.peak_bytes
        assert all(n > 0 for n in components.values())
        # a step leaves no activation behind, and a second step ends where the first one ended
        end = phases["steady_optimizer_step"].allocated_bytes
        assert end == phases["first_optimizer_step"].allocated_bytes
        assert steady_peak(job, share.pipeline_rank) <= worst.peak_bytes


@settings(max_examples=100, deadline=None)
@given(jobs())
def test_counting_and_writing_down_agree(job: Settings) -> None:
    """The search's counter runs the same composer and strategy as the timeline."""
    for share in stage_shares(job.model, job.parallel):
        found = []
        for kind in (_Composer, _CountingComposer):
            composer = kind(job, share, "hopper")
            composer.build()
            composer.leave_first_iteration()
            composer.iteration("steady", first=False)
            found.append(composer)
        written, counted = found
        assert isinstance(counted, _CountingComposer)
        steady = written.timeline.phases()[-2:]
        assert counted.counter.peak == max(p.peak_bytes for p in steady)
        assert counted.counter.running == steady[-1].allocated_bytes


@settings(max_examples=100, deadline=None)
@given(jobs())
def test_the_searchs_bound_is_a_bound(job: Settings) -> None:
    peaks = [
        max(p.peak_bytes for p in step_timeline(job, share.pipeline_rank).timeline.phases())
        for share in stage_shares(job.model, job.parallel)
    ]
    assert lower_bound(job) <= max(peaks)


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_more_shards_never_hold_more_states(job: Settings) -> None:
    """Up to padding: groups are padded to whole rows a shard."""
    p = job.parallel
    more = replace(job, parallel=replace(p, world_size=p.world_size * 2))
    before, after = (step_timeline(j, 0).resident_state_bytes for j in (job, more))
    assert after <= before * 1.001 + 32 * 1024**2


@pytest.mark.parametrize("strategy", ["distopt", "optim_grads_params"])
def test_more_recompute_never_saves_more_activations(strategy: str) -> None:
    model = ModelSettings(8, 4096, 14336, 32, 8, 128, 128256, 4096, cross_entropy_fusion_impl="te")
    saved = []
    for recompute in (
        RecomputeSettings(),
        RecomputeSettings("selective", recompute_modules=("mlp",)),
        RecomputeSettings("full", "uniform", 1),
    ):
        job = Settings(
            model, ParallelSettings(8), ShardingSettings(strategy), OptimizerSettings(), recompute, BatchSettings(1, 8)
        )
        timeline = step_timeline(job, 0).timeline
        phase = next(p for p in timeline.phases() if p.name == "steady_forward_backward")
        components = timeline.components_at_peak(phase)
        saved.append((phase.peak_bytes, sum(components.get(name, 0) for name in ACTIVATIONS)))
    assert [peak for peak, _ in saved] == sorted((peak for peak, _ in saved), reverse=True)


@settings(max_examples=40, deadline=None)
@given(jobs())
def test_every_buffer_is_freed_where_it_lives(job: Settings) -> None:
    """The allocator's replay follows each buffer by scope and name: it refuses frees of what is not there."""
    for share in stage_shares(job.model, job.parallel):
        for family in ("hopper", "blackwell"):
            compile_ops(step_timeline(job, share.pipeline_rank, family).timeline)
