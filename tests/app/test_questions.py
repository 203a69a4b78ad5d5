"""POST /capacity, POST /compare and their commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from app.api.answers import CapacityAnswer, CompareAnswer
from app.cli.commands import application
from app.settings import get_settings

SIDE = {"job": {"recipe": "llama3_8b_pretrain_config"}, "cluster": {"gpu": "h100-80gb", "num_gpus": 16}}


def command(*arguments: str) -> Any:
    get_settings.cache_clear()
    return CliRunner().invoke(application, list(arguments))


@pytest.mark.parametrize("question", ["micro_batch_size", "seq_length", "num_gpus"])
def test_capacity(client: TestClient, question: str) -> None:
    answer = client.post("/capacity", json={**SIDE, "question": question})
    assert answer.status_code == 200
    CapacityAnswer.model_validate(answer.json())
    words = ["llama3_8b_pretrain_config", "16xh100-80gb", "--of", question]
    assert json.loads(command("capacity", *words, "--json").output) == answer.json()
    assert answer.json()["summary"][:30] in command("capacity", *words).output


def test_compare(client: TestClient, tmp_path: Path) -> None:
    changed = {**SIDE, "job": {**SIDE["job"], "overrides": ["train.micro_batch_size=2"]}}
    answer = client.post("/compare", json={"a": SIDE, "b": changed})
    assert answer.status_code == 200
    CompareAnswer.model_validate(answer.json())
    recipe = "llama3_8b_pretrain_config"
    common = ["--gpu", "h100-80gb", "--num-gpus", "16"]
    result = command("diff", recipe, recipe, *common, "--b", "train.micro_batch_size=2")
    assert result.exit_code == 0, result.output
    assert "train.micro_batch_size: 1 -> 2" in result.output
    path = tmp_path / "new.yaml"
    path.write_text("model: [1]\n")
    assert command("diff", recipe, str(path), *common).exit_code == 2
    assert "--num-gpus" in command("diff", recipe, recipe).output


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("/capacity", {**SIDE, "question": "speed"}, "question"),
        ("/capacity", SIDE, "question"),
        ("/compare", {"a": SIDE}, "b"),
        ("/compare", {"a": SIDE, "b": {**SIDE, "job": {"recipe": "x"}}}, "job.recipe"),
    ],
)
def test_what_is_wrong_is_named(client: TestClient, path: str, body: dict[str, Any], where: str) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 422
    assert where in [error["path"] for error in answer.json()["errors"]]


def test_an_explanation(client: TestClient) -> None:
    made = command("recommend", "llama3_8b_pretrain_config", "2xh100-80gb", "--json")
    shown = command("explain", json.loads(made.output)["id"]).output
    assert "deals the layers to pipeline stages" in shown
    assert "step time" in shown
    assert command("explain", "rec_none").exit_code == 2
