"""API keys, scopes, rate limits: what is open, what is not, and that nothing is by accident."""

from __future__ import annotations

import base64
import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from starlette.routing import Route
from starlette.testclient import TestClient
from typer.testing import CliRunner

from app.api import create_app
from app.api.access import is_named, scope_of
from app.cli.commands import application
from app.db.session import Database
from app.services import keys
from app.settings import Settings, get_settings

MAIN = {"job": {"recipe": "llama3_8b_pretrain_config"}, "cluster": {"gpu": "h100-80gb", "num_gpus": 2}}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, log_level="error")


@pytest.fixture
def served(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setattr("app.api.access.KEYS_KNOWN_SECONDS", 0.0)
    with TestClient(create_app(settings), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def database(settings: Settings, served: TestClient) -> Iterator[Database]:
    found = Database(settings)
    yield found
    found.close()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def all_routes(router: Any) -> Iterator[Route]:
    """Those of included routers too; FastAPI keeps them nested."""
    for route in router.routes:
        if isinstance(route, Route):
            yield route
        elif (inner := getattr(route, "original_router", None)) is not None:
            yield from all_routes(inner)


def test_every_route_is_in_the_table(settings: Settings) -> None:
    routes = list(all_routes(create_app(settings)))
    assert len(routes) > 25
    for route in routes:
        path = route.path.replace("{run_id:path}", "x")
        for method in route.methods or ():
            if method != "HEAD":
                assert is_named(method, path), f"{method} {route.path} is not in app.api.access.RULES"


def test_what_the_table_does_not_name_needs_an_admin() -> None:
    assert scope_of("DELETE", "/runs") == "admin"
    assert scope_of("GET", "/a-new-route") == "admin"
    assert scope_of("HEAD", "/v1/gpus") == scope_of("GET", "/gpus") == "read"


def test_open_until_the_first_key_exists(served: TestClient, database: Database) -> None:
    assert served.post("/recommend", json=MAIN).status_code == 200
    key = keys.create(database, "me", ["recommend"], 1)
    refused = served.post("/recommend", json=MAIN)
    assert refused.status_code == 401
    assert refused.json()["type"] == "/problems/unauthorized"
    assert "Bearer" in refused.headers["www-authenticate"]
    made = served.post("/recommend", json=MAIN, headers=bearer(key))
    assert made.status_code == 200
    identity = made.json()["id"]
    for public in (
        f"/recommendations/{identity}",
        f"/v1/recommendations/{identity}",
        f"/r/{identity}",
        "/livez",
        "/readyz",
    ):
        assert served.get(public).status_code == 200
    assert served.get("/").status_code == 401


def test_scopes(served: TestClient, database: Database) -> None:
    reader = keys.create(database, "reader", ["read"], None)
    assert served.get("/gpus", headers=bearer(reader)).status_code == 200
    refused = served.post("/recommend", json=MAIN, headers=bearer(reader))
    assert refused.status_code == 403
    assert "recommend" in refused.json()["detail"]
    admin = keys.create(database, "admin", ["admin"], None)
    assert served.post("/estimate", json=MAIN, headers=bearer(admin)).status_code == 200


def test_a_body_is_not_read_before_the_key(served: TestClient, database: Database) -> None:
    keys.create(database, "x", ["read"], None)
    assert served.post("/recommend", content=b"{not json").status_code == 401


@pytest.mark.parametrize(
    "change",
    [
        lambda key: key[:-1] + ("a" if key[-1] != "a" else "b"),
        lambda key: key.replace("oom_", "oom-"),
        lambda key: "",
        lambda key: key + "x",
        lambda key: "oom_aaaaaaaa_" + key[13:],
        lambda key: key[:13] + "'; DROP TABLE api_keys; --",
        lambda key: "\xff\xfe",
    ],
)
def test_wrong_keys(served: TestClient, database: Database, change: Any) -> None:
    key = keys.create(database, "x", ["admin"], None)
    value = f"Bearer {change(key)}".encode("latin-1")
    assert served.get("/gpus", headers={"Authorization": value}).status_code == 401  # type: ignore[dict-item]


def test_expired_and_revoked_keys(served: TestClient, database: Database) -> None:
    ended = keys.create(database, "ended", ["admin"], 1)
    with database.transaction() as session:
        past = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=1)
        session.execute(text("UPDATE api_keys SET expires_at = :past"), {"past": past.replace(tzinfo=None)})
    assert served.get("/gpus", headers=bearer(ended)).status_code == 401
    revoked = keys.create(database, "revoked", ["admin"], None)
    assert served.get("/gpus", headers=bearer(revoked)).status_code == 200
    keys.revoke(database, revoked[:12])
    assert served.get("/gpus", headers=bearer(revoked)).status_code == 401
    assert served.get("/gpus").status_code == 401  # an expired key does not open the service


def test_a_browser_may_send_the_key_as_password(served: TestClient, database: Database) -> None:
    key = keys.create(database, "x", ["recommend", "read"], None)
    basic = base64.b64encode(f"anybody:{key}".encode()).decode()
    assert served.get("/", headers={"Authorization": f"Basic {basic}"}).status_code == 200
    assert served.get("/", headers={"Authorization": "Basic ???"}).status_code == 401


def test_keys_are_stored_as_hashes(database: Database) -> None:
    key = keys.create(database, "x", ["read"], None)
    with database.transaction() as session:
        stored = str(session.execute(text("SELECT * FROM api_keys")).all())
    assert key.rpartition("_")[2] not in stored
    assert key.split("_", 2)[2] not in stored


def test_the_last_use_is_noted(served: TestClient, database: Database) -> None:
    key = keys.create(database, "x", ["read"], None)
    assert keys.every(database)[0].last_used_at is None
    served.get("/gpus", headers=bearer(key))
    used = keys.every(database)[0].last_used_at
    assert used is not None
    served.get("/gpus", headers=bearer(key))
    assert keys.every(database)[0].last_used_at == used


@pytest.mark.parametrize(("named", "status"), [(None, 401), ("X-Forwarded-User", 200)])
def test_a_trusted_proxy_is_off_by_default(tmp_path: Path, named: str | None, status: int) -> None:
    settings = Settings(data_dir=tmp_path, log_level="error", require_api_key=True, trusted_user_header=named)
    with TestClient(create_app(settings)) as client:
        assert client.get("/gpus", headers={"X-Forwarded-User": "ada"}).status_code == status
        assert client.get("/gpus").status_code == 401
        assert client.post("/calibrations", json={}, headers={"X-Forwarded-User": "ada"}).status_code in (401, 403)


def test_rate_limits_say_how_long_to_wait(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, log_level="error", rate_limit_per_address=3, rate_limit_per_key=2)
    with TestClient(create_app(settings)) as client:
        assert [client.get("/livez").status_code for _ in range(4)] == [200, 200, 200, 429]
        limited = client.get("/livez")
        assert limited.json()["type"] == "/problems/too-many-requests"
        assert 1 <= int(limited.headers["retry-after"]) <= 60
        database = Database(settings)
        key = keys.create(database, "x", ["read"], None)
        database.close()
        assert [client.get("/gpus", headers=bearer(key)).status_code for _ in range(3)] == [200, 200, 429]


def test_without_a_database_it_says_so(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, log_level="error", database_timeout_seconds=0.2)
    with TestClient(create_app(settings), raise_server_exceptions=False) as client:
        with client.app.state.database.transaction() as session:  # type: ignore[attr-defined]
            session.execute(text("DROP TABLE api_keys"))
        assert client.get("/gpus").status_code == 503
        assert client.get("/livez").status_code == 200


def command(*arguments: str) -> Any:
    get_settings.cache_clear()
    return CliRunner().invoke(application, ["keys", *arguments])


def test_the_command() -> None:
    assert "no key" in command("list").output
    key = command("create", "ci", "--scope", "ingest", "--days", "30").output.strip()
    assert key.startswith("oom_")
    assert "ingest" in command("list").output
    assert key.rpartition("_")[2] not in command("list").output
    assert command("revoke", key[:12]).output.strip() == "revoked"
    assert "revoked" in command("list").output
    for wrong in (["create", "x", "--scope", "root"], ["create", "x", "--days", "0"], ["revoke", "oom_nothing1"]):
        result = command(*wrong)
        assert result.exit_code == 2, result.output
