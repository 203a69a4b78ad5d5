"""The committed sets are what the committed grid and seed draw, and they cover what they must."""

from dataclasses import replace

import pytest

from estimator.profiling import expected, grid
from estimator.profiling.job import GIB, fingerprint, job_to_dict
from estimator.profiling.sweep import read_jobs

STRATEGIES = ("ddp", "distopt", "no_shard", "optim", "optim_grads", "optim_grads_params")


@pytest.fixture(scope="module")
def dense():
    return grid.load_grid("dense")


def committed(name):
    path = grid.DATA / "sweeps" / f"{name}.jsonl"
    return read_jobs(path.read_text(), str(path))


def test_the_committed_sets_begin_as_they_are_drawn(dense):
    drawn = grid.draw(replace(dense, sizes={"check": 4}))["check"]
    assert [job_to_dict(job) for job in drawn] == [job_to_dict(job) for job in committed("dense_check")[:4]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "kinds"])
def test_the_committed_sets_are_drawn_from_the_grid(name):
    for part, jobs in grid.draw(grid.load_grid(name)).items():
        assert [job_to_dict(job) for job in jobs] == [job_to_dict(job) for job in committed(f"{name}_{part}")]


@pytest.mark.parametrize("name", ["dense", "kinds"])
def test_check_and_fit_share_no_run(name):
    check, fit = ({fingerprint(job) for job in committed(f"{name}_{part}")} for part in ("check", "fit"))
    assert len(check) >= 60
    assert len(fit) >= 60
    assert not check & fit


@pytest.mark.parametrize("name", ["dense_check", "dense_fit"])
def test_every_group_is_covered(name):
    jobs = committed(name)
    for strategy in STRATEGIES:
        assert sum(job.settings.sharding.strategy == strategy for job in jobs) >= 5
    for size in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        assert sum(getattr(job.settings.parallel, size) > 1 for job in jobs) >= 5
    for kind in ("none", "full_uniform", "full_block", "core_attn", "layernorm", "mlp", "core_attn+layernorm"):
        assert sum(kind in job.tags for job in jobs) >= 5
    stages = {expected.pipeline_stage(j.settings, j.rank) for j in jobs}
    assert len(stages) >= 3


@pytest.mark.parametrize("name", ["kinds_check", "kinds_fit"])
def test_every_kind_is_covered(name):
    jobs = committed(name)
    for start in ("vp", "ep", "mla", "fp8", "graphs", "hsdp"):
        assert sum(any(tag.startswith(start) for tag in job.tags) for job in jobs) >= 5
    for kind in grid.load_grid("kinds").kinds:
        assert sum(kind in job.tags for job in jobs) >= 2


@pytest.mark.parametrize("name", ["dense_check", "dense_fit", "dense_survival", "kinds_check", "kinds_fit"])
def test_every_run_is_small_enough(name):
    for job in committed(name):
        assert expected.expected_bytes(job) < 40 * GIB
        assert 0 <= job.rank < job.settings.parallel.world_size
        assert 2 <= job.settings.parallel.world_size <= 1024


def test_survival_covers_the_strategies():
    jobs = committed("dense_survival")
    assert len(jobs) == 12
    assert {job.settings.sharding.strategy for job in jobs} == set(STRATEGIES)


def test_the_grid_is_enumerated_without_what_cannot_run(dense):
    varied = ("strategy", "pipeline_model_parallel_size", "stage", "gradient_accumulation_fusion")
    axes = {axis: values if axis in varied else values[:1] for axis, values in dense.axes.items()}
    axes.update(num_layers=(4,), num_microbatches=(2,), data_parallel_size=(8,))
    points = list(grid.enumerate_grid(replace(dense, axes=axes)))
    assert {point["strategy"] for point in points} == set(STRATEGIES)
    assert all(not grid.objections(dense, point) for point in points)
    assert all(
        point["pipeline_model_parallel_size"] == 1 for point in points if point["strategy"] not in ("ddp", "distopt")
    )
    pipelined = {**points[0], "strategy": "optim_grads_params", "pipeline_model_parallel_size": 2, "stage": "last"}
    assert any("B1" in text for text in grid.objections(dense, pipelined))
    fused = {**points[0], "strategy": "optim", "gradient_accumulation_fusion": True}
    assert any("B10" in text for text in grid.objections(dense, fused))


@pytest.mark.parametrize(("rank", "stage"), [(0, 0), (7, 0), (8, 1), (31, 3)])
def test_stage_of_a_rank(rank, stage):
    job = committed("dense_check")[0]
    parallel = replace(job.settings.parallel, world_size=32, pipeline_model_parallel_size=4)
    assert expected.pipeline_stage(replace(job.settings, parallel=parallel), rank) == stage
