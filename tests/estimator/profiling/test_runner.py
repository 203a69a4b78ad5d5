"""A run that fails is a record, with a fake training step."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from estimator.profiling import run_one, runner

from .jobs import small_job


class OutOfMemoryError(RuntimeError):
    """As torch names it."""


@pytest.fixture
def step(monkeypatch):
    """Replaces the training step; the test says what it does."""

    def replace_by(action):
        monkeypatch.setattr(runner, "_train", action)
        monkeypatch.setattr(runner, "_set_environment", lambda _job: None)
        monkeypatch.setattr(runner, "_device", lambda _device: nullcontext())

    return replace_by


def test_running_out_of_memory_is_kept_with_its_text_and_what_was_reached(step):
    def train(job, meter, result, device):
        result["phases"].append(meter.end("model_build"))
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    step(train)
    record = run_one(small_job(), memory_cap=2**30, device="cpu")
    assert record["outcome"] == "oom"
    assert record["out_of_memory"].startswith("CUDA out of memory")
    assert record["memory_cap_bytes"] == 2**30
    assert [phase["name"] for phase in record["phases"]] == ["model_build"]
    assert record["at_failure"]["name"] == "failure"
    assert record["error"] is None


def test_another_failure_is_an_error_with_its_traceback(step):
    def train(job, meter, result, device):
        raise ValueError("hidden_size must divide")

    step(train)
    record = run_one(small_job(), device="cpu")
    assert record["outcome"] == "error"
    assert "hidden_size must divide" in record["error"]
    assert Path(__file__).name in record["error"]


def test_arguments_win_over_the_job(step):
    seen = []
    step(lambda job, *_rest: seen.append(job))
    record = run_one(small_job(), simulate_world=64, rank=9, iterations=4, exclusive=True, device="cpu")
    assert record["outcome"] == "ok"
    assert (record["world_size"], record["rank"], record["exclusive"]) == (64, 9, True)
    assert seen[0].iterations == 4
    assert seen[0].settings.parallel.world_size == 64


def test_a_rehearsal_measures_nothing(step):
    def train(job, meter, result, device):
        result["phases"].append(meter.end("model_build"))

    step(train)
    record = run_one(small_job(), device="cpu")
    assert record["method"] == "rehearsal"
    assert record["peak_allocated_bytes"] is None
    assert record["phases"][0]["allocated_bytes"] is None
