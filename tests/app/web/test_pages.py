"""Pages without a browser: what they say, what they refuse, what they never do."""

from __future__ import annotations

import gzip
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from starlette.testclient import TestClient

from app.api import create_app
from app.db.session import create_database_engine
from app.settings import Settings
from app.web.charts import bars, course_plot, pareto_plot, scatter_plot
from app.web.forms import filled_from, from_values, override_list, request_of
from app.web.groups import GROUPS, grouped

RECORDS = Path(__file__).resolve().parents[3] / "estimator" / "data" / "measured" / "dense_check.jsonl"
MAIN = {"recipe": "llama3_8b_pretrain_config", "gpu": "h100-80gb", "num_gpus": "2", "action": "recommend"}
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>{{7*7}}'
FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB "
    "of which 0.25 GiB is free.\n"
)


@pytest.fixture
def web(tmp_path: Path) -> Any:
    settings = Settings(data_dir=tmp_path, log_level="error", max_evidence_body_bytes=1 << 20)
    with TestClient(create_app(settings), raise_server_exceptions=False) as client:
        yield client


def ask(web: TestClient, **changes: str) -> Any:
    return web.post("/", data=MAIN | changes, follow_redirects=False)


def permalink(web: TestClient, **changes: str) -> str:
    answer = ask(web, **changes)
    assert answer.status_code == 303, answer.text
    return str(answer.headers["location"])


class Tags(HTMLParser):
    """Names and attributes of all tags, in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_from_the_form_to_a_permalink(web: TestClient) -> None:
    address = permalink(web)
    page = web.get(address)
    assert page.status_code == 200
    assert "cfg.model.pipeline_model_parallel_size = 2" in page.text
    assert "Megatron FSDP optim_grads_params" in page.text
    assert web.get(address).text == page.text
    identity = address.rpartition("/")[2]
    assert web.get(f"/recommendations/{identity}").json()["id"] == identity
    tags = Tags(page.text).found
    meta = {a.get("property") or a.get("name"): a.get("content") for tag, a in tags if tag == "meta"}
    assert "llama3_8b_pretrain_config on 2 x h100-80gb" in str(meta["og:title"])
    assert "100.5 GiB" in str(meta["og:description"])


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"recipe": "llama3_8b_pretrain_confg"}, "recipe", "one of llama3_8b"),
        ({"recipe": "", "log": ""}, "recipe", "Name a recipe"),
        ({"gpu": "h99"}, "gpu", "No GPU is called"),
        ({"gpu": ""}, "gpu", "which GPU"),
        ({"num_gpus": "two"}, "num_gpus", "whole number"),
        ({"num_gpus": "0"}, "num_gpus", "at least 1"),
        ({"num_gpus": "-3"}, "num_gpus", "whole number"),
        ({"num_gpus": "9" * 40}, "num_gpus", "at most"),
        ({"overrides": "model.hidden_sise=1"}, "overrides", "hidden_size"),
        ({"overrides": "not an override"}, "overrides", "a.b=c"),
        ({"config": "{"}, "config", "not JSON"),
        ({"config": '{"modell": {}}'}, "config", "model"),
    ],
)
def test_an_error_stands_beside_its_field_and_nothing_is_lost(
    web: TestClient, changes: dict[str, str], field: str, words: str
) -> None:
    typed = {"log": "what I pasted", "overrides": "train.micro_batch_size=2"} | changes
    page = ask(web, **typed)
    assert page.status_code == 422
    match = re.search(rf'id="{field}-error">([^<]+)<', page.text)
    assert match is not None, page.text[:3000]
    shown = match[1].replace("&#39;", "'").lower()
    assert words.lower() in shown or field == "overrides"
    marked = [a for _, a in Tags(page.text).found if a.get("id") == field]
    assert marked[0].get("aria-invalid") == "true"
    assert typed["log"] in page.text
    for name, value in (MAIN | typed).items():
        if name in ("recipe", "gpu", "num_gpus") and value:
            assert f'value="{value}"' in page.text


def test_a_kind_that_is_not_modelled_is_said(web: TestClient) -> None:
    page = ask(web, recipe="nemotron_nano_9b_v2_pretrain_config", num_gpus="16")
    assert page.status_code == 422
    assert "ot modelled yet: hybrid (Mamba) layers" in page.text


def test_evidence_fills_the_form(web: TestClient) -> None:
    log = "python run.py --recipe llama3_8b_pretrain_config train.micro_batch_size=2\nNVIDIA H100 80GB HBM3\n" + FULL
    page = web.post("/", data={"log": log, "action": "read"})
    assert page.status_code == 200
    assert 'value="llama3_8b_pretrain_config"' in page.text
    assert "read from your text" in page.text
    assert "What your text says" in page.text
    assert "cluster.num_gpus" in page.text
    assert web.post("/", data={"action": "read"}).status_code == 422


def test_a_file_is_kept_and_named(web: TestClient) -> None:
    file = {"file": (HOSTILE + ".log", (FULL * 3).encode())}
    page = web.post("/", data={"action": "read"}, files=file)
    assert page.status_code == 200
    assert "<script>alert" not in page.text
    hidden = [a for _, a in Tags(page.text).found if a.get("name") == "evidence_id"]
    evidence_id = hidden[0]["value"]
    assert str(evidence_id).startswith("ev_")
    address = permalink(web, evidence_id=str(evidence_id))
    assert "ran out of GPU memory" in web.get(address).text
    expired = ask(web, evidence_id="ev_" + "a" * 22)
    assert expired.status_code == 422
    assert "expire" in expired.text


def test_a_file_over_the_limit_is_refused(web: TestClient) -> None:
    page = web.post("/", data={"action": "read"}, files={"file": ("big.log", b"x" * (2 << 20))})
    assert page.status_code == 413


@pytest.mark.parametrize("name", ["recipe", "gpu", "num_gpus", "overrides", "log", "config", "evidence_name"])
def test_what_was_typed_is_escaped(web: TestClient, name: str) -> None:
    page = ask(web, **{name: HOSTILE, "num_gpus": HOSTILE})
    assert "<script>alert" not in page.text
    assert "<img src=x" not in page.text
    assert "49" not in re.findall(r"\{\{7\*7\}\}|49", page.text)


def test_hostile_logs_on_the_result_page(web: TestClient) -> None:
    address = permalink(web, log=f"{HOSTILE} {FULL}", overrides="logger.log_interval=1")
    page = web.get(address).text
    assert "<script>alert" not in page
    assert page.count("<script") == 1


def test_what_if_moves_bars_and_verdict(web: TestClient) -> None:
    address = permalink(web)
    part = web.get(f"{address}/what-if?tensor=2&context=1&recompute=mlp")
    assert part.status_code == 200
    assert "<html" not in part.text
    assert "Fits" in part.text
    assert "cfg.model.tensor_model_parallel_size = 2" in part.text
    whole = web.get(f"{address}?tensor=2&context=1&recompute=mlp").text
    assert "With these settings" in whole
    fsdp = web.get(f"{address}/what-if?strategy=optim_grads_params&recompute=full").text
    assert "cfg.ddp.use_megatron_fsdp = True" in fsdp
    for query in (
        "tensor=3",
        "pipeline=64",
        "strategy=optim_grads_params&pipeline=2",
        "micro_batch=x",
        "recompute=all",
    ):
        refused = web.get(f"{address}/what-if?{query}")
        assert refused.status_code == 200
        assert "notice" in refused.text, query


def test_what_if_costs_little(web: TestClient) -> None:
    """The server's share of a change, far under what a person notices; the median over a few."""
    address = permalink(web)
    web.get(f"{address}/what-if?tensor=2&context=1")
    costs = []
    for layers in (4, 8, 12, 16, 20):
        started = time.process_time()
        web.get(f"{address}/what-if?recompute=block-{layers}")
        costs.append(time.process_time() - started)
    assert sorted(costs)[2] < 0.5


def test_feedback_is_shown(web: TestClient) -> None:
    address = permalink(web)
    done = web.post(f"{address}/outcome", data={"rank": "1", "ran": "yes", "peak": "70.5"}, follow_redirects=False)
    assert done.status_code == 303
    assert "It ran, peak 70.5 GiB" in web.get(address).text
    web.post(f"{address}/outcome", data={"rank": "1", "ran": "no", "log": FULL})
    assert "It ran out of memory" in web.get(address).text
    for wrong, words in (
        ({"rank": "1"}, "Say whether it ran"),
        ({"rank": "1", "ran": "yes", "peak": "much"}, "not a number"),
        ({"rank": "19", "ran": "yes"}, "no rank 19"),
        ({"rank": "1", "ran": "yes", "peak": "1e9"}, "at most"),
    ):
        page = web.post(f"{address}/outcome", data=wrong)
        assert page.status_code == 422
        assert words in page.text


def test_runs_are_uploaded_and_compared(web: TestClient) -> None:
    assert "No run is stored" in web.get("/measured").text
    page = web.post("/measured", files={"file": ("runs.jsonl", RECORDS.read_bytes())})
    assert "60 stored, 0 known already" in page.text
    listed = web.get("/measured?strategy=optim_grads").text
    assert "dense-check-052" in listed
    assert "+14.46 %" in listed
    assert "dense-check-056" not in listed
    assert "no GPU is called" in web.get("/measured?gpu=h99").text
    bad = web.post("/measured", files={"file": ("runs.jsonl", b'{"run_id": "x"')})
    assert bad.status_code == 422
    assert "Nothing was stored" in bad.text
    assert web.post("/measured", data={"a": "b"}).status_code == 422


@pytest.mark.parametrize("identity", ["rec_nothing", "rec_" + "a" * 22, "x", "rec_%00", "rec_../../x"])
def test_an_unknown_permalink_says_what_to_do(web: TestClient, identity: str) -> None:
    page = web.get(f"/r/{identity}")
    assert page.status_code == 404
    if "/" not in identity:
        assert "Ask again on the start page" in page.text


def test_a_database_that_is_locked_or_gone_is_said(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, log_level="error", database_timeout_seconds=0.2)
    with TestClient(create_app(settings), raise_server_exceptions=False) as web:
        engine = create_database_engine(settings, immediate=True)
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM recommendations"))
            page = ask(web)
        engine.dispose()
        assert page.status_code == 503
        assert "Try again in a moment" in page.text
        assert permalink(web)


def test_answers_survive_a_restart(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, log_level="error")
    with TestClient(create_app(settings)) as web:
        address = permalink(web)
        before = web.get(address).text
    with TestClient(create_app(settings)) as web:
        assert web.get(address).text == before


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 303),
        ({"Origin": "http://testserver"}, 303),
        ({}, 303),
    ],
)
def test_forms_of_other_sites_are_refused(web: TestClient, headers: dict[str, str], status: int) -> None:
    assert web.post("/", data=MAIN, headers=headers, follow_redirects=False).status_code == status


def test_nothing_comes_from_elsewhere_and_pages_are_small(web: TestClient) -> None:
    address = permalink(web)
    files = {"/static/style.css", "/static/app.js", "/static/icon.svg"}
    sizes = {path: len(gzip.compress(web.get(path).content)) for path in files}
    for path, limit in (("/", 60_000), (address, 200_000), ("/measured", 60_000)):
        page = web.get(path)
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        for tag, attributes in Tags(page.text).found:
            assert "style" not in attributes
            assert not [name for name in attributes if name.startswith("on")], attributes
            for name in ("src", "action") if tag != "link" else ("href",):
                value = attributes.get(name)
                assert value is None or (value.startswith("/") and not value.startswith("//")), (tag, value)
        assert len(gzip.compress(page.content)) + sum(sizes.values()) < limit


@pytest.mark.parametrize("name", ["x.css", "../style.css", "..%2f..%2fsettings.py", "app.js%00", "base.html"])
def test_static_files_are_a_closed_list(web: TestClient, name: str) -> None:
    assert web.get(f"/static/{name}").status_code in (404, 422)


def test_groups_add_up_to_what_is_needed(web: TestClient) -> None:
    identity = permalink(web).rpartition("/")[2]
    answer = web.get(f"/recommendations/{identity}").json()
    for estimate in (answer["current"], *(r["estimate"] for r in answer["recommendations"])):
        assert sum(grouped(estimate).values()) == estimate["required_bytes"]
    known = {member for group in GROUPS for member in group.members}
    assert set(answer["current"]["components_at_peak"]) <= known


def test_pictures_of_nothing_are_empty() -> None:
    assert bars([], 1) == []
    assert (course_plot([], 1, ""), pareto_plot([], 1), scatter_plot([])) == ("", "", "")


def test_overrides_are_lines_or_one_script() -> None:
    assert override_list("a.b=1\r\n\n  c.d=2 ") == ["a.b=1", "c.d=2"]
    assert override_list("import torch\ncfg.a = 1") == ["import torch\ncfg.a = 1"]


def test_what_was_typed_wins_over_evidence() -> None:
    typed = from_values({"recipe": "mine"})
    answer = {"job": {"recipe": "theirs", "overrides": ["a=1"]}, "cluster": {"gpu": "h100-80gb"}, "missing": []}
    form = filled_from(typed, answer)
    assert (form.recipe, form.overrides, form.gpu) == ("mine", "a=1", "h100-80gb")
    assert form.filled == {"overrides", "gpu"}
    assert request_of(from_values(MAIN)).cluster.num_gpus == 2  # type: ignore[union-attr]
