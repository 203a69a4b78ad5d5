"""Measured runs: sent, imported, listed, reported back; on SQLite and PostgreSQL alike."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from starlette.testclient import TestClient
from typer.testing import CliRunner

from app.api import create_app
from app.cli.commands import application
from app.db import migrations
from app.db.session import Database, create_database_engine
from app.settings import Settings, get_settings

RECORDS = Path(__file__).resolve().parents[2] / "estimator" / "data" / "measured" / "dense_check.jsonl"
GIB = 1 << 30


def run(name: str = "a", **changes: Any) -> dict[str, Any]:
    plain = {
        "run_id": name,
        "gpu": "NVIDIA H200",
        "world_size": 8,
        "rank": 3,
        "job": {"recipe": "llama3_8b_pretrain_config"},
        "measured": {"peak_allocated_bytes": 40 * GIB, "peak_reserved_bytes": 41 * GIB},
        "stack": {"torch": "2.11.0+cu130"},
    }
    return plain | changes


@pytest.fixture(params=["sqlite", "postgresql"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TestClient]:
    url = None if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    settings = Settings(data_dir=tmp_path / "data", database_url=url, log_level="error")
    if url is not None:
        migrations.upgrade(settings)
    with TestClient(create_app(settings), raise_server_exceptions=False) as client:
        yield client


def test_runs_are_stored_once(served: TestClient) -> None:
    body = {"runs": [run("a"), run("b", rank=4)]}
    assert served.post("/runs", json=body).json() | {"schema_version": ""} == {
        "stored": 2,
        "unchanged": 0,
        "schema_version": "",
    }
    assert served.post("/runs", json={"runs": [run("b", rank=4), run("c")]}).json()["unchanged"] == 1
    items = served.get("/runs").json()["items"]
    assert sorted(item["run_id"] for item in items) == ["a", "b", "c"]
    assert {item["gpu"] for item in items} == {"h200-141gb"}
    one = served.get("/runs/a").json()
    assert one["measured"]["peak_allocated_bytes"] == 40 * GIB
    assert one["predicted"]["peak_allocated_bytes"] > GIB


def test_a_batch_with_a_bad_row_stores_nothing(served: TestClient) -> None:
    answer = served.post("/runs", json={"runs": [run("a"), run("b", rank=8), run("c", gpu="h100-81gb")]})
    assert answer.status_code == 422
    assert [error["path"] for error in answer.json()["errors"]] == ["runs[1].rank", "runs[2].gpu"]
    assert served.get("/runs").json()["items"] == []


def test_the_same_id_with_other_content_is_refused(served: TestClient) -> None:
    served.post("/runs", json={"runs": [run("a")]})
    clash = served.post("/runs", json={"runs": [run("z"), run("a", rank=1)]})
    assert clash.json()["errors"][0]["path"] == "runs[1].run_id"
    assert [item["run_id"] for item in served.get("/runs").json()["items"]] == ["a"]
    twice = served.post("/runs", json={"runs": [run("q"), run("q", rank=1)]})
    assert twice.status_code == 422


def test_pages_go_through_everything_once(served: TestClient) -> None:
    for number in range(7):
        served.post("/runs", json={"runs": [run(f"{number}-{k}", outcome="oom" if k else "ok") for k in range(3)]})
    seen: list[str] = []
    cursor = None
    while True:
        page = served.get(
            "/runs", params={"limit": 4, "outcome": "oom"} | ({"cursor": cursor} if cursor else {})
        ).json()
        seen += [item["run_id"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert sorted(seen) == sorted(f"{number}-{k}" for number in range(7) for k in (1, 2))
    assert served.get("/runs", params={"cursor": "nonsense"}).status_code == 422
    assert served.get("/runs", params={"gpu": "h99"}).json()["errors"][0]["path"] == "query.gpu"


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"measured": {}}, "runs[0].measured.peak_allocated_bytes"),
        ({"measured": {"peak_allocated_bytes": -1}}, "runs[0].measured.peak_allocated_bytes"),
        ({"measured": {"peak_allocated_bytes": 200 * GIB}}, "runs[0].measured.peak_allocated_bytes"),
        (
            {"measured": {"peak_allocated_bytes": 40 * GIB, "peak_reserved_bytes": 39 * GIB}},
            "runs[0].measured.peak_reserved_bytes",
        ),
        ({"measured": {"peak_allocated_bytes": True}}, "runs[0].measured.peak_allocated_bytes"),
        ({"gpu": "h300"}, "runs[0].gpu"),
        ({"stack": {"torch": "newest"}}, "runs[0].stack.torch"),
        ({"stack": {"tensorflow": "2"}}, "runs[0].stack.tensorflow"),
        ({"rank": 8}, "runs[0].rank"),
        ({"job": None}, "runs[0].job"),
        ({"world_size": 0}, "runs[0].world_size"),
        ({"extra": 1}, "runs[0].extra"),
        ({"run_id": ""}, "runs[0].run_id"),
    ],
)
def test_what_cannot_be_is_named(client: TestClient, changes: dict[str, Any], path: str) -> None:
    answer = client.post("/runs", json={"runs": [run("bad", **changes)]})
    assert answer.status_code == 422
    assert path in [error["path"] for error in answer.json()["errors"]]


def test_at_most_ten_thousand_in_a_request(client: TestClient) -> None:
    many = {"runs": [{}] * 10_001}
    assert client.post("/runs", json=many).status_code == 422
    assert client.post("/runs", json={"runs": []}).status_code == 422


def command(*arguments: str) -> Any:
    get_settings.cache_clear()
    return CliRunner().invoke(application, ["runs", *arguments])


def test_the_profilers_records_are_imported_and_predicted() -> None:
    assert command("import", str(RECORDS)).output.strip() == "60 stored, 0 known already"
    assert command("import", str(RECORDS)).output.strip() == "0 stored, 60 known already"
    items = json.loads(command("list", "--limit", "100", "--json").output)["items"]
    compared = [item for item in items if item["predicted"]["peak_allocated_bytes"]]
    assert len(compared) == 55
    close = [
        abs(item["predicted"]["peak_allocated_bytes"] / item["measured"]["peak_allocated_bytes"] - 1) < 0.01
        for item in compared
    ]
    assert sum(close) >= 44
    assert "optim_grads_params" in command("list").output


def test_a_log_is_imported(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(
        "torchrun --nproc_per_node=8 run.py --recipe llama3_8b_pretrain_config\nNVIDIA H100 80GB HBM3\n"
        "[Rank 0] (after 2 iterations) memory (MB) | allocated: 41000.0 | max allocated: 42000.5 | reserved: 43000.0 | "
        "max reserved: 44000.0\n"
    )
    result = command("import", str(path))
    assert result.output.strip() == "1 stored, 0 known already", result.output
    (item,) = json.loads(command("list", "--json").output)["items"]
    assert item["measured"]["peak_allocated_bytes"] == int(42000.5 * 2**20)
    assert item["source"] == "log"


def test_what_a_file_leaves_out_is_said_beside_it(tmp_path: Path) -> None:
    """A log without its job, and the totals of a memory snapshot."""
    log, snapshot, about = tmp_path / "bare.log", tmp_path / "snapshot.pickle", tmp_path / "about.yaml"
    log.write_text(
        "[Rank 3] (after 2 iterations) memory (MB) | allocated: 41000.0 | max allocated: 42000.5 | reserved: 43000.0 | "
        "max reserved: 44000.0\n step 3 memory (GB): mem-max-allocated-gigabytes: 45.5\n"
    )
    block = {"address": 1 << 30, "size": 2 << 20, "requested_size": 2 << 20, "state": "active_allocated", "frames": []}
    segment = {"device": 0, "address": 1 << 30, "total_size": 2 << 20, "allocated_size": 2 << 20,
               "active_size": 2 << 20, "stream": 0, "segment_type": "small", "blocks": [block]}  # fmt: skip
    snapshot.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [[]]}))
    for path in (log, snapshot):
        refused = command("import", str(path))
        assert refused.exit_code == 2
        assert "--about" in refused.output
    about.write_text(
        "job: {recipe: llama3_8b_pretrain_config}\ncluster: {gpu: h100-80gb, num_gpus: 8}\nrank: 1\n"
        "stack: {megatron_core: 0.19.2}\n"
    )
    done = command("import", "--about", str(about), str(log), str(snapshot))
    assert done.output.strip() == "2 stored, 0 known already", done.output
    items = {item["source"]: item for item in json.loads(command("list", "--json").output)["items"]}
    assert items["log"]["measured"]["peak_allocated_bytes"] == 45_500_000_000  # Bridge's GB are decimal
    assert items["snapshot"]["measured"]["peak_allocated_bytes"] == 2 << 20
    assert items["snapshot"]["rank"] == 1
    assert items["log"]["predicted"]["peak_allocated_bytes"] > GIB
    about.write_text("job: {}\ncluster: {gpu: h100-80gb}\n")
    assert "cluster.num_gpus" in command("import", "--about", str(about), str(log)).output


BAD_LINES = {
    "cut in half": ('{"record_version": "1", "run_id": "x"', "was the file cut?"),
    "no object": ("[1]", "not JSON"),
    "no peak": (json.dumps(run("n", measured={})), "is required"),
    "negative": (json.dumps(run("n", measured={"peak_allocated_bytes": -5})), "must be at least 1"),
    "too much": (json.dumps(run("n", measured={"peak_allocated_bytes": 900 * GIB})), "more than the card has"),
    "unknown card": (json.dumps(run("n", gpu="xpu")), "gpu"),
    "unknown stack": (json.dumps(run("n", stack={"torch": "?"})), "is no version"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_rows_are_named_and_left_out_when_asked(name: str, tmp_path: Path) -> None:
    line, message = BAD_LINES[name]
    path = tmp_path / "runs.jsonl"
    lines = [json.dumps(run("first")), line, json.dumps(run("last"))]
    path.write_text("\n".join(lines if name != "cut in half" else [lines[0], lines[2], lines[1]]))
    refused = command("import", str(path))
    assert refused.exit_code == 2
    if name != "no object":
        assert message in refused.output
        assert "runs.jsonl:2" in refused.output.replace("\n", "") or name == "cut in half"
    went_on = command("import", "--keep-going", str(path))
    assert went_on.exit_code == 0, went_on.output
    assert "2 stored, 0 known already, 1 refused" in went_on.output


KILLED = """
import sys, time
from app.services import runs
from app.cli import runs as command
from pathlib import Path
real, done = runs.store, 0
def slow(*a, **k):
    global done
    found = real(*a, **k)
    done += found.stored
    print(done, flush=True)
    time.sleep(0.15)
    return found
runs.store = slow
command.BATCH = 50
command.import_files([Path(sys.argv[1])], False)
"""


def test_a_kill_in_the_middle_loses_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    """What was acknowledged is there after kill -9; the second import stores the rest."""
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join(json.dumps(run(f"r{number:05d}")) for number in range(1000)))
    settings = Settings(data_dir=tmp_path / "data")
    migrations.upgrade(settings)
    environment = {**os.environ, "OOMBUDSMAN_DATA_DIR": str(tmp_path / "data")}
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    acknowledged = 0
    started = time.monotonic()
    while acknowledged < 200 and time.monotonic() - started < 60:
        acknowledged = int(process.stdout.readline() or 0)
    process.send_signal(signal.SIGKILL)
    process.wait()
    database = Database(settings)
    with database.transaction() as session:
        stored = session.execute(text("SELECT count(*) FROM profiled_runs")).scalar_one()
    assert 200 <= acknowledged <= stored < 1000
    again = subprocess.run(
        [str(Path(sys.executable).parent / "oombudsman"), "runs", "import", str(path)],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert again.stdout.strip() == f"{1000 - stored} stored, {stored} known already"
    with database.transaction() as session:
        assert session.execute(text("SELECT count(*) FROM profiled_runs")).scalar_one() == 1000
    database.close()


def test_feedback_becomes_a_run(own_client: TestClient, body: dict[str, Any]) -> None:
    made = own_client.post("/recommend", json=body).json()
    address = f"/recommendations/{made['id']}/outcome"
    expected = made["recommendations"][0]["estimate"]["peak_allocated_bytes"]
    ran = own_client.post(address, json={"rank": 1, "ran": True, "peak": expected + 1000}).json()
    assert (ran["stored"], ran["outcome"], ran["predicted_peak_bytes"]) == (True, "ok", expected)
    assert abs(ran["relative_error"]) < 1e-6
    assert own_client.post(address, json={"rank": 1, "ran": True, "peak": expected + 1000}).json()["stored"] is False
    log = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB"
    )
    failed = own_client.post(address, json={"rank": 2, "ran": False, "log": log}).json()
    assert failed["outcome"] == "oom"
    items = own_client.get(f"/recommendations/{made['id']}/outcomes").json()["items"]
    assert [(item["rank"], item["outcome"]) for item in items] == [(2, "oom"), (1, "ok")]
    assert (items[1]["predicted_peak_bytes"], items[1]["measured_peak_bytes"]) == (expected, expected + 1000)
    run_ = own_client.get(f"/runs/{ran['run_id']}").json()
    assert run_["predicted"]["peak_allocated_bytes"] == expected
    assert own_client.get("/runs", params={"source": "feedback"}).json()["items"][0]["recommendation_id"] == made["id"]
    assert own_client.post(address, json={"rank": 19, "ran": True}).json()["errors"][0]["path"] == "rank"
    assert own_client.post("/recommendations/rec_none/outcome", json={"rank": 0, "ran": True}).status_code == 404


def test_pages_use_an_index(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, log_level="error")
    migrations.upgrade(settings)
    engine = create_database_engine(settings)
    with engine.connect() as connection:
        for where in ("gpu = 'x'", "strategy = 'x'", "outcome = 'ok'", "1 = 1"):
            page = f"SELECT * FROM profiled_runs WHERE {where} ORDER BY stored_at DESC, run_id DESC LIMIT 50"
            plan = connection.execute(text("EXPLAIN QUERY PLAN " + page)).all()
            assert "USING INDEX" in str(plan)
            assert "TEMP B-TREE" not in str(plan)
    engine.dispose()
