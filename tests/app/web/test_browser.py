"""Pages in a real browser against the real server: the whole way, with and without JavaScript, and axe-core's rules.

Needs Chromium (CHROMIUM, else /usr/bin/chromium); skipped with a message where there is none, required in CI.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
REQUIRED = os.environ.get("OOMBUDSMAN_TEST_BROWSER") == "required"
RECORDS = Path(__file__).resolve().parents[3] / "estimator" / "data" / "measured" / "dense_check.jsonl"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
OOM = (
    "python run.py --recipe llama3_8b_pretrain_config\nNVIDIA H100 80GB HBM3\n"
    "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1000.00 MiB. GPU 0 has a total capacity of "
    "79.11 GiB of which 0.25 GiB is free. Including non-PyTorch memory, this process has 78.86 GiB memory in use. Of "
    "the allocated memory 77.12 GiB is allocated by PyTorch, and 0.35 GiB is reserved by PyTorch but unallocated.\n"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not REQUIRED and not Path(CHROMIUM).exists(), reason="no Chromium: apt-get install chromium, or set CHROMIUM"
    ),
]


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("served")
    environment = {**os.environ, "OOMBUDSMAN_DATA_DIR": str(folder), "OOMBUDSMAN_LOG_LEVEL": "error"}
    program = [str(Path(sys.executable).parent / "oombudsman"), "serve", "--port", str(port)]
    process = subprocess.Popen(program, env=environment)
    address = f"http://127.0.0.1:{port}"
    for _ in range(150):
        try:
            urllib.request.urlopen(address + "/livez", timeout=1).close()
            break
        except OSError:
            time.sleep(0.1)
    yield address
    process.terminate()
    process.wait(timeout=30)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture(params=[True, False], ids=["with JavaScript", "without"])
def page(request: pytest.FixtureRequest, browser: Any, origin: str) -> Iterator[Any]:
    """A page that records every request to another origin and every error of a script or of the policy."""
    context = browser.new_context(java_script_enabled=request.param, viewport={"width": 1100, "height": 900})
    if request.param:
        context.grant_permissions(["clipboard-read", "clipboard-write"], origin=origin)
    yield from watched(context, origin)


def watched(context: Any, origin: str) -> Iterator[Any]:
    page = context.new_page()
    page.set_default_timeout(15_000)
    elsewhere: list[str] = []
    errors: list[str] = []
    page.on("request", lambda r: None if r.url.startswith((origin, "data:", "about:")) else elsewhere.append(r.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" and "status of 4" not in m.text else None)
    yield page
    context.close()
    assert elsewhere == []
    assert errors == []


def has_script(page: Any) -> bool:
    return bool(page.locator("button.copy:visible").count())


def test_from_a_pasted_error_to_a_copied_override(page: Any, origin: str) -> None:
    page.goto(origin + "/")
    page.fill("#log", OOM)
    page.click("button[value=read]")
    assert page.input_value("#recipe") == "llama3_8b_pretrain_config"
    assert page.input_value("#gpu") == "h100-80gb"
    assert "Still missing" in page.text_content("main")
    page.fill("#num_gpus", "2")
    page.click("button.primary")
    page.wait_for_url("**/r/rec_*")
    assert "Does not fit" in page.title()
    text = page.text_content("#text-1-python")
    assert "cfg.model.pipeline_model_parallel_size = 2" in text
    if has_script(page):
        page.locator("button[data-copy=text-1-python]").click()
        page.wait_for_function("document.querySelector('button[data-copy=text-1-python]').textContent === 'Copied'")
        assert page.evaluate("navigator.clipboard.readText()") == text


def test_what_if(page: Any, origin: str) -> None:
    page.goto(origin + "/?recipe=llama3_8b_pretrain_config&gpu=h100-80gb&num_gpus=2")
    page.click("button.primary")
    page.wait_for_url("**/r/rec_*")
    page.select_option("#w-tensor", "2")
    page.select_option("#w-context", "1")
    page.select_option("#w-recompute", "mlp")
    if not has_script(page):
        page.click("form.whatif button")
    verdict = page.locator("#what-if-result .verdict strong")
    verdict.wait_for()
    page.wait_for_timeout(300)
    assert verdict.text_content() == "Fits"
    assert "recompute=mlp" in page.url
    assert page.input_value("#w-recompute") == "mlp"


def test_upload_and_feedback(page: Any, origin: str) -> None:
    page.goto(origin + "/measured")
    page.set_input_files("#runs-file", str(RECORDS))
    page.click("form[enctype] button")
    page.get_by_text("stored,").wait_for()
    assert "dense-check-052" in page.text_content("main")
    page.goto(origin + "/?recipe=llama3_8b_pretrain_config&gpu=h100-80gb&num_gpus=2")
    page.click("button.primary")
    page.wait_for_url("**/r/rec_*")
    page.check("input[name=ran][value=no]")
    page.fill("#f-log", OOM)
    page.click("#feedback button")
    page.get_by_text("It ran out of memory").first.wait_for()


def test_bad_input_loses_nothing(page: Any, origin: str) -> None:
    page.goto(origin + "/")
    page.fill("#recipe", "llama3_8b_pretrain_confg")
    page.fill("#gpu", "h100-80gb")
    page.fill("#num_gpus", "2")
    page.fill("#overrides", "train.micro_batch_size=2")
    page.click("button.primary")
    page.locator("#recipe-error").wait_for()
    assert page.input_value("#overrides") == "train.micro_batch_size=2"
    assert page.get_attribute("#recipe", "aria-describedby") == "recipe-error"


def test_by_keyboard_alone(browser: Any, origin: str) -> None:
    context = browser.new_context(viewport={"width": 1100, "height": 900})
    for page in watched(context, origin):
        page.goto(origin + "/")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        for _ in range(4):
            page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "recipe"
        page.keyboard.type("llama3_8b_pretrain_config")
        page.keyboard.press("Tab")
        page.keyboard.type("h100-80gb")
        page.keyboard.press("Tab")
        page.keyboard.type("2")
        page.keyboard.press("Enter")
        page.wait_for_url("**/r/rec_*")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1100, 360])
def test_axe_finds_nothing_and_nothing_overflows(browser: Any, origin: str, scheme: str, width: int) -> None:
    """axe-core's default rules, none disabled, on every page with everything opened."""
    axe = files("axe_playwright_python").joinpath("axe.min.js").read_text()
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800}, bypass_csp=True)
    page = context.new_page()
    page.goto(origin + "/?recipe=llama3_8b_pretrain_config&gpu=h100-80gb&num_gpus=2")
    page.click("button.primary")
    page.wait_for_url("**/r/rec_*")
    answer = page.url
    addresses = [origin + "/", answer, answer + "?tensor=2&context=1", origin + "/measured", origin + "/r/rec_none"]
    for number, address in enumerate([*addresses, "evidence", "errors"]):
        if address == "evidence":
            page.goto(origin + "/")
            page.fill("#log", OOM)
            page.click("button[value=read]")
        elif address == "errors":
            page.fill("#num_gpus", "two")
            page.click("button.primary")
            page.locator("#num_gpus-error").wait_for()
        else:
            page.goto(address)
        page.evaluate(
            "for (const d of document.querySelectorAll('details')) { d.removeAttribute('name'); d.open = true }"
        )
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{address} ({number}) is {wide} px too wide"
        page.evaluate(axe)
        found = page.evaluate("axe.run()")
        violations = [(v["id"], [node["target"] for node in v["nodes"]][:3]) for v in found["violations"]]
        assert violations == [], f"{address}: {violations}"
    context.close()
