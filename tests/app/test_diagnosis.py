"""POST /diagnose, POST /evidence, evidence in POST /recommend, and the command."""

from __future__ import annotations

import json
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from app.api import create_app
from app.api.answers import DiagnoseAnswer, RecommendAnswer
from app.cli.commands import application
from app.settings import Settings, get_settings

OOM = (
    'Traceback (most recent call last):\n  File "/opt/megatron/bridge/training/train.py", line 1, in train_step\n'
    '  File "/opt/megatron/core/transformer/mlp.py", line 1, in forward\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked:.2f} GiB. GPU 0 has a total capacity of "
    "79.11 GiB of which 0.25 GiB is free. Including non-PyTorch memory, this process has 78.86 GiB memory in use. Of "
    "the allocated memory {allocated:.2f} GiB is allocated by PyTorch, and {spare:.2f} GiB is reserved by PyTorch but "
    "unallocated.\n"
)
FULL = OOM.format(asked=1.0, allocated=77.12, spare=0.35)
IN_PIECES = OOM.format(asked=2.0, allocated=60.0, spare=17.5)
HOST = "[1.2] Out of memory: Killed process 77 (python) total-vm:9kB, anon-rss:8kB\n"
CONFIGURATION = "AssertionError: Megatron-FSDP requires the fsdp_dtensor checkpointing format!\n"
MAIN = {"job": {"recipe": "llama3_8b_pretrain_config"}, "cluster": {"gpu": "h100-80gb", "num_gpus": 2}}


def plain_snapshot() -> bytes:
    """Two buffers, one of them freed, as torch's recorder writes them."""
    frames = [{"filename": "/opt/megatron/core/distributed/param_and_grad_buffer.py", "name": "__init__", "line": 1}]
    size = 64 << 20
    events = [
        {"action": "segment_alloc", "addr": 0, "size": 2 * size, "stream": 0, "frames": frames},
        {"action": "alloc", "addr": 0, "size": size, "stream": 0, "frames": frames},
        {"action": "alloc", "addr": size, "size": size, "stream": 0, "frames": frames},
        {"action": "free_requested", "addr": size, "size": size, "stream": 0, "frames": frames},
        {"action": "free_completed", "addr": size, "size": size, "stream": 0, "frames": frames},
    ]
    blocks = [
        {"address": 0, "size": size, "requested_size": size, "state": "active_allocated", "frames": frames},
        {"address": size, "size": size, "requested_size": size, "state": "inactive", "frames": []},
    ]
    segment = {
        "address": 0,
        "total_size": 2 * size,
        "device": 0,
        "stream": 0,
        "segment_type": "large",
        "blocks": blocks,
    }
    return pickle.dumps({"segments": [segment], "device_traces": [events]})


def test_a_pasted_text_is_explained(client: TestClient) -> None:
    answer = client.post("/diagnose", json={"log": FULL, **MAIN}).json()
    DiagnoseAnswer.model_validate(answer)
    assert answer["outcome"] == "gpu_memory"
    assert answer["causes"][0]["cause"] == "model_states"
    facts = {fact["name"]: fact["value"] for fact in answer["facts"]}
    assert facts["allocated_bytes"] == round(77.12 * 2**30)
    assert answer["prediction"]
    assert answer["failure"]["line"] == 4


def test_without_a_job_it_is_asked_for(client: TestClient) -> None:
    answer = client.post("/diagnose", json={"log": FULL}).json()
    assert {row["path"] for row in answer["missing"]} >= {"cluster.num_gpus"}
    assert client.post("/diagnose", json={}).json()["outcome"] == "needs_input"


def test_an_upload_is_named_by_its_id(own_client: TestClient) -> None:
    stored = own_client.post("/evidence", content=("noise\n" * 1000 + FULL).encode())
    assert stored.status_code == 201
    upload = stored.json()
    assert (upload["kind"], upload["size_bytes"]) == ("text", 6000 + len(FULL))
    for body in ({"evidence_id": upload["evidence_id"]}, {"evidence_id": upload["evidence_id"], "log": "more"}):
        answer = own_client.post("/diagnose", json=body).json()
        assert answer["failure"]["line"] == 1004
    answer = own_client.post("/recommend", json={**MAIN, "evidence": {"evidence_id": upload["evidence_id"]}}).json()
    assert "Rank" in answer["diagnosis"]["summary"] or "job ran out" in answer["diagnosis"]["summary"]


def test_a_snapshot_is_read_and_compared(own_client: TestClient) -> None:
    upload = own_client.post("/evidence", content=plain_snapshot()).json()
    assert upload["kind"] == "snapshot"
    answer = own_client.post("/diagnose", json={"evidence_id": upload["evidence_id"], **MAIN}).json()
    assert answer["snapshot"]["peak_allocated_bytes"] == 128 << 20
    assert answer["snapshot"]["end_allocated_bytes"] == 64 << 20
    assert {row["component"] for row in answer["differences"]} >= {"optimizer_states", "parameters"}
    refused = own_client.post("/recommend", json={**MAIN, "evidence": {"evidence_id": upload["evidence_id"]}})
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["path"] == "evidence.evidence_id"


def test_a_pickle_that_is_no_snapshot_is_refused(own_client: TestClient) -> None:
    upload = own_client.post("/evidence", content=pickle.dumps(print)).json()
    answer = own_client.post("/diagnose", json={"evidence_id": upload["evidence_id"]})
    assert answer.status_code == 422
    assert "plain containers" in answer.json()["errors"][0]["message"]


@pytest.mark.parametrize("evidence_id", ["ev_unknown", "../../etc/passwd", "ev_" + "a" * 22])
def test_an_unknown_upload_is_named(client: TestClient, evidence_id: str) -> None:
    answer = client.post("/diagnose", json={"evidence_id": evidence_id})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["path"] == "evidence_id"


def test_uploads_have_a_limit_a_quota_and_an_end(tmp_path: Path) -> None:
    limits = {"max_evidence_body_bytes": 4096, "evidence_quota_bytes": 6000, "evidence_ttl_seconds": 60}
    settings = Settings(data_dir=tmp_path, log_level="error", **limits)
    with TestClient(create_app(settings), raise_server_exceptions=False) as client:
        assert client.post("/evidence", content=b"").status_code == 422
        assert client.post("/evidence", content=b"x" * 5000).status_code == 413
        assert client.post("/evidence", content=iter([b"x" * 3000, b"x" * 3000])).status_code == 413
        first = client.post("/evidence", content=b"x" * 4000).json()
        full = client.post("/evidence", content=b"x" * 3000)
        assert (full.status_code, full.json()["type"]) == (507, "/problems/storage-full")
        folder = tmp_path / "evidence"
        assert len(list(folder.iterdir())) == 1
        (kept,) = folder.iterdir()
        kept.rename(folder / kept.name.replace(kept.name.split(".")[1], str(int(time.time()) - 1)))
        assert client.post("/evidence", content=b"x" * 3000).status_code == 201
        assert client.post("/diagnose", json={"evidence_id": first["evidence_id"]}).status_code == 422
        assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(("log", "cause"), [(HOST, "host_memory"), (CONFIGURATION, "configuration")])
def test_no_settings_where_gpu_memory_is_not_short(own_client: TestClient, log: str, cause: str) -> None:
    answer = own_client.post("/recommend", json={**MAIN, "evidence": {"log": log}}).json()
    RecommendAnswer.model_validate(answer)
    assert answer["outcome"] == "not_gpu_memory"
    assert answer["recommendations"] == []
    assert answer["diagnosis"]["causes"][0]["cause"] == cause
    assert answer["diagnosis"]["advice"]["actions"]
    assert own_client.get(f"/recommendations/{answer['id']}").json() == answer


def test_evidence_speaks_before_the_estimate(client: TestClient) -> None:
    answer = client.post("/recommend", json={**MAIN, "evidence": {"log": FULL}}).json()
    assert answer["outcome"] == "recommended"
    assert answer["diagnosis"]["failure"]["kind"] == "torch_oom"
    assert answer["diagnosis"]["causes"][0]["cause"] == "model_states"


def test_memory_in_pieces_is_answered_with_the_allocator(client: TestClient) -> None:
    """The job fits by the estimate; the text shows 17.5 GiB reserved and unused: expandable segments come first."""
    overrides = ["env_vars.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False", "model.recompute_granularity=full"]
    overrides += ["model.recompute_method=uniform", "model.recompute_num_layers=1"]
    body = {
        "job": {"recipe": "llama3_8b_pretrain_config", "overrides": overrides},
        "cluster": {"gpu": "h100-80gb", "num_gpus": 8},
        "evidence": {"log": IN_PIECES},
    }
    answer = client.post("/recommend", json=body).json()
    assert answer["outcome"] == "fits_already"
    assert answer["diagnosis"]["causes"][0]["cause"] == "fragmentation"
    assert answer["recommendations"][0]["title"] == "Expandable segments"


def test_the_job_is_read_from_the_log(client: TestClient) -> None:
    log = "python train.py --recipe llama3_8b_pretrain_config train.micro_batch_size=2\n" + FULL
    body = {"job": {}, "cluster": {"gpu": "h100-80gb", "num_gpus": 16}, "evidence": {"log": log}}
    answer = client.post("/recommend", json=body).json()
    assert answer["outcome"] in ("recommended", "needs_input")
    if answer["outcome"] == "needs_input":
        assert answer["missing"]


def test_evidence_without_a_job_asks_for_one(client: TestClient) -> None:
    body = {"job": {}, "cluster": {"gpu": "h100-80gb", "num_gpus": 2}, "evidence": {"log": FULL}}
    answer = client.post("/recommend", json=body).json()
    assert answer["outcome"] == "needs_input"
    assert answer["missing"]


def command(*arguments: str) -> Any:
    get_settings.cache_clear()
    return CliRunner().invoke(application, ["diagnose", *arguments])


def test_the_command_reads_logs_and_snapshots(tmp_path: Path) -> None:
    log, snapshot = tmp_path / "train.log", tmp_path / "memory.pickle"
    log.write_text(FULL)
    snapshot.write_bytes(plain_snapshot())
    job = ["--recipe", "llama3_8b_pretrain_config", "--gpu", "h100-80gb", "--num-gpus", "2"]
    result = command(str(log), str(snapshot), *job)
    assert result.exit_code == 0, result.output
    assert "ran out of GPU memory" in result.output
    assert "memory snapshot of device 0" in result.output
    as_json = [json.loads(line) for line in command(str(log), str(snapshot), *job, "--json").output.splitlines()]
    assert [answer["outcome"] for answer in as_json] == ["gpu_memory", "gpu_memory"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such/file"], "No such file"),
        (["{log}", "--gpu", "h100-80gb"], "belong together"),
        (["{log}", "--override", "a.b=1"], "none is named"),
        (["{log}", "--stack", "torch"], "name=version"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path: Path, arguments: list[str], message: str) -> None:
    log = tmp_path / "x.log"
    log.write_text(FULL)
    result = command(*(argument.format(log=log) for argument in arguments))
    assert result.exit_code == 2
    assert message in result.output
