"""GET /recipes, GET /recipes/{name}, GET /gpus."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from app.services.answers import encode
from app.services.recipes import recipe_row
from estimator.catalog import list_gpus, list_recipes


def test_pages_hold_every_recipe_once(client: TestClient) -> None:
    offset: int | None = 0
    names: list[tuple[str, str]] = []
    while offset is not None:
        page = client.get("/recipes", params={"limit": 200, "offset": offset}).json()
        names += [(item["name"], item["module"]) for item in page["items"]]
        assert page["total"] == len(list_recipes())
        offset = page["next_offset"]
    assert names == [(recipe.name, recipe.module) for recipe in list_recipes()]


def test_filters(client: TestClient) -> None:
    found = client.get("/v1/recipes", params={"q": "llama3 8b", "task": "pretrain", "gpu": "h100-80gb"}).json()
    assert 0 < found["total"] < 50
    for item in found["items"]:
        assert item["task"] == "pretrain"
        assert item["gpu"] == "h100"
    assert client.get("/recipes", params={"q": "no such thing"}).json()["total"] == 0
    assert client.get("/recipes", params={"gpu": "no such thing"}).json()["total"] == 0


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "offset=-1", "colour=red"])
def test_wrong_filters_are_422(client: TestClient, query: str) -> None:
    response = client.get(f"/recipes?{query}")
    assert response.status_code == 422
    assert response.json()["errors"][0]["path"] == f"query.{query.partition('=')[0]}"


def test_one_recipe_by_name_and_by_alias(client: TestClient) -> None:
    by_alias = client.get("/recipes/llama3_8b_pretrain_config").json()
    by_name = client.get(f"/recipes/{by_alias['name']}").json()
    assert by_name == by_alias
    assert by_alias["document"]["model"]["hidden_size"] == 4096


def test_an_unknown_recipe_names_the_nearest(client: TestClient) -> None:
    response = client.get("/recipes/llama3_8b_pretrain_confg")
    assert response.status_code == 404
    [error] = response.json()["errors"]
    assert error["path"] == "name"
    assert "llama3_8b_pretrain_config" in error["suggestion"]


def test_a_name_of_two_modules_needs_the_module(client: TestClient) -> None:
    names = [recipe.name for recipe in list_recipes()]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is None:
        pytest.skip("every recipe's name is unique")
    response = client.get(f"/recipes/{twice}")
    assert response.status_code == 409
    assert response.json()["type"] == "/problems/ambiguous"
    modules = [recipe.module for recipe in list_recipes() if recipe.name == twice]
    assert client.get(f"/recipes/{twice}", params={"module": modules[1]}).json()["module"] == modules[1]
    assert client.get(f"/recipes/{twice}", params={"module": "nowhere"}).status_code == 404


def test_every_recipe_can_be_sent() -> None:
    for recipe in list_recipes()[::7]:
        assert encode(recipe_row(recipe))


def test_gpus(client: TestClient) -> None:
    items = client.get("/gpus").json()["items"]
    assert [item["name"] for item in items] == [gpu.name for gpu in list_gpus()]
    assert all(item["total_bytes"] > 0 and item["source"] for item in items)
