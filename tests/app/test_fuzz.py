"""Whatever is sent, the answer is one of the documented ones and holds no traceback."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
KEYS = st.sampled_from(
    ["job", "cluster", "recipe", "module", "config", "overrides", "gpu", "num_gpus", "stack", "model", "train", "ddp",
     "hidden_size", "num_layers", "micro_batch_size", "constraints", "evidence", "log", "allow", "survival", "x"]
)  # fmt: skip
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["llama3_8b_pretrain_config", "h100-80gb", "model.hidden_size=1", "cfg.train.x = 1", "0x7"])
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=8), inner, max_size=4)
)


def _sound(response: Any) -> None:
    assert response.status_code in (200, 400, 413, 415, 422), response.text
    assert "Traceback" not in response.text
    if response.status_code != 200:
        assert response.headers["content-type"] == "application/problem+json"
        assert response.json()["errors"]
    else:
        response.json()


@QUICK
@given(document=VALUES, path=st.sampled_from(["/estimate", "/recommend"]))
def test_any_json(client: TestClient, document: Any, path: str) -> None:
    _sound(client.post(path, json=document))


@QUICK
@given(content=st.binary(max_size=200), path=st.sampled_from(["/estimate", "/recommend"]))
def test_any_bytes(client: TestClient, content: bytes, path: str) -> None:
    _sound(client.post(path, content=content, headers={"Content-Type": "application/json"}))


@QUICK
@given(
    config=st.dictionaries(st.sampled_from(["model", "train", "ddp", "optimizer", "checkpoint"]), VALUES, max_size=3),
    overrides=st.lists(st.text(max_size=40) | st.sampled_from(["train.micro_batch_size=2", "model.x=1"]), max_size=3),
    num_gpus=st.integers(1, 64),
)
def test_any_job(client: TestClient, config: dict[str, Any], overrides: list[str], num_gpus: int) -> None:
    job = {"recipe": "llama3_8b_pretrain_config", "config": config, "overrides": overrides}
    body = {"job": job, "cluster": {"gpu": "h100-80gb", "num_gpus": num_gpus}}
    _sound(client.post("/estimate", json=body | {"survival": False}))


@QUICK
@given(key=KEYS, value=LEAVES, into=st.sampled_from(["", "job", "cluster"]))
def test_one_field_changed(client: TestClient, key: str, value: Any, into: str) -> None:
    body: dict[str, Any] = {
        "job": {"recipe": "llama3_8b_pretrain_config"},
        "cluster": {"gpu": "h100-80gb", "num_gpus": 2},
    }
    (body[into] if into else body)[key] = value
    _sound(client.post("/estimate", json=body))


@QUICK
@given(name=st.text(min_size=1, max_size=30), query=st.dictionaries(KEYS, st.text(max_size=10), max_size=3))
def test_any_question_about_the_catalogue(client: TestClient, name: str, query: dict[str, str]) -> None:
    for response in (client.get("/recipes", params=query), client.get(f"/recipes/{name.encode().hex()}", params=query)):
        assert response.status_code in (200, 404, 422)
        assert "Traceback" not in response.text
