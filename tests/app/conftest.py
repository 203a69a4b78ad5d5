"""The real application on migrated temporary databases."""

from __future__ import annotations

import os
import secrets
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from starlette.testclient import TestClient

from app.api import create_app
from app.settings import Settings, get_settings

POSTGRES = "host=127.0.0.1 port=5432 user=postgres dbname=postgres connect_timeout=3"


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tests neither read the environment's settings nor touch the user's own database."""
    for name in os.environ:
        if name.startswith("OOMBUDSMAN_") and name != "OOMBUDSMAN_TEST_POSTGRES":
            monkeypatch.delenv(name)
    monkeypatch.setenv("OOMBUDSMAN_DATA_DIR", str(tmp_path / "default"))
    get_settings.cache_clear()


@pytest.fixture(scope="session")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """One service for all tests that do not care what else it stores."""
    settings = Settings(data_dir=tmp_path_factory.mktemp("shared"), log_level="error")
    with TestClient(create_app(settings), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def own_settings(tmp_path: Path) -> Settings:
    """A new embedded database, and small body limits."""
    limits = {"max_estimate_body_bytes": 2048, "max_recommend_body_bytes": 4096}
    return Settings(data_dir=tmp_path / "data", log_level="error", **limits)


@pytest.fixture
def own_client(own_settings: Settings) -> Iterator[TestClient]:
    """A service of its own."""
    with TestClient(create_app(own_settings), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def postgres_url() -> Iterator[str]:
    """A new database on the PostgreSQL at 127.0.0.1:5432, dropped at the end."""
    try:
        server = psycopg.connect(POSTGRES, autocommit=True)
    except psycopg.OperationalError as error:
        if os.environ.get("OOMBUDSMAN_TEST_POSTGRES") == "required":
            raise
        pytest.skip(f"no PostgreSQL at 127.0.0.1:5432 for user postgres: {str(error).splitlines()[0][:80]}")
    name = f"oombudsman_test_{secrets.token_hex(6)}"
    with server:
        server.execute(f'CREATE DATABASE "{name}"')
        try:
            yield f"postgresql://postgres@127.0.0.1:5432/{name}"
        finally:
            server.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture
def body() -> dict[str, Any]:
    """The main job, fresh to change."""
    return {"job": {"recipe": "llama3_8b_pretrain_config"}, "cluster": {"gpu": "h100-80gb", "num_gpus": 2}}


@pytest.fixture
def estimator_says(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Make the estimator give this answer, or raise this exception."""

    def say(answer: Any) -> None:
        def entry_point(_request: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        fake = types.ModuleType("estimator.answers")
        vars(fake).update(estimate_answer=entry_point, recommend_answer=entry_point)
        monkeypatch.setitem(sys.modules, "estimator.answers", fake)

    return say
