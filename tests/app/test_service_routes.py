"""Liveness, readiness, versions, the OpenAPI document, request ids."""

from __future__ import annotations

import uuid
from typing import Any

from sqlalchemy import create_engine, text
from starlette.testclient import TestClient

from app.problems import KINDS
from app.settings import Settings
from estimator import ESTIMATOR_VERSION


def test_health_and_version(client: TestClient) -> None:
    assert client.get("/livez").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ready"}
    assert client.get("/version").json()["estimator_version"] == ESTIMATOR_VERSION


def test_not_ready_when_the_database_is_at_another_revision(own_client: TestClient, own_settings: Settings) -> None:
    engine = create_engine(own_settings.resolved_database_url)
    for revision, words in (("0000", "newer"), ("9999", "newer")):
        with engine.begin() as connection:
            connection.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})
        response = own_client.get("/readyz")
        assert response.status_code == 503
        assert response.headers["content-type"] == "application/problem+json"
        assert words in response.json()["detail"]
    engine.dispose()
    assert own_client.get("/livez").status_code == 200


def test_a_request_id_is_kept_or_made(client: TestClient) -> None:
    mine = str(uuid.uuid4())
    assert client.get("/livez", headers={"X-Request-ID": mine}).headers["x-request-id"].replace(
        "-", ""
    ) == mine.replace("-", "")
    assert client.get("/nothing").headers["x-request-id"]


def test_every_type_of_problem_has_an_address(client: TestClient) -> None:
    for slug, kind in KINDS.items():
        assert client.get(f"/problems/{slug}").json()["status"] == kind.status
    assert client.get("/problems/no-such").status_code == 404


def _references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [name for value in node.values() for name in _references(value)]
    return [name for value in node for name in _references(value)] if isinstance(node, list) else []


def test_the_openapi_document_is_whole(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for reference in _references(document):
        assert reference.startswith("#/components/schemas/")
        assert reference.rpartition("/")[2] in schemas
    for path, item in document["paths"].items():
        for operation in item.values():
            assert operation["summary"], path
            for status, response in operation["responses"].items():
                if int(status) >= 400:
                    assert list(response["content"]) == ["application/problem+json"], (path, status)


def test_no_page_that_loads_scripts_from_elsewhere(client: TestClient) -> None:
    assert client.get("/docs").status_code == 404
    assert client.get("/redoc").status_code == 404
