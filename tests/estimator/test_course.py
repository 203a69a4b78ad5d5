"""The course of memory for a plot says the same as the estimate."""

from __future__ import annotations

import pytest

from estimator.answers import estimate_answer
from estimator.course import MAX_POINTS, course
from estimator.requests import ClusterRequest, EstimateRequest, JobRequest
from estimator.timeline import Timeline

JOBS = (
    ("llama3_8b_pretrain_config", 2, ()),
    ("llama3_8b_pretrain_config", 8, ("model.pipeline_model_parallel_size=2", "model.context_parallel_size=1")),
)


@pytest.mark.parametrize(("recipe", "num_gpus", "overrides"), JOBS)
def test_every_phases_peak_is_a_point(recipe: str, num_gpus: int, overrides: tuple[str, ...]) -> None:
    job = JobRequest(recipe=recipe, overrides=overrides)
    request = EstimateRequest(job, ClusterRequest("h100-80gb", num_gpus), timeline=True)
    answer = estimate_answer(request)
    points = answer["timeline"]
    assert 100 < len(points) <= MAX_POINTS
    assert [p["event"] for p in points] == sorted(p["event"] for p in points)
    highest: dict[str, int] = {}
    for point in points:
        highest[point["phase"]] = max(highest.get(point["phase"], 0), point["allocated_bytes"])
        assert point["reserved_bytes"] >= point["allocated_bytes"]
        assert sum(point["components"].values()) <= point["allocated_bytes"]
    for phase in answer["phases"]:
        if phase["peak_bytes"] > phase["allocated_bytes"]:
            assert highest[phase["name"]] == phase["peak_bytes"]
    assert max(highest.values()) == answer["peak_allocated_bytes"]


def test_points_are_bounded() -> None:
    with pytest.raises(ValueError, match="max_points"):
        course(Timeline(), "default", MAX_POINTS + 1)
