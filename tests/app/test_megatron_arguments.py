"""Megatron-LM's arguments as the job: over HTTP's body and from a file of the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from app.cli.failures import Failure
from app.cli.inputs import Options, build
from app.schemas import EstimateBody, Job
from estimator.errors import JobError

ARGUMENTS = {
    "num_layers": 12,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "padded_vocab_size": 50304,
    "bf16": True,
    "micro_batch_size": 4,
    "global_batch_size": 32,
}
PRINTED = "\n".join(
    [
        "using world size: 8, data-parallel size: 8",
        "------------------------ arguments ------------------------",
        *(f"  {name} {'.' * (48 - len(name))} {value}" for name, value in ARGUMENTS.items()),
        "-------------------- end of arguments ---------------------",
    ]
)


@pytest.mark.parametrize("text", [PRINTED, json.dumps(ARGUMENTS)])
def test_a_file_of_arguments_is_the_job(tmp_path: Path, text: str) -> None:
    path = tmp_path / "arguments"
    path.write_text(text)
    body = build(Options(words=("8xh100-80gb",), megatron_args=path), EstimateBody)
    assert body.job.megatron_lm_args == ARGUMENTS
    config = body.to_request().job.config
    assert config is not None
    assert config["model"]["params_dtype"] == "bfloat16"


def test_a_file_that_holds_no_arguments_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "arguments"
    path.write_text("[1, 2]")
    with pytest.raises(Failure):
        build(Options(words=("8xh100-80gb",), megatron_args=path), EstimateBody)


def test_one_vocabulary_at_a_time() -> None:
    with pytest.raises(ValidationError, match="in place of recipe and config"):
        Job(recipe="llama3_8b_pretrain_config", megatron_lm_args=ARGUMENTS)


def test_an_argument_that_matters_and_cannot_be_said_is_named() -> None:
    with pytest.raises(JobError, match=r"job\.megatron_lm_args\.freeze_all_layers"):
        Job(megatron_lm_args={**ARGUMENTS, "freeze_all_layers": True}).to_request()


@pytest.mark.parametrize("value", [[1], {"a": 1}, "x", -5, 1e300, True])
def test_odd_values_are_refused_or_read_never_fatal(value: object) -> None:
    for name in ("padded_vocab_size", "num_layers", "main_params_dtype", "bf16", "fp8", "num_experts"):
        Job(megatron_lm_args={**ARGUMENTS, name: value}).to_request()


@pytest.mark.parametrize("path", ["/estimate", "/recommend"])
def test_over_http_the_argument_is_named(client: TestClient, path: str) -> None:
    job = {"megatron_lm_args": {**ARGUMENTS, "freeze_all_layers": True}}
    answer = client.post(path, json={"job": job, "cluster": {"gpu": "h100-80gb", "num_gpus": 8}})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["path"] == "job.megatron_lm_args.freeze_all_layers"
