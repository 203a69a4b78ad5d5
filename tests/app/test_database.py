"""Migrations and storage, on SQLite and PostgreSQL alike."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, inspect, text
from starlette.testclient import TestClient

from alembic import command
from app.api import create_app
from app.db import migrations
from app.db.migrations import DatabaseNotReady, State
from app.db.models import Recommendation
from app.db.session import Database, create_database_engine
from app.settings import Settings

MIGRATE = "from app.settings import Settings; from app.db import migrations; migrations.upgrade(Settings())"


@pytest.fixture(params=["sqlite", "postgresql"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    if request.param == "sqlite":
        return Settings(data_dir=tmp_path / "data", log_level="error")
    url = request.getfixturevalue("postgres_url")
    return Settings(data_dir=tmp_path / "data", database_url=url, log_level="error")


def _state(settings: Settings) -> State:
    engine = create_database_engine(settings)
    try:
        return migrations.state(engine)
    finally:
        engine.dispose()


def test_up_check_down_up(settings: Settings) -> None:
    assert _state(settings) is State.EMPTY
    migrations.upgrade(settings)
    assert _state(settings) is State.CURRENT
    command.check(migrations.alembic_config(settings))  # raises if the models have moved on
    command.downgrade(migrations.alembic_config(settings), "base")
    assert _state(settings) is State.EMPTY
    migrations.upgrade(settings)
    migrations.upgrade(settings)
    assert _state(settings) is State.CURRENT


def test_head_is_the_newest_migration(tmp_path: Path) -> None:
    config = migrations.alembic_config(Settings(data_dir=tmp_path))
    assert ScriptDirectory.from_config(config).get_current_head() == migrations.HEAD
    assert migrations.HEAD in migrations.known_revisions()


def test_names_follow_the_convention(settings: Settings) -> None:
    migrations.upgrade(settings)
    engine = create_database_engine(settings)
    found = inspect(engine)
    assert found.get_pk_constraint("recommendations")["name"] == "pk_recommendations"
    assert [index["name"] for index in found.get_indexes("recommendations")] == ["ix_recommendations_created_at"]
    engine.dispose()


def test_two_migrations_at_once_are_one_after_the_other(settings: Settings) -> None:
    environment = {"OOMBUDSMAN_DATA_DIR": str(settings.data_dir), "PATH": "/usr/bin:/bin"}
    if settings.database_url is not None:
        environment["OOMBUDSMAN_DATABASE_URL"] = settings.database_url.get_secret_value()
    running = [
        subprocess.Popen([sys.executable, "-c", MIGRATE], env=environment, stderr=subprocess.PIPE) for _ in range(3)
    ]
    for process in running:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()
    assert _state(settings) is State.CURRENT


def test_the_service_refuses_a_database_that_is_not_current(settings: Settings) -> None:
    migrations.upgrade(settings)
    engine = create_database_engine(settings)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    assert _state(settings) is State.AHEAD
    with pytest.raises(DatabaseNotReady, match="newer"), TestClient(create_app(settings)):
        pass


def test_only_an_embedded_database_is_created_by_itself(tmp_path: Path) -> None:
    elsewhere = Settings(data_dir=tmp_path, database_url=f"sqlite:///{tmp_path / 'team.db'}", log_level="error")
    with pytest.raises(DatabaseNotReady, match="oombudsman db upgrade"), TestClient(create_app(elsewhere)):
        pass
    with TestClient(create_app(Settings(data_dir=tmp_path, log_level="error"))) as client:
        assert client.get("/readyz").status_code == 200


def test_sqlite_runs_with_wal_and_foreign_keys(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "new" / "folder", database_timeout_seconds=3)
    migrations.upgrade(settings)
    engine = create_database_engine(settings)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 3000
    engine.dispose()
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o077 == 0


def _row(name: str, result: dict[str, Any]) -> Recommendation:
    return Recommendation(
        id=name,
        created_at=dt.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=dt.UTC),
        kind="recommend",
        request={"job": {"recipe": "ü \u0000 😀"}},
        result=result,
        estimator_version="0",
        calibration_id=None,
        schema_version="1",
    )


def test_what_is_stored_comes_back_the_same(settings: Settings) -> None:
    migrations.upgrade(settings)
    result = {"z": 2**62, "a": [0.1, 1e-300, None, True], "text": "ü \u0000 😀 \u2028", "nested": {"y": 1, "b": {}}}
    database = Database(settings)
    with database.transaction() as session:
        session.add(_row("rec_a", result))
    with database.transaction() as session:
        row = session.get(Recommendation, "rec_a")
        assert row is not None
        assert list(row.result.items()) == list(result.items())
        assert row.request == {"job": {"recipe": "ü \u0000 😀"}}
        assert row.created_at == dt.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=dt.UTC)
    database.close()


def test_a_transaction_that_fails_leaves_nothing(settings: Settings) -> None:
    migrations.upgrade(settings)
    database = Database(settings)

    def fail() -> None:
        with database.transaction() as session:
            session.add(_row("rec_a", {}))
            session.flush()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with database.transaction() as session:
        assert session.get(Recommendation, "rec_a") is None
    database.close()


def test_many_writers_at_once(settings: Settings, body: dict[str, Any], estimator_says: Callable[[Any], None]) -> None:
    estimator_says({"outcome": "fits_already", "payload": "x" * 10_000})
    migrations.upgrade(settings)
    with TestClient(create_app(settings)) as client, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: client.post("/recommend", json=body), range(96)))
        assert {answer.status_code for answer in answers} == {200}
        reads = list(pool.map(lambda answer: client.get(answer.headers["content-location"]), answers))
        assert [read.content for read in reads] == [answer.content for answer in answers]
    assert len({answer.json()["id"] for answer in answers}) == 96


def test_a_writer_that_waits_too_long_is_told_so(
    tmp_path: Path, body: dict[str, Any], estimator_says: Callable[[Any], None]
) -> None:
    estimator_says({"outcome": "fits_already"})
    settings = Settings(data_dir=tmp_path, database_timeout_seconds=0.2, log_level="error")
    with TestClient(create_app(settings), raise_server_exceptions=False) as client:
        other = create_engine(settings.resolved_database_url)
        with other.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            response = client.post("/recommend", json=body)
            assert response.status_code == 503
            assert response.headers["retry-after"]
            assert client.get("/readyz").status_code == 200
        other.dispose()
        assert client.post("/recommend", json=body).status_code == 200


def test_readers_do_not_wait_for_a_writer(
    tmp_path: Path, body: dict[str, Any], estimator_says: Callable[[Any], None]
) -> None:
    estimator_says({"outcome": "fits_already"})
    settings = Settings(data_dir=tmp_path, log_level="error")
    with TestClient(create_app(settings)) as client:
        address = client.post("/recommend", json=body).headers["content-location"]
        other = create_engine(settings.resolved_database_url)
        with other.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            assert client.get(address).status_code == 200
        other.dispose()


def test_threads_are_given_back(settings: Settings) -> None:
    migrations.upgrade(settings)
    before = threading.active_count()
    for _ in range(3):
        with TestClient(create_app(settings)) as client:
            assert client.get("/readyz").status_code == 200
    assert threading.active_count() <= before + 1
