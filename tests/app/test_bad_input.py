"""Bodies that are not right: which status, which field, and what would be right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

JSON = {"Content-Type": "application/json"}
CLUSTER = {"gpu": "h100-80gb", "num_gpus": 2}


def _problem(response: Any, status: int, slug: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert problem["type"] == f"/problems/{slug}"
    assert problem["status"] == status
    assert problem["title"]
    assert "Traceback" not in response.text
    return problem


BROKEN = [
    (b"{", "is not JSON"),
    (b'{"a": 1,}', "is not JSON"),
    (b"\xff\xfe", "is not UTF-8: byte 0xff at offset 0"),
    ('{"job": "ü"}'.encode("latin-1"), "is not UTF-8"),
    ('{"job": 1}'.encode("utf-16"), "is not UTF-8"),
    (b'{"a": NaN}', "holds NaN"),
    (b'{"a": -Infinity}', "holds -Infinity"),
    (b'{"a": 1e999}', "holds 1e999"),
    (b'{"a": 1, "a": 2}', "has the key 'a' twice"),
    (b"[" * 100_000, "nested"),
    (b'{"a":' * 70 + b"1" + b"}" * 70, "nested"),
    (b'{"a": "\\ud800"}', "lone surrogate"),
    (b'{"\\udfff": 1}', "lone surrogate"),
    (b"1" * 5000, "too long"),
]


@pytest.mark.parametrize(("content", "message"), BROKEN, ids=[m for _, m in BROKEN])
@pytest.mark.parametrize("path", ["/estimate", "/v1/recommend"])
def test_what_is_not_json_is_400(client: TestClient, path: str, content: bytes, message: str) -> None:
    problem = _problem(client.post(path, content=content, headers=JSON), 400, "invalid-json")
    assert message in problem["errors"][0]["message"]


WRONG = [
    ({"jobs": {}}, "jobs", "is not a known key", "did you mean job?"),
    ({"gpu": "h100"}, "gpu", "is not a known key", "did you mean cluster.gpu?"),
    (
        {"cluster": {**CLUSTER, "gpu_per_node": 8}},
        "cluster.gpu_per_node",
        "is not a known key",
        "cluster.gpus_per_node",
    ),
    ({"job": {"recipes": "x"}}, "job.recipes", "is not a known key", "did you mean job.recipe?"),
    ({"cluster": {"gpu": "h100-80gb"}}, "cluster.num_gpus", "is required", None),
    ({"cluster": {**CLUSTER, "num_gpus": True}}, "cluster.num_gpus", "must be a number, not a boolean", None),
    ({"cluster": {**CLUSTER, "num_gpus": "2"}}, "cluster.num_gpus", "must be a number, not a string", None),
    ({"cluster": {**CLUSTER, "num_gpus": 2.5}}, "cluster.num_gpus", "must be a whole number, not 2.5", None),
    ({"cluster": {**CLUSTER, "num_gpus": 0}}, "cluster.num_gpus", "must be at least 1", None),
    ({"cluster": {**CLUSTER, "num_gpus": 10**30}}, "cluster.num_gpus", "must be at most 1000000", None),
    ({"cluster": {**CLUSTER, "memory_limit_bytes": -1}}, "cluster.memory_limit_bytes", "must be at least 1", None),
    ({"cluster": {**CLUSTER, "reserved_bytes": False}}, "cluster.reserved_bytes", "not a boolean", None),
    ({"cluster": {**CLUSTER, "total_bytes": 2**60}}, "cluster.total_bytes", "must be at most", None),
    ({"cluster": {**CLUSTER, "gpu": 7}}, "cluster.gpu", "must be a string", None),
    ({"cluster": {**CLUSTER, "gpu": "a\x00"}}, "cluster.gpu", "NUL", None),
    ({"cluster": None}, "cluster", "must be an object", None),
    ({"job": []}, "job", "must be an object", None),
    ({"job": {"config": []}}, "job.config", "must be an object", None),
    ({"job": {"overrides": "a=b"}}, "job.overrides", "must be a list", None),
    ({"job": {"overrides": ["a=b", 3]}}, "job.overrides[1]", "must be a string", None),
    ({"min_fit_probability": True}, "min_fit_probability", "must be a number, not a boolean", None),
    ({"min_fit_probability": 1}, "min_fit_probability", "must be less than 1", None),
    ({"min_fit_probability": None}, "min_fit_probability", "must be a number, not null", None),
    ({"stack": {"torch": 2.9}}, "stack.torch", "must be a string", None),
]


@pytest.mark.parametrize(("change", "path", "message", "suggestion"), WRONG, ids=[f"{w[1]}: {w[2]}" for w in WRONG])
@pytest.mark.parametrize("address", ["/estimate", "/recommend"])
def test_a_wrong_field_is_named(
    client: TestClient,
    body: dict[str, Any],
    address: str,
    change: dict[str, Any],
    path: str,
    message: str,
    suggestion: str | None,
) -> None:
    problem = _problem(client.post(address, json=body | change), 422, "invalid-request")
    [found] = [error for error in problem["errors"] if error["path"] == path]
    assert message in found["message"]
    assert (suggestion or "") in (found["suggestion"] or "")


def test_fields_of_one_route_only(client: TestClient, body: dict[str, Any]) -> None:
    for change, address, path in (
        ({"survival": 1}, "/estimate", "survival"),
        ({"pipeline_rank": True}, "/estimate", "pipeline_rank"),
        ({"pipeline_rank": -1}, "/estimate", "pipeline_rank"),
        ({"survival": True}, "/recommend", "survival"),
        ({"evidence": {"log": 3}}, "/recommend", "evidence.log"),
        ({"constraints": {"allow": "layout"}}, "/recommend", "constraints.allow"),
        ({"constraints": {"max_recommendations": 0}}, "/recommend", "constraints.max_recommendations"),
        ({"constraints": {"max_recommendations": True}}, "/recommend", "constraints.max_recommendations"),
    ):
        problem = _problem(client.post(address, json=body | change), 422, "invalid-request")
        assert [error["path"] for error in problem["errors"]] == [path]


def test_every_finding_is_reported_at_once(client: TestClient) -> None:
    problem = _problem(client.post("/recommend", json={"job": 1, "x": 2}), 422, "invalid-request")
    assert {error["path"] for error in problem["errors"]} == {"job", "x", "cluster"}


@pytest.mark.parametrize("content", [b"", b"null", b"[]", b"3", b'"x"'])
def test_a_body_that_is_no_object(client: TestClient, content: bytes) -> None:
    problem = _problem(client.post("/estimate", content=content, headers=JSON), 422, "invalid-request")
    assert problem["errors"][0]["path"] == "body"


def test_whole_numbers_as_json_writes_them(client: TestClient, body: dict[str, Any]) -> None:
    content = json.dumps(body).replace('"num_gpus": 2', '"num_gpus": 2.0')
    assert client.post("/estimate", content=content, headers=JSON).status_code == 200
    assert client.post("/estimate", content=b"\xef\xbb\xbf" + content.encode(), headers=JSON).status_code == 200


@pytest.mark.parametrize("media_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/yaml"])
def test_other_media_types_are_415(client: TestClient, media_type: str | None) -> None:
    headers = {} if media_type is None else {"Content-Type": media_type}
    problem = _problem(client.post("/estimate", content=b"{}", headers=headers), 415, "unsupported-media-type")
    assert problem["errors"][0]["suggestion"] == "Content-Type: application/json"


def _chunks(size: int) -> Iterator[bytes]:
    for _ in range(size // 64):
        yield b" " * 64


@pytest.mark.parametrize(("path", "size"), [("/estimate", 4096), ("/v1/estimate", 4096), ("/recommend", 8192)])
def test_a_body_over_the_limit_is_413(own_client: TestClient, path: str, size: int) -> None:
    for content in (b" " * size, _chunks(size)):
        problem = _problem(own_client.post(path, content=content, headers=JSON), 413, "body-too-large")
        assert problem["errors"][0]["path"] == "body"


def test_limits_are_of_a_route(own_client: TestClient, body: dict[str, Any]) -> None:
    padded = json.dumps(body) + " " * 3000
    assert own_client.post("/estimate", content=padded, headers=JSON).status_code == 413
    assert own_client.post("/recommend", content=padded, headers=JSON).status_code == 200


def test_addresses_and_methods(client: TestClient) -> None:
    assert "/nothing" in _problem(client.get("/nothing"), 404, "not-found")["detail"]
    _problem(client.get("/v2/recommend"), 404, "not-found")
    response = client.delete("/recommend")
    _problem(response, 405, "method-not-allowed")
    assert response.headers["allow"] == "POST"
    _problem(client.post("/gpus"), 405, "method-not-allowed")
