"""Jobs with experts and latent attention: parameters of public models, and what must hold of any timeline."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from estimator.answers import estimate_answer
from estimator.errors import JobError
from estimator.imbalance import stops_fitting_at, with_load_imbalance
from estimator.job.settings import MlaSettings, ModelSettings, MoeSettings, RecomputeSettings, Settings
from estimator.model.dispatch_buffers import dispatch_buffer_bytes, hybrid_ep_bytes
from estimator.model.dispatchers import distinct_rows
from estimator.model.parameters import stage_parameters
from estimator.requests import ClusterRequest, EstimateRequest, JobRequest
from estimator.search.bound import lower_bound
from estimator.step import steady_peak, step_timeline
from estimator.timeline import EMPTY_CACHE_OP
from tests.estimator.kinds import LATENTS, job_of, model_of, moe_of

WHOLE = (1, 1, 1)
DEEPSEEK = {"share_embeddings_and_output_weights": False, "qk_layernorm": True, "seq_length": 4096, "kv_channels": 128}
PUBLIC = {
    # Parameters as counted from the published checkpoints' tensors (Hugging Face model cards, without MTP layers).
    "DeepSeek-V2-Lite": (
        15_706_484_224 + 27 * 2048,  # Megatron-Core norms the query projection's input once more
        ModelSettings(
            27,
            2048,
            10944,
            16,
            16,
            vocab_size=102400,
            mla=MlaSettings(None, 512, 128, 64, 128),
            moe=MoeSettings(64, 1408, 6, (0,) + (1,) * 26, shared_size=2816),
            **DEEPSEEK,
        ),
    ),
    "DeepSeek-V3": (
        671_026_404_352,
        ModelSettings(
            61,
            7168,
            18432,
            128,
            128,
            vocab_size=129280,
            mla=MlaSettings(1536, 512, 128, 64, 128),
            moe=MoeSettings(256, 2048, 8, (0,) * 3 + (1,) * 58, shared_size=2048),
            **DEEPSEEK,
        ),
    ),
    "Qwen3-30B-A3B": (
        30_532_122_624,
        ModelSettings(48, 2048, 6144, 32, 4, vocab_size=151936, moe=MoeSettings(128, 768, 8, (1,) * 48), **DEEPSEEK),
    ),
    "Qwen3-235B-A22B": (
        235_093_634_560,
        ModelSettings(94, 4096, 12288, 64, 4, vocab_size=151936, moe=MoeSettings(128, 1536, 8, (1,) * 94), **DEEPSEEK),
    ),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_parameters_of_public_models(name: str) -> None:
    expected, model = PUBLIC[name]
    parameters = stage_parameters(model, WHOLE, model.num_layers, True, True)
    assert sum(p.num_elements for p in parameters) == expected


@pytest.mark.parametrize("split", [(1, 4, 1), (2, 4, 2), (2, 8, 1)])
def test_every_weight_is_on_some_rank(split: tuple[int, int, int]) -> None:
    """What the ranks of all splits hold adds up to the model; vectors and down projections are on each rank."""
    model = model_of(LATENTS, moe=moe_of())
    t, ep, etp = split
    whole = {(p.layer, p.name): p.num_elements for p in stage_parameters(model, WHOLE, 4, True, True)}
    here = stage_parameters(model, split, 4, True, True)
    routed = sum(p.num_elements for p in here if p.is_routed)
    assert routed * ep * etp == sum(n for (_, name), n in whole.items() if name.startswith("expert_fc"))
    for p in here:
        if not p.is_routed:
            assert whole[p.layer, p.name] in (p.num_elements, p.num_elements * t)


def _allocated(settings: Settings, rank: int = 0) -> dict[str, tuple[int, int]]:
    return {p.name: (p.allocated_bytes, p.peak_bytes) for p in step_timeline(settings, rank).timeline.phases()}


EXPERTS = {
    "plain": {},
    "nothing fused": {"permute_fusion": False, "router_fusion": False, "router_dtype": "bfloat16"},
    "gate": {"shared_gate": True},
    "overlap": {"shared_overlap": True},
    "overlap and gate": {"shared_overlap": True, "shared_gate": True},
    "no shared": {"shared_size": 0, "aux_losses": 0, "expert_bias": True, "force_load_balancing": True},
    "latent": {"latent_size": 256},
    "HybridEP": {"dispatcher": "hybridep", "shared_overlap": True},
    "HybridEP, BF16 router": {"dispatcher": "hybridep", "router_dtype": "bfloat16", "latent_size": 256},
    "DeepEP": {"dispatcher": "deepep"},
    "DeepEP, nothing fused": {"dispatcher": "deepep", "permute_fusion": False, "router_fusion": False},
}
LAYOUTS = {
    "EP 8": {"expert_model_parallel_size": 8},
    "one expert a rank": {"expert_model_parallel_size": 16, "world": 16},
    "EP 1": {},
    "TP 2": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 4},
    "ETP 2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
    },
}
MODULES = ((), ("core_attn",), ("moe",), ("moe_act", "layernorm"), ("shared_experts", "mla_up_proj"), ("mlp", "moe"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("experts", EXPERTS)
def test_an_iteration_leaves_nothing_behind(experts: str, layout: str) -> None:
    for modules, mla, fused in itertools.product(MODULES, (None, LATENTS), (True, False)):
        model = model_of(
            mla,
            moe=moe_of(**EXPERTS[experts]),
            bias_activation_fusion=fused,
            apply_rope_fusion=fused,
            gradient_accumulation_fusion=fused,
        )
        _assert_clean(job_of(model, modules=modules, **LAYOUTS[layout]))


@pytest.mark.parametrize("strategy", ["ddp", "no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_an_iteration_leaves_nothing_behind_under_any_strategy(strategy: str) -> None:
    model = model_of(LATENTS, moe=moe_of())
    _assert_clean(job_of(model, strategy, expert_model_parallel_size=4))
    full = RecomputeSettings("full", "uniform", 1)
    _assert_clean(job_of(model, strategy, expert_model_parallel_size=4, recompute=full))


@pytest.mark.parametrize("rank", [0, 1])
def test_pipelines_leave_nothing_behind(rank: int) -> None:
    model = model_of(LATENTS, moe=moe_of())
    settings = job_of(model, pipeline_model_parallel_size=2, expert_model_parallel_size=4)
    _assert_clean(settings, rank, left=True)
    interleaved = replace(settings.parallel, virtual_pipeline_model_parallel_size=2)
    _assert_clean(replace(settings, parallel=interleaved), rank, left=True)


def _assert_clean(settings: Settings, rank: int = 0, left: bool = False) -> None:
    """Every buffer of forward and backward is freed in its scope, and the steady step ends where the first one did.

    ``left``: the schedule keeps tensors that stages have exchanged.
    """
    step = step_timeline(settings, rank)
    live: dict[tuple[object, ...], int] = {}
    for _, scope, op in step.timeline.ops():
        if op.num_bytes and op.name != EMPTY_CACHE_OP:
            key = (op.component, op.stream)
            live[key] = live.get(key, 0) + op.num_bytes
            assert live[key] >= 0, (op, scope)
    phases = {p.name: p for p in step.timeline.phases()}
    first, steady = phases["first_optimizer_step"], phases["steady_optimizer_step"]
    assert first.allocated_bytes == steady.allocated_bytes
    kept = ("activations_router", "default")  # of the last microbatch, in each dispatcher
    activations = sum(n for key, n in live.items() if key[0].startswith("activation") and key != kept)
    assert left or activations == 0


@pytest.mark.parametrize("depths", [1, 2])
@pytest.mark.parametrize("layout", ["EP 8", "TP 2"])
def test_prediction_leaves_nothing_behind(layout: str, depths: int) -> None:
    for fused, recompute in itertools.product((True, False), (None, RecomputeSettings("full", "uniform", 1))):
        model = model_of(
            LATENTS,
            moe=moe_of(),
            mtp_num_layers=depths,
            gradient_accumulation_fusion=fused,
            cross_entropy_fusion_impl="te" if fused else "native",
        )
        _assert_clean(job_of(model, recompute=recompute, **LAYOUTS[layout]))
        piped = {**LAYOUTS[layout], "expert_model_parallel_size": 4, "pipeline_model_parallel_size": 2}
        for rank in (0, 1):
            _assert_clean(job_of(model, recompute=recompute, **piped), rank, left=True)


def test_prediction_keeps_all_logits_and_one_more_layer() -> None:
    model = model_of(LATENTS, moe=moe_of(), cross_entropy_fusion_impl="te")
    predicting = replace(model, mtp_num_layers=1)
    parallel = {"expert_model_parallel_size": 8}
    without, with_one = (_allocated(job_of(m, "ddp", **parallel)) for m in (model, predicting))
    logits = 2048 * 32000 * 2
    more = with_one["steady_forward_backward"][1] - without["steady_forward_backward"][1]
    states = with_one["steady_optimizer_step"][0] - without["steady_optimizer_step"][0]
    assert more - states >= logits
    plain, predicted = (stage_parameters(m, (1, 8, 1), 4, True, True) for m in (model, predicting))
    last_layer = sum(p.num_elements for p in plain if p.layer == 3)
    extra = sum(p.num_elements for p in predicted) - sum(p.num_elements for p in plain)
    assert extra == last_layer + 2 * 512 * 512 + 3 * 512
    first, last = (stage_parameters(predicting, (1, 8, 1), 2, pre, not pre) for pre in (True, False))
    assert [p.name for p in last].count("word_embeddings") == [p.name for p in first].count("word_embeddings") == 1


def test_tokens_arrive_once_under_deepep() -> None:
    """With all experts on one rank every token arrives; with k of E chosen evenly, the usual share."""
    moe = moe_of(num_experts=16, topk=4)
    assert distinct_rows(moe, 16, 1000) == 1000
    assert distinct_rows(moe, 1, 1000) == 1000 * 4 // 16
    assert distinct_rows(replace(moe, num_groups=4, group_topk=1), 4, 1000) == 250
    assert distinct_rows(moe, 4, 1000) == int(1000 * (1 - (12 * 11 * 10 * 9) / (16 * 15 * 14 * 13)))


def test_buffers_beside_torch() -> None:
    """HybridEP: two bytes an element for the tokens of all ranks come first; more nodes, more buffers. DeepEP: its
    buffers do not depend on the number of tokens."""
    hybrid = model_of(None, moe=moe_of(dispatcher="hybridep"))
    parallel = {"expert_model_parallel_size": 8}
    small = dispatch_buffer_bytes(job_of(hybrid, **parallel))
    tokens = 8 * 2048 * (512 * 2 + 2 * 8 * 4 + 4 * 4 + 16)
    assert small == tokens
    assert dispatch_buffer_bytes(job_of(hybrid, micro_batch_size=2, **parallel)) == 2 * small
    assert hybrid_ep_bytes(16, 8, 2048, 512, 1) > hybrid_ep_bytes(16, 16, 2048, 512, 1)
    deep = model_of(None, moe=moe_of(dispatcher="deepep"))
    one, two = (dispatch_buffer_bytes(job_of(deep, micro_batch_size=b, **parallel)) for b in (1, 2))
    assert one == two > 32 * 1024 * 1024
    assert dispatch_buffer_bytes(job_of(model_of(None, moe=moe_of()), **parallel)) == 0


@pytest.mark.parametrize("strategy", ["ddp", "distopt", "optim_grads_params"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bounds_are_below_the_peak(layout: str, strategy: str) -> None:
    for modules, mla in itertools.product(MODULES, (None, LATENTS)):
        model = model_of(mla, moe=moe_of(), mtp_num_layers=1 if strategy == "distopt" else 0)
        settings = job_of(model, strategy, modules=modules, **LAYOUTS[layout])
        peak = max(phase[1] for phase in _allocated(settings).values())
        steady = steady_peak(settings, 0)
        assert lower_bound(settings) <= steady <= peak


def test_more_recompute_saves_less() -> None:
    model = model_of(LATENTS, moe=moe_of(pattern=(1,) * 4))
    parallel = {"expert_model_parallel_size": 8}

    def saved(**recompute: object) -> int:
        settings = job_of(model, micro_batch_size=4, **parallel, **recompute)
        entries = step_timeline(settings, 0).timeline.entries
        forwards = [e.block for e in entries if e.block.name.startswith("layer.forward")]
        return forwards[-1].delta

    full = saved(recompute=RecomputeSettings("full", "block", 3))
    nothing = saved()
    for modules in MODULES[1:]:
        assert full <= nothing
        assert saved(modules=modules) < nothing, modules
    assert saved(modules=("moe",)) < saved(modules=("moe_act",))


def test_more_shards_hold_less_and_imbalance_more() -> None:
    model = model_of(LATENTS, moe=moe_of())
    sizes = [step_timeline(job_of(model, world=16, expert_model_parallel_size=ep), 0) for ep in (1, 2, 4, 8, 16)]
    resident = [s.resident_state_bytes for s in sizes]
    assert resident == sorted(resident, reverse=True)
    peaks = [
        _allocated(job_of(model, imbalance=imbalance, expert_model_parallel_size=8))["steady_forward_backward"][1]
        for imbalance in (1.0, 1.5, 3.0)
    ]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1]
    alone = [job_of(model, imbalance=imbalance) for imbalance in (1.0, 3.0)]
    assert _allocated(alone[0]) == _allocated(alone[1])


def test_experts_are_sharded_over_expert_data_parallel_ranks() -> None:
    """Section M of the rules: 18 bytes a dense parameter split over DP, experts over DP / EP alone."""
    model = model_of(None, layers=1, moe=moe_of(pattern=(1,), shared_size=0))
    settings = job_of(model, world=16, expert_model_parallel_size=8)
    parameters = stage_parameters(model, (1, 8, 1), 1, True, True)
    routed = sum(p.num_elements for p in parameters if p.is_routed)
    dense = sum(p.num_elements for p in parameters) - routed
    expected = dense * (6 + 12 / 16) + routed * (6 + 12 / 2)
    assert step_timeline(settings, 0).resident_state_bytes == pytest.approx(expected, rel=2e-3)


def test_the_answer_says_at_which_imbalance_the_job_stops_fitting() -> None:
    def answer(gpus: int, imbalance: float | None = None) -> dict[str, Any]:
        job = JobRequest("deepseek_v2_lite_pretrain_8gpu_h100_bf16_config", moe_load_imbalance=imbalance)
        return estimate_answer(EstimateRequest(job, ClusterRequest("h100-80gb", gpus), survival=False))

    balanced, uneven = answer(8, 1.0), answer(8, 2.0)
    assert uneven["peak_allocated_bytes"] > balanced["peak_allocated_bytes"]
    assert balanced["moe"]["load_imbalance"] == 1.0
    assert balanced["moe"]["stops_fitting_at"] == uneven["moe"]["stops_fitting_at"]
    assert any("moe_load_imbalance" in note for note in uneven["assumptions"])
    with pytest.raises(JobError):
        answer(8, 0.5)


def test_where_the_imbalance_stops_fitting_is_found() -> None:
    settings = job_of(model_of(None, moe=moe_of()), expert_model_parallel_size=8)
    assert stops_fitting_at(settings, lambda trial: trial.moe_load_imbalance < 3.3) == pytest.approx(3.3, abs=0.06)
    assert stops_fitting_at(settings, lambda trial: True) is None
    assert stops_fitting_at(settings, lambda trial: False) == 1.0
    assert with_load_imbalance(settings, None).moe_load_imbalance > 1
    assert with_load_imbalance(settings, 100).moe_load_imbalance == 8
    dense = job_of(model_of(None))
    assert with_load_imbalance(dense, 3.0) == dense


def test_experts_under_tensor_parallelism_need_sequence_parallelism() -> None:
    overrides = ("model.tensor_model_parallel_size=2", "model.sequence_parallel=false")
    job = JobRequest("deepseek_v2_lite_pretrain_8gpu_h100_bf16_config", overrides=overrides)
    answer = estimate_answer(EstimateRequest(job, ClusterRequest("h100-80gb", 8), survival=False))
    assert "L11" in [problem["rule_id"] for problem in answer["problems"]]
    assert answer["peak_allocated_bytes"] is None
