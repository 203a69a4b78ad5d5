"""``oombudsman config``."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from app.cli.commands import application
from app.cli.configuration import without_password
from app.settings import Settings


def test_every_setting_is_listed_with_its_source_and_without_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOMBUDSMAN_DATABASE_URL", "postgresql://me:hunter2@db.example:5433/oom?sslpassword=hunter3")
    monkeypatch.setenv("OOMBUDSMAN_PORT", "8123")
    monkeypatch.delenv("OOMBUDSMAN_HOST", raising=False)
    result = CliRunner().invoke(application, ["config", "--json"])
    assert result.exit_code == 0, result.output
    rows = {row["variable"]: row for row in json.loads(result.output)["settings"]}
    assert set(rows) == {f"OOMBUDSMAN_{name.upper()}" for name in Settings.model_fields}
    assert rows["OOMBUDSMAN_PORT"]["value"] == 8123
    assert rows["OOMBUDSMAN_PORT"]["from"] == "environment"
    assert rows["OOMBUDSMAN_HOST"]["from"] == "default"
    assert rows["OOMBUDSMAN_DATABASE_URL"]["value"] == "postgresql://me:***@db.example:5433/oom?sslpassword=***"
    table = CliRunner().invoke(application, ["config"])
    assert table.exit_code == 0
    assert "OOMBUDSMAN_PORT" in table.output
    assert "hunter" not in result.output + table.output


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hun@ter2@host/oom",
        "postgresql://me:hun@t/er2@host/oom",
        "hunter2",
        "postgresql://me:h@host:er2/x",
    ],
)
def test_an_address_whose_password_is_not_certain_is_hidden_whole(url: str) -> None:
    assert without_password(url) == "***"


def test_what_cannot_be_used_is_named_without_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOMBUDSMAN_PORT", "hunter2")
    monkeypatch.setenv("OOMBUDSMAN_WORKERS", "0")
    result = CliRunner().invoke(application, ["config"])
    assert result.exit_code == 2
    assert "OOMBUDSMAN_PORT: " in result.output
    assert "OOMBUDSMAN_WORKERS: " in result.output
    assert "hunter2" not in result.output
