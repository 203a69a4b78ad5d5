"""Calibrations: fitted from stored runs, kept, activated, named by answers; on SQLite and PostgreSQL alike."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert
from starlette.testclient import TestClient
from typer.testing import CliRunner

from app.api import create_app
from app.cli.commands import application
from app.db import migrations
from app.db.models import ProfiledRun, RunPrediction
from app.db.session import Database
from app.services import calibrations, predictions
from app.settings import Settings, get_settings
from estimator import ESTIMATOR_VERSION
from estimator.calibration import shipped, stack_key
from estimator.job.settings import Stack
from tests.estimator.calibration.generated import draw

GIB = 1 << 30
STACK = stack_key(Stack())
MEASURED = Path(__file__).resolve().parents[2] / "estimator" / "data" / "measured"


@pytest.fixture(params=["sqlite", "postgresql"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    url = None if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    found = Settings(data_dir=tmp_path / "data", database_url=url, log_level="error")
    migrations.upgrade(found)
    return found


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    found = Database(settings)
    yield found
    found.close()


@pytest.fixture
def served(settings: Settings) -> Iterator[TestClient]:
    with TestClient(create_app(settings), raise_server_exceptions=False) as client:
        yield client


def store_drawn(database: Database, num: int, **options: Any) -> None:
    """Runs with predictions, both drawn: what a fit reads, without an estimate."""
    now = dt.datetime(2026, 12, 1, tzinfo=dt.UTC)
    rows = draw(num, **options)
    runs = [
        {
            "run_id": row.run_id, "stored_at": now, "source": "profiler", "method": "simulated", "outcome": "ok",
            "fingerprint": row.fingerprint, "gpu": "h200-141gb", "strategy": row.strategy, "world_size": 8, "rank": 0,
            "allocator": row.allocator, "peak_allocated_bytes": row.measured_peak,
            "persistent_bytes": row.measured_persistent, "peak_reserved_bytes": row.measured_reserved,
            "stack": STACK, "content_hash": "x", "document": {},
        }
        for row in rows
    ]  # fmt: skip
    predicted = [
        {
            "fingerprint": row.fingerprint, "estimator_version": ESTIMATOR_VERSION,
            "peak_allocated_bytes": row.predicted_peak, "persistent_bytes": row.predicted_persistent,
            "components": dict(row.components), "model": row.model, "num_communicators": 1,
        }
        for row in rows
    ]  # fmt: skip
    with database.transaction() as session:
        session.execute(insert(ProfiledRun), runs)
        session.execute(insert(RunPrediction), predicted)


def test_a_calibration_is_fitted_kept_and_activated_only_when_asked(
    served: TestClient, database: Database, body: dict[str, Any]
) -> None:
    store_drawn(database, 300, truth={"activations_mlp": 0.03})
    before = served.post("/estimate", json=body).json()
    assert before["calibration_id"] in {c.calibration_id for c in shipped()}
    made = served.post("/calibrations", json={"gpu": "h100-80gb"})
    assert made.status_code == 201, made.text
    found = made.json()
    assert found["provenance"]["num_runs"] == 300
    assert found["active"] is False
    assert served.post("/estimate", json=body).json() == before
    again = served.post("/calibrations", json={"gpu_family": "hopper"})
    assert (again.status_code, again.json()["calibration_id"]) == (200, found["calibration_id"])

    address = f"/calibrations/{found['calibration_id']}"
    assert served.post(f"{address}/activate", json={}).json()["active"] is True
    after = served.post("/estimate", json=body).json()
    assert after["calibration_id"] == found["calibration_id"]
    parts = after["components_at_peak"]
    assert sum(parts.values()) == after["peak_allocated_bytes"]
    assert parts["calibration"] == after["peak_allocated_bytes"] - before["peak_allocated_bytes"] != 0
    low, high = after["intervals"]["peak_allocated_bytes"]["0.95"]
    assert low < after["peak_allocated_bytes"] < high
    assert high - low < before["intervals"]["peak_allocated_bytes"]["0.95"][1] - low
    recommended = served.post("/recommend", json=body).json()
    assert recommended["calibration_id"] == found["calibration_id"]
    assert recommended["recommendations"][0]["estimate"]["calibration_id"] == found["calibration_id"]

    assert served.get(address).json()["active"] is True
    assert len(served.get(f"{address}/runs").json()["run_ids"]) == 300
    assert served.post(f"{address}/deactivate", json={}).json()["active"] is False
    assert served.post("/estimate", json=body).json() == before


def test_versions_are_listed_and_replace_each_other(served: TestClient, database: Database) -> None:
    store_drawn(database, 40)
    first = served.post("/calibrations", json={"gpu": "h200", "activate": True}).json()
    with database.transaction() as session:
        row = session.get(ProfiledRun, "run-000000")
        assert row is not None
        session.delete(row)
    second = served.post("/calibrations", json={"gpu": "h200", "activate": True}).json()
    assert first["active"] is True
    assert second["calibration_id"] != first["calibration_id"]
    page = served.get("/calibrations", params={"limit": 1}).json()
    assert [(i["calibration_id"], i["active"]) for i in page["items"]] == [(second["calibration_id"], True)]
    rest = served.get("/calibrations", params={"limit": 1, "cursor": page["next_cursor"]}).json()
    assert [(i["calibration_id"], i["active"]) for i in rest["items"]] == [(first["calibration_id"], False)]
    assert rest["next_cursor"] is None
    unchanged = served.get(f"/calibrations/{first['calibration_id']}").json()
    assert {k: v for k, v in unchanged.items() if k != "active"} == {k: v for k, v in first.items() if k != "active"}


def test_a_shipped_calibration_can_be_read_by_its_id(client: TestClient) -> None:
    for known in shipped():
        answer = client.get(f"/calibrations/{known.calibration_id}").json()
        assert answer["shipped"] is True
        assert answer["gpu_family"] == known.gpu_family


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({}, "gpu"),
        ({"gpu": "h200", "gpu_family": "hopper"}, "gpu"),
        ({"gpu": "h99"}, "gpu"),
        ({"gpu_family": "volta"}, "gpu_family"),
        ({"gpu": "h200", "stack": {"tensorflow": "2"}}, "stack.tensorflow"),
        ({"gpu": "h200", "activate": 1}, "activate"),
        ({"gpu": "h200", "force": True}, "force"),
    ],
)
def test_what_cannot_be_is_named(client: TestClient, body: dict[str, Any], path: str) -> None:
    answer = client.post("/calibrations", json=body)
    assert answer.status_code == 422
    assert [error["path"] for error in answer.json()["errors"]] == [path]


def test_unknown_ids_are_not_found(client: TestClient) -> None:
    assert client.get("/calibrations/cal_none").status_code == 404
    assert client.get("/calibrations/cal_none/runs").status_code == 404
    assert client.post("/calibrations/cal_none/activate", json={}).status_code == 404
    assert client.get("/calibrations", params={"cursor": "nonsense"}).status_code == 422


def test_the_check_split_is_never_fitted_to(database: Database) -> None:
    store_drawn(database, 5)
    with database.transaction() as session:
        for row in session.query(ProfiledRun).limit(2):
            row.run_id = row.run_id.replace("run-", "dense-check-")
    found = calibrations.fit(database, STACK, "hopper").document
    assert found["provenance"]["num_runs"] == 3
    assert found["provenance"]["num_left_out_of_check"] == 2


def command(*arguments: str) -> Any:
    get_settings.cache_clear()
    return CliRunner().invoke(application, list(arguments))


def test_records_are_predicted_and_fitted_from_the_shell(tmp_path: Path) -> None:
    """Runs of the profiler, told apart from the check split by their ids."""
    lines = (MEASURED / "dense_check.jsonl").read_text().splitlines()[:12]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(line.replace("dense-check-", "mine-") for line in lines) + "\n")
    assert command("runs", "import", str(path)).output.startswith("12 stored")
    found = json.loads(command("calibrate", "--processes", "1", "--activate", "--json").output)
    assert found["timing"]["predicted"] == 12
    assert found["provenance"]["num_runs"] >= 10
    assert found["active"] is True
    again = json.loads(command("calibrate", "--processes", "1", "--json").output)
    assert again["timing"]["predicted"] == 0
    assert again["calibration_id"] == found["calibration_id"]
    estimated = json.loads(command("estimate", "llama3_8b_pretrain_config", "8xh100-80gb", "--json").output)
    assert estimated["calibration_id"] == found["calibration_id"]
    assert found["calibration_id"] in command("calibrations", "list").output
    assert "Held out by model" in command("calibrations", "show", found["calibration_id"]).output
    assert command("calibrations", "deactivate", found["calibration_id"]).exit_code == 0
    assert command("calibrations", "deactivate", found["calibration_id"]).exit_code == 2
    assert command("calibrations", "activate", "cal_none").exit_code == 2


def test_files_are_fitted_without_a_database(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert command("calibrate", "--from", str(MEASURED / "building.jsonl"), "--write", str(out)).exit_code == 0
    assert json.loads(out.read_text())["provenance"]["num_seen_before"] == 15
    refused = command("calibrate", "--from", str(MEASURED / "dense_check.jsonl"), "--write", str(out))
    assert refused.exit_code == 2
    assert "check split" in refused.output
    assert command("calibrate", "--from", str(MEASURED / "building.jsonl")).exit_code == 2


def test_a_job_as_sent_is_predicted_too(served: TestClient, database: Database) -> None:
    job = {"recipe": "llama3_8b_pretrain_config"}
    run = {"run_id": "sent", "gpu": "h100-80gb", "world_size": 16, "job": job, "source": "log",
           "measured": {"peak_allocated_bytes": 40 * GIB}}  # fmt: skip
    assert served.post("/runs", json={"runs": [run]}).json()["stored"] == 1
    asked = {"job": job, "cluster": {"gpu": "h100-80gb", "num_gpus": 16}}
    expected = served.post("/estimate", json=asked).json()["peak_allocated_bytes"]
    assert served.get("/runs/sent").json()["predicted"]["peak_allocated_bytes"] == expected


def test_a_bisected_survival_is_imported_and_predicted(database: Database) -> None:
    record = json.loads((MEASURED / "dense_check.jsonl").read_text().splitlines()[0])
    peak = record["peak_allocated_bytes"]
    survival = {
        "record_version": "1", "kind": "survival", "run_id": "s/survival/default", "method": "simulated",
        "outcome": "ok", "allocator": "default", "stack": record["stack"], "gpu": record["gpu"], "job": record["job"],
        "peak_allocated_bytes": peak, "peak_reserved_bytes": record["peak_reserved_bytes"],
        "dies_at_bytes": peak + (2 << 20), "survives_at_bytes": peak + (20 << 20),
    }  # fmt: skip
    from app.schemas import Run
    from app.services import run_files, runs

    row = run_files.of_record(survival, "line 1")
    assert isinstance(row, Run), row
    assert (row.world_size, row.rank) == (16, 14)
    runs.store(database, [row])
    assert predictions.fill(database, STACK, ["h200-141gb"]) == 1
    (observation,), _ = calibrations.observations(database, STACK, "hopper")
    assert observation.measured_survival == peak + (20 << 20)
    assert observation.predicted_survival is not None
    assert observation.predicted_survival >= observation.predicted_peak
    wide = run_files.of_record({**survival, "dies_at_bytes": peak // 2}, "line 2")
    assert isinstance(wide, Run)
    assert wide.measured.survival_bytes is None
