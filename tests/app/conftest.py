"""The real application on a migrated temporary database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from app.api import create_app
from app.settings import Settings

LLAMA = {"job": {"recipe": "llama3_8b_pretrain_config"}, "cluster": {"gpu": "h100-80gb", "num_gpus": 2}}


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(data_dir=tmp_path_factory.mktemp("data"), log_level="error")


@pytest.fixture(scope="session")
def client(settings: Settings) -> Iterator[TestClient]:
    with TestClient(create_app(settings), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def own_settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data", log_level="error", max_estimate_body_bytes=4096)


@pytest.fixture
def own_client(own_settings: Settings) -> Iterator[TestClient]:
    with TestClient(create_app(own_settings), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def body() -> dict[str, Any]:
    """The main job, fresh to change."""
    return {name: dict(value) for name, value in LLAMA.items()}
