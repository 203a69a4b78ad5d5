"""POST /estimate, POST /recommend and what is kept of them, with the real estimator."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import create_engine, text
from starlette.testclient import TestClient

from app.api.answers import EstimateAnswer, RecommendAnswer
from app.api.examples import EXAMPLES
from app.settings import Settings
from estimator.errors import FieldProblem, JobError, NotModelled


def _num_rows(settings: Settings) -> int:
    engine = create_engine(settings.resolved_database_url)
    with engine.connect() as connection:
        found = connection.execute(text("SELECT count(*) FROM recommendations")).scalar_one()
    engine.dispose()
    return int(found)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_the_documented_examples_run(client: TestClient, name: str, prefix: str) -> None:
    for path, model in (("/estimate", EstimateAnswer), ("/recommend", RecommendAnswer)):
        response = client.post(prefix + path, json=EXAMPLES[name]["value"])
        assert response.status_code == 200, response.text
        model.model_validate(response.json())


def test_an_estimate_adds_up(client: TestClient, body: dict[str, Any]) -> None:
    answer = client.post("/estimate", json=body).json()
    assert sum(answer["components_at_peak"].values()) == answer["peak_allocated_bytes"]
    assert answer["fits"] is False
    assert answer["required_bytes"] > answer["usable_bytes"]


def test_without_survival_there_is_a_bound_and_no_verdict_of_fit(client: TestClient, body: dict[str, Any]) -> None:
    whole = client.post("/estimate", json=body).json()
    quick = client.post("/estimate", json=body | {"survival": False}).json()
    assert (quick["survival_bytes"], quick["fit_probability"], quick["headroom_bytes"]) == (None, None, None)
    assert quick["peak_allocated_bytes"] == whole["peak_allocated_bytes"]
    assert quick["usable_bytes"] < quick["required_bytes"] <= whole["required_bytes"]
    assert quick["fits"] is False  # the bound alone says so
    assert "lower bound" in quick["assumptions"][0]
    roomy = body | {"cluster": {"gpu": "b300", "num_gpus": 2}, "survival": False}
    assert client.post("/estimate", json=roomy).json()["fits"] is None


def test_a_recommendation_is_kept_as_it_was_sent(own_client: TestClient, body: dict[str, Any]) -> None:
    made = own_client.post("/recommend", json=body)
    address = made.headers["content-location"]
    assert address == f"/recommendations/{made.json()['id']}"
    for prefix in ("", "/v1"):
        kept = own_client.get(prefix + address)
        assert kept.content == made.content
        assert kept.headers["etag"] == made.headers["etag"]
        assert "immutable" in kept.headers["cache-control"]
    assert own_client.get(address + "/request").json() == body


@pytest.mark.parametrize("header", ["{}", "W/{}", '"x", {}', "*"])
def test_who_has_it_already_gets_304(own_client: TestClient, body: dict[str, Any], header: str) -> None:
    made = own_client.post("/recommend", json=body)
    again = own_client.get(
        made.headers["content-location"], headers={"If-None-Match": header.format(made.headers["etag"])}
    )
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == made.headers["etag"]
    other = own_client.get(made.headers["content-location"], headers={"If-None-Match": '"other"'})
    assert other.status_code == 200


def test_ids_are_not_guessable(own_client: TestClient, body: dict[str, Any], estimator_says: Any) -> None:
    estimator_says({"outcome": "fits_already"})
    ids = {own_client.post("/recommend", json=body).json()["id"] for _ in range(20)}
    assert len(ids) == 20
    assert all(len(name) >= 4 + 22 for name in ids)


@pytest.mark.parametrize("name", ["rec_missing", "x", "%00", "rec_%F0%9F%98%80", "a" * 64, "' OR 1=1 --"])
def test_an_unknown_id_is_404(client: TestClient, name: str) -> None:
    response = client.get(f"/recommendations/{name}")
    assert response.status_code == 404
    assert response.headers["content-type"] == "application/problem+json"


def test_what_the_row_says(own_client: TestClient, own_settings: Settings, body: dict[str, Any]) -> None:
    made = own_client.post("/recommend", json=body).json()
    engine = create_engine(own_settings.resolved_database_url)
    with engine.connect() as connection:
        row = connection.execute(text("SELECT * FROM recommendations")).mappings().one()
    engine.dispose()
    assert row["id"] == made["id"]
    assert row["kind"] == "recommend"
    assert row["schema_version"] == made["schema_version"]
    assert row["estimator_version"]


REFUSED = [
    (JobError([FieldProblem("job.recipe", "no recipe is called 'x'", "y")]), "/problems/invalid-job"),
    (NotModelled([FieldProblem("job.config.model.num_moe_experts", "is 8")]), "/problems/not-modelled"),
]


@pytest.mark.parametrize(("error", "kind"), REFUSED, ids=["invalid-job", "not-modelled"])
def test_what_the_estimator_refuses_is_a_problem_and_not_kept(
    own_client: TestClient,
    own_settings: Settings,
    body: dict[str, Any],
    estimator_says: Any,
    error: Exception,
    kind: str,
) -> None:
    estimator_says(error)
    for path in ("/estimate", "/recommend"):
        response = own_client.post(path, json=body)
        assert response.status_code == 422
        problem = response.json()
        assert problem["type"] == kind
        assert problem["errors"][0]["path"].startswith("job.")
    if kind.endswith("not-modelled"):
        assert problem["fields"] == ["job.config.model.num_moe_experts"]
    else:
        assert problem["errors"][0]["suggestion"] == "y"
    assert _num_rows(own_settings) == 0


@pytest.mark.parametrize("answer", [RuntimeError("secret /etc/passwd"), {"x": float("nan")}, {"x": object()}])
def test_a_fault_is_500_without_a_traceback(
    own_client: TestClient, own_settings: Settings, body: dict[str, Any], estimator_says: Any, answer: Any
) -> None:
    estimator_says(answer)
    response = own_client.post("/recommend", json=body)
    assert response.status_code == 500
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["request_id"] == response.headers["x-request-id"]
    assert "secret" not in response.text
    assert "Traceback" not in response.text
    assert _num_rows(own_settings) == 0


def test_a_database_that_cannot_store_is_503(
    own_client: TestClient, own_settings: Settings, body: dict[str, Any], estimator_says: Any
) -> None:
    estimator_says({"outcome": "fits_already"})
    engine = create_engine(own_settings.resolved_database_url)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE recommendations RENAME TO hidden"))
    engine.dispose()
    response = own_client.post("/recommend", json=body)
    assert response.status_code == 503
    assert response.json()["type"] == "/problems/unavailable"
    assert "hidden" not in response.text
    assert "SELECT" not in response.text
