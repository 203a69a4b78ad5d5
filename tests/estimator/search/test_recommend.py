"""The search: its order is DESIGN's meaning of cheaper, and leaving candidates out loses none that fits."""

from __future__ import annotations

import pytest

from estimator.answers import recommend_answer
from estimator.changes import apply_changes
from estimator.cluster import Cluster, resolve_cluster
from estimator.errors import JobError
from estimator.estimate import estimate
from estimator.job.settings import Stack
from estimator.reading import ReadJob, read_job, read_values
from estimator.requests import ClusterRequest, JobRequest, RecommendRequest
from estimator.search import search
from estimator.search.changes import point_changes
from estimator.search.cost import step_cost
from estimator.search.recommend import _order, resumes
from estimator.search.space import current_point, points, variant

FAMILIES = frozenset({"allocator", "dp_strategy", "recompute", "micro_batch", "fsdp_buffers", "cross_entropy"})


def _job(
    recipe: str, num_gpus: int, *overrides: str, gpu: str = "h100-80gb", limit: int | None = None
) -> tuple[ReadJob, Cluster]:
    cluster = resolve_cluster(ClusterRequest(gpu, num_gpus, memory_limit_bytes=limit))
    return read_job(JobRequest(recipe, overrides=overrides), cluster, Stack()), cluster


@pytest.mark.parametrize(
    ("recipe", "num_gpus", "overrides", "limit_gib"),
    [
        ("llama3_8b_pretrain_config", 8, ("model.context_parallel_size=1",), None),
        ("llama3_8b_pretrain_config", 16, ("train.micro_batch_size=2",), 50),
        ("llama32_1b_pretrain_config", 4, (), 24),
        ("qwen3_8b_pretrain_config", 8, (), 40),
        ("llama3_8b_pretrain_config", 8, ("mixed_precision=bf16_with_fp8_current_scaling_mixed",), 70),
        (
            "llama3_8b_pretrain_config",
            8,
            (
                "model.context_parallel_size=1",
                "model.pipeline_model_parallel_size=2",
                "model.pipeline_dtype=bfloat16",
                "model.virtual_pipeline_model_parallel_size=4",
            ),
            48,
        ),
        ("deepseek_v2_lite_pretrain_8gpu_h100_bf16_config", 8, (), 38),
        ("qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config", 8, (), 76),
    ],
)
def test_the_winner_is_that_of_exhaustive_evaluation(
    recipe: str, num_gpus: int, overrides: tuple[str, ...], limit_gib: int | None
) -> None:
    job, cluster = _job(recipe, num_gpus, *overrides, limit=limit_gib * 2**30 if limit_gib else None)
    found = search(job, cluster, Stack(), FAMILIES, 0.99, 1)
    now = current_point(job.settings)
    candidates = list(points(job.settings, cluster.gpus_per_node, FAMILIES))
    cost = step_cost(job.settings, candidates, cluster.gpu, cluster.gpus_per_node)
    order = _order(candidates, cost.total / cost.total[0], now, resumes(job.effective.values))
    for index in order:
        if candidates[index] == now:
            continue
        changes = point_changes(candidates[index], now, job.document.values, job.effective.values, cluster, Stack())
        changed = read_values(apply_changes(job.document.values, changes), job.document, cluster, Stack())
        if changed.errors or not changed.laid_out:
            continue
        if estimate(changed.settings, cluster).verdict.fits:
            assert found.fitting
            assert found.fitting[0].point == candidates[index]
            return
    assert not found.fitting


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("llama3_8b_pretrain_config", ("model.context_parallel_size=1",)),
        ("deepseek_v2_lite_pretrain_8gpu_h100_bf16_config", ()),
        ("qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config", ("model.expert_model_parallel_size=4",)),
    ],
)
def test_a_candidates_settings_are_those_it_was_costed_for(recipe: str, overrides: tuple[str, ...]) -> None:
    """``variant`` (for cost and bounds) and what the override really gives agree on what memory depends on."""
    job, cluster = _job(recipe, 8, *overrides)
    now = current_point(job.settings)
    for point in list(points(job.settings, cluster.gpus_per_node, FAMILIES | {"layout"}))[::7]:
        changes = point_changes(point, now, job.document.values, job.effective.values, cluster, Stack())
        changed = read_values(apply_changes(job.document.values, changes), job.document, cluster, Stack())
        if changed.errors or not changed.laid_out:
            continue
        trial = variant(job.settings, point)
        assert trial.parallel == changed.settings.parallel
        assert trial.batch == changed.settings.batch
        assert trial.recompute.recompute_granularity == changed.settings.recompute.recompute_granularity
        assert trial.sharding.strategy == changed.settings.sharding.strategy
        if trial.sharding.is_megatron_fsdp:
            assert trial.sharding.main_grads_dtype == changed.settings.sharding.main_grads_dtype


def _recommend(recipe: str, num_gpus: int, *overrides: str, gpu: str = "h100-80gb") -> dict[str, object]:
    return recommend_answer(RecommendRequest(JobRequest(recipe, overrides=overrides), ClusterRequest(gpu, num_gpus)))


def test_the_first_example_is_answered() -> None:
    answer = _recommend("llama3_8b_pretrain_config", 2)
    assert answer["outcome"] == "recommended"
    assert not answer["current"]["fits"]  # type: ignore[index]
    first, *_, last = answer["recommendations"]  # type: ignore[misc]
    assert first["estimate"]["fits"]
    assert first["fit_probability"] >= 0.99
    fsdp = last["override"]["python"]
    for line in (
        "cfg.dist.use_megatron_fsdp = True",
        "cfg.ddp.use_megatron_fsdp = True",
        'cfg.ddp.data_parallel_sharding_strategy = "optim_grads_params"',
        "cfg.ddp.average_in_collective = False",
        'cfg.checkpoint.ckpt_format = "fsdp_dtensor"',
        "cfg.ddp.megatron_fsdp_main_grads_dtype = torch.float32",
    ):
        assert line in fsdp.splitlines()
    assert last["checkpoint"]["conversion_needed"]


def test_gradients_stay_in_fp32() -> None:
    for recommendation in _recommend("llama3_8b_pretrain_config", 8, "model.context_parallel_size=1")[
        "recommendations"
    ]:  # type: ignore[attr-defined]
        families = {change["family"] for change in recommendation["changes"]}
        assert not families & {"gradient_precision", "optimizer_precision"}


def test_a_job_that_fits_is_told_so() -> None:
    answer = _recommend("llama32_1b_pretrain_config", 8)
    assert answer["outcome"] == "fits_already"
    assert answer["recommendations"] == []


def test_broken_rules_are_repaired() -> None:
    """FSDP with a torch_dist checkpoint and a pipeline: Bridge, or the model build, refuses it."""
    answer = _recommend(
        "llama3_8b_pretrain_config",
        8,
        "model.context_parallel_size=1",
        "dist.use_megatron_fsdp=true",
        "ddp.data_parallel_sharding_strategy=optim_grads_params",
    )
    assert {p["rule_id"] for p in answer["problems"]} >= {"A7"}  # type: ignore[index, attr-defined]
    assert answer["outcome"] == "recommended"
    for recommendation in answer["recommendations"]:  # type: ignore[attr-defined]
        assert not [p for p in recommendation["estimate"]["problems"] if p["severity"] == "error"]


def test_a_job_that_cannot_be_laid_out_gets_a_layout_that_can() -> None:
    """TP 8 x PP 4 on 16 GPUs: rule A18; there is nothing to estimate, but there are layouts that fit."""
    answer = _recommend("qwen25_72b_pretrain_config", 16, gpu="b200")
    assert answer["current"] is None
    assert "A18" in {p["rule_id"] for p in answer["problems"]}  # type: ignore[index, attr-defined]
    assert answer["outcome"] == "recommended"
    assert all(r["estimate"]["fits"] for r in answer["recommendations"])  # type: ignore[attr-defined]


def test_nothing_fits_says_by_how_much_and_what_would() -> None:
    answer = _recommend(
        "qwen25_72b_pretrain_config", 4, "model.tensor_model_parallel_size=4", "model.pipeline_model_parallel_size=1"
    )
    assert answer["outcome"] == "nothing_fits"
    facts = answer["nothing_fits"]
    assert facts["missing_bytes"] > 0  # type: ignore[index]
    assert facts["num_gpus_that_fit"] is None or facts["num_gpus_that_fit"] > 4  # type: ignore[index]
    assert "Nothing fits" in answer["diagnosis"]["summary"]  # type: ignore[index]


def test_the_answer_is_deterministic() -> None:
    assert _recommend("llama3_8b_pretrain_config", 2) == _recommend("llama3_8b_pretrain_config", 2)


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("cluster.gpu", RecommendRequest(JobRequest("llama3_8b_pretrain_config"), ClusterRequest("h1000", 8))),
        ("cluster.num_gpus", RecommendRequest(JobRequest("llama3_8b_pretrain_config"), ClusterRequest("h100-80gb", 0))),
        (
            "constraints.allow",
            RecommendRequest(JobRequest("llama3_8b_pretrain_config"), ClusterRequest("h100-80gb", 8), allow=("magic",)),
        ),
    ],
)
def test_impossible_requests_name_the_field(field: str, request_: RecommendRequest) -> None:
    with pytest.raises(JobError) as error:
        recommend_answer(request_)
    assert error.value.problems[0].path == field
