"""What a person reads: whole, at 80 columns, for every outcome and for answers with holes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.cli import console, report

_spec = importlib.util.spec_from_file_location("samples", Path(__file__).with_name("samples.py"))
assert _spec is not None
assert _spec.loader is not None
samples = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(samples)

REQUEST = {"job": {"recipe": "llama", "overrides": ["a=b"]}, "cluster": {"gpu": "h100-80gb", "num_gpus": 2}}


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLUMNS", "80")
    console.console.cache_clear()
    yield
    console.console.cache_clear()


def test_the_first_recommendation_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_recommendation(samples.recommended(), REQUEST)
    shown = capsys.readouterr().out
    assert "llama with 1 change of yours on 2 x h100-80gb: does not fit" in shown
    assert samples.PYTHON in shown
    assert "unset CUDA_DEVICE_MAX_CONNECTIONS\nexport PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n" in shown
    assert "a torch dtype would become a string" in shown
    assert "existing torch_dist checkpoints do not load" in shown
    assert "and 3 more" in shown
    assert "--show 2" in shown
    assert shown.count(samples.PYTHON) == 1


def test_all_recommendations_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_recommendation(samples.recommended(), REQUEST, show=0)
    shown = capsys.readouterr().out
    assert shown.count(samples.PYTHON) == 2
    assert "a third" in shown


def test_only_lines_to_copy_are_longer_than_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_recommendation(samples.recommended(), REQUEST)
    report.print_estimate(samples.estimate(), REQUEST)
    long = [line for line in capsys.readouterr().out.splitlines() if len(line) > 80]
    assert all(line in samples.PYTHON or "least reserved" in line for line in long)


def test_components_of_an_estimate_are_all_accounted_for(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_estimate(samples.estimate(), REQUEST)
    shown = capsys.readouterr().out
    for words in ("main gradients", "smaller ones", "allocated at the peak", "Pipeline stages", "Moment by moment"):
        assert words in shown
    assert "under 0.1 %" in shown


@pytest.mark.parametrize("outcome", [*report.OUTCOMES, "something_new"])
def test_every_outcome_and_answers_with_holes(capsys: pytest.CaptureFixture[str], outcome: str) -> None:
    answer: dict[str, Any] = {"outcome": outcome, "current": None, "diagnosis": None, "missing": [{"path": "x"}]}
    report.print_recommendation(answer, REQUEST)
    assert "Missing: x" in capsys.readouterr().out


def test_a_job_that_cannot_be_laid_out(capsys: pytest.CaptureFixture[str]) -> None:
    problem = {"rule_id": "A18", "fields": ["x"], "message": "3 GPUs are no multiple of 2.", "fix": "Choose others."}
    answer = {**dict.fromkeys(samples.estimate()), "problems": [problem]}
    report.print_estimate(answer, REQUEST)
    shown = capsys.readouterr().out
    assert "cannot be laid out" in shown
    assert "Choose others." in shown


@pytest.mark.parametrize(
    ("share", "words"), [(1.0, "over 99.9 %"), (0.9983, "99.83 %"), (0.5, "50 %"), (0.0, "under 0.1 %")]
)
def test_no_probability_is_certain(share: float, words: str) -> None:
    assert console.percent(share) == words
