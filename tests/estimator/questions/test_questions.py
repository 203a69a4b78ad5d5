"""Capacity is the border that trying every value finds; comparisons add up and name the settings."""

from __future__ import annotations

import pytest

from estimator.errors import JobError
from estimator.questions import CAPACITY_QUESTIONS, capacity_answer, compare_answer
from estimator.questions.capacity import _asker, _micro_batches, _read
from estimator.requests import ClusterRequest, EstimateRequest, JobRequest

RECIPE = "llama3_8b_pretrain_config"


def ask(num_gpus: int, *overrides: str, gpu: str = "h100-80gb", recipe: str = RECIPE) -> EstimateRequest:
    return EstimateRequest(JobRequest(recipe=recipe, overrides=overrides), ClusterRequest(gpu, num_gpus))


@pytest.mark.parametrize("gpu", ["h100-80gb", "h200-141gb", "b300"])
def test_the_largest_micro_batch_is_the_one_that_trying_all_finds(gpu: str) -> None:
    request = ask(8, gpu=gpu)
    answer = capacity_answer(request, "micro_batch_size")
    one_by_one = _asker(request, "micro_batch_size")
    fits = [b for b in _micro_batches(_read(request).settings)[:8] if one_by_one(b).fits]
    assert answer["value"] == max(fits)
    assert answer["estimate"]["fits"] is True


def test_the_longest_sequence_has_a_longer_one_beyond_it_that_does_not_fit() -> None:
    answer = capacity_answer(ask(16), "seq_length")
    beyond = [row for row in answer["tried"] if row["value"] > answer["value"]]
    assert answer["value"] >= 8192
    assert beyond
    assert not any(row["fits"] for row in beyond)
    assert min(row["value"] for row in beyond) - answer["value"] == 256


def test_the_fewest_gpus() -> None:
    answer = capacity_answer(ask(16), "num_gpus")
    fewer = [row for row in answer["tried"] if row["value"] < answer["value"]]
    assert not any(row["fits"] for row in fewer)
    again = capacity_answer(ask(answer["value"]), "micro_batch_size")
    assert again["value"] >= 1


def test_nothing_fits_is_an_answer() -> None:
    for question in CAPACITY_QUESTIONS[:2]:
        answer = capacity_answer(ask(2), question)
        assert answer["value"] is None
        assert answer["summary"].startswith("Not even")
    with pytest.raises(JobError, match="unknown question"):
        capacity_answer(ask(2), "learning_rate")
    with pytest.raises(JobError):
        capacity_answer(ask(3), "micro_batch_size")


def test_a_comparison_names_what_was_changed() -> None:
    changed = ("train.micro_batch_size=2", "model.seq_length=16384", "dataset.seq_length=16384", "optimizer.lr=1e-5")
    answer = compare_answer(ask(16), ask(16, *changed))
    by_path = {row["path"]: row for row in answer["fields"]}
    assert set(by_path) >= {"train.micro_batch_size", "model.seq_length", "optimizer.lr"}
    assert "dataset.seq_length" not in by_path
    assert by_path["optimizer.lr"]["difference_bytes"] == 0
    assert by_path["model.seq_length"]["difference_bytes"] > 10 << 30
    assert answer["difference_bytes"] == answer["b"]["required_bytes"] - answer["a"]["required_bytes"]
    difference = answer["b"]["peak_allocated_bytes"] - answer["a"]["peak_allocated_bytes"]
    assert sum(row["difference_bytes"] for row in answer["components"]) == difference
    assert "The first fits, the second does not." in answer["summary"]


def test_one_change_alone_is_the_whole_difference() -> None:
    answer = compare_answer(ask(16), ask(16, "train.micro_batch_size=2"))
    (row,) = [r for r in answer["fields"] if r["difference_bytes"]]
    assert row["path"] == "train.micro_batch_size"
    assert row["difference_bytes"] == answer["b"]["peak_allocated_bytes"] - answer["a"]["peak_allocated_bytes"]


def test_gpus_and_equal_jobs() -> None:
    answer = compare_answer(ask(16), ask(32))
    assert [row["path"] for row in answer["fields"]] == ["cluster.num_gpus"]
    assert answer["fields"][0]["difference_bytes"] < 0
    same = compare_answer(ask(16), ask(16))
    assert (same["difference_bytes"], same["fields"]) == (0, [])
