"""The command line, run as a program where that matters and in this process where it does not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from starlette.testclient import TestClient
from typer.testing import CliRunner, Result

from app.cli.commands import application
from app.db import migrations
from app.settings import Settings, get_settings
from estimator import ESTIMATOR_VERSION

MAIN = ["recommend", "--recipe", "llama3_8b_pretrain_config", "--gpu", "h100-80gb", "--num-gpus", "2"]
CONFIG = """
model:
  context_parallel_size: 1
train:
  micro_batch_size: 2
"""


def run(*arguments: str, stdin: str | None = None) -> Result:
    get_settings.cache_clear()
    return CliRunner().invoke(application, list(arguments), input=stdin)


def program(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The installed command, with nothing of this process' environment but the path."""
    found = {"PATH": os.environ["PATH"], "OOMBUDSMAN_DATA_DIR": str(folder), **environment}
    command = [str(Path(sys.executable).parent / "oombudsman"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=found, timeout=60)


def _without_identity(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("id", "created_at")}


def test_json_is_what_the_api_answers(client: TestClient, body: dict[str, Any], tmp_path: Path) -> None:
    done = program(*MAIN, "--json", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert _without_identity(json.loads(done.stdout)) == _without_identity(client.post("/recommend", json=body).json())
    done = program("estimate", *MAIN[1:], "--json", folder=tmp_path)
    assert done.stdout.encode() == client.post("/estimate", json=body).content + b"\n"


def test_readable_output_says_what_matters(tmp_path: Path) -> None:
    done = program(*MAIN, folder=tmp_path, NO_COLOR="1", COLUMNS="80", PYTHONIOENCODING="utf-8")
    assert done.returncode == 0
    assert "does not fit" in done.stdout
    for words in ("needs ", "has ", "to spare", "optimizer states", "What fits", "Paste into the recipe", "cfg."):
        assert words in done.stdout
    assert "\x1b" not in done.stdout
    assert " GB" not in done.stdout


def test_output_without_unicode(tmp_path: Path) -> None:
    done = program("estimate", *MAIN[1:], folder=tmp_path, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    assert "####" in done.stdout
    assert done.stdout.isascii()


def test_what_was_recommended_can_be_shown_again(tmp_path: Path) -> None:
    made = json.loads(program(*MAIN, "--json", folder=tmp_path).stdout)
    again = program("show", made["id"], "--json", folder=tmp_path)
    assert json.loads(again.stdout) == made
    assert "does not fit" in program("show", made["id"], folder=tmp_path).stdout
    missing = program("show", "rec_missing", folder=tmp_path)
    assert missing.returncode == 2
    assert "rec_missing" in missing.stderr


def test_positional_words_are_the_options() -> None:
    long = run("estimate", *MAIN[1:], "-o", "train.micro_batch_size=2", "--json")
    for words in (["2xh100-80gb"], ["2", "x", "h100-80gb"]):
        short = run("estimate", "llama3_8b_pretrain_config", " ".join(words), "train.micro_batch_size=2", "--json")
        assert short.stdout == long.stdout
    assert json.loads(long.stdout)["peak_allocated_bytes"] > 0


def test_a_config_file_and_stdin_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "run_config.yaml"
    file.write_text(CONFIG)
    by_file = run("estimate", *MAIN[1:], "--config", str(file), "--json")
    by_stdin = run("estimate", *MAIN[1:], "--config", "-", "--json", stdin=CONFIG)
    as_overrides = run(
        "estimate", *MAIN[1:], "-o", "model.context_parallel_size=1", "-o", "train.micro_batch_size=2", "--json"
    )
    assert by_file.stdout == by_stdin.stdout
    peaks = [json.loads(done.stdout)["peak_allocated_bytes"] for done in (by_file, as_overrides)]
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("70", 70 * 1024**3),
        ("70GiB", 70 * 1024**3),
        ("0.5 tib", 1024**4 // 2),
        ("71680MiB", 70 * 1024**3),
        ("80GB", 80 * 10**9),
        ("5b", 5),
    ],
)
def test_amounts_of_memory(text: str, num_bytes: int, estimator_says: Callable[[Any], None]) -> None:
    from app.cli.inputs import quantity

    assert quantity(text, "--memory-limit") == num_bytes


BAD = [
    ([], "--recipe", "no job was given"),
    (["llama3_8b_pretrain_config"], "--gpu (cluster.gpu)", "is required"),
    (["llama3_8b_pretrain_confg", "2xh100-80gb"], "--recipe (job.recipe)", "no recipe is called"),
    (["llama3_8b_pretrain_config", "2xh100-81gb"], "--gpu (cluster.gpu)", "h100-8"),
    (["llama3_8b_pretrain_config", "0xh100-80gb"], "--num-gpus (cluster.num_gpus)", "must be at least 1"),
    (["llama3_8b_pretrain_config", "two", "2xh100-80gb"], "arguments", "one word too many"),
    (["llama3_8b_pretrain_config", "2xh100-80gb", "model.hiden_size=3"], "job.overrides[0]", "hidden_size"),
    (["llama3_8b_pretrain_config", "2xh100-80gb", "--memory-limit", "much"], "--memory-limit", "70GiB"),
    (["llama3_8b_pretrain_config", "2xh100-80gb", "--memory-limit", "0"], "--memory-limit", "at least 1"),
    (["llama3_8b_pretrain_config", "2xh100-80gb", "--min-fit-probability", "nan"], "--min-fit-probability", "finite"),
    (["llama3_8b_pretrain_config", "2xh100-80gb", "--stack", "torch"], "--stack", "megatron_core="),
    (["llama3_8b_pretrain_config", "2xh100-80gb", "--config", "/no/such/file"], "--config", "No such file"),
    (["llama3_8b_pretrain_config", "2xh100-80gb", "-o", "a\udcff=1"], "--override", "not valid Unicode"),
]


@pytest.mark.parametrize(("arguments", "where", "what"), BAD, ids=[what for _, _, what in BAD])
@pytest.mark.parametrize("name", ["recommend", "estimate"])
def test_bad_input_ends_with_2(name: str, arguments: list[str], where: str, what: str) -> None:
    done = run(name, *arguments)
    assert done.exit_code == 2
    assert where in done.stderr
    assert what in done.stderr
    assert done.stdout == ""
    as_json = run(name, *arguments, "--json")
    assert as_json.exit_code == 2
    problem = json.loads(as_json.stdout)
    assert problem["errors"][0]["message"]
    assert problem["type"].startswith("/problems/")


CONFIGS = [
    ("model: [1", "is not YAML at line"),
    ("- a\n- b\n", "holds no mapping"),
    ("model: {seed: .nan}", "is nan"),
    ("model: {day: 2026-01-01}", "is a date"),
    ("model: {1: 2}", "is not a string"),
    ("a: &a {b: *a}", "nested more than"),
    ("a: !!python/object/apply:os.system ['true']", "is not YAML"),
    ("model: {hiden_size: 3}", "hidden_size"),
]


@pytest.mark.parametrize(("content", "what"), CONFIGS, ids=[what for _, what in CONFIGS])
def test_bad_config_files_end_with_2(content: str, what: str) -> None:
    done = run("estimate", *MAIN[1:], "--config", "-", stdin=content)
    assert done.exit_code == 2
    assert what in done.stderr
    assert "job.config" in done.stderr or "--config" in done.stderr


def test_a_job_that_is_not_modelled_ends_with_3() -> None:
    done = run("recommend", "nemotron_nano_9b_v2_pretrain_config", "8xb200")
    assert done.exit_code == 3
    assert "model.is_hybrid_model" in done.stderr
    as_json = run("recommend", "nemotron_nano_9b_v2_pretrain_config", "8xb200", "--json")
    assert as_json.exit_code == 3
    assert json.loads(as_json.stdout)["type"] == "/problems/not-modelled"


def test_a_fault_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    code = (
        "import estimator.answers, app.cli\n"
        "def fail(request): raise RuntimeError('broken')\n"
        "estimator.answers.recommend_answer = fail\n"
        "app.cli.main()\n"
    )
    command = [sys.executable, "-c", code, *MAIN]
    done = subprocess.run(command, capture_output=True, text=True, env={"OOMBUDSMAN_DATA_DIR": str(tmp_path)})
    assert done.returncode == 1
    assert "RuntimeError: broken" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("state", ["unwritable", "ahead", "broken", "unreachable"])
def test_an_answer_is_not_lost_with_the_database(tmp_path: Path, state: str) -> None:
    environment = {}
    settings = Settings(data_dir=tmp_path)
    if state == "unwritable":
        (tmp_path / "file").write_text("")
        settings = Settings(data_dir=tmp_path / "file")
    elif state == "ahead":
        migrations.upgrade(settings)
        _set_revision(settings, "9999")
    elif state == "broken":
        (tmp_path / "oombudsman.db").write_bytes(b"no database at all" * 100)
    else:
        environment["OOMBUDSMAN_DATABASE_URL"] = "postgresql://nobody@127.0.0.1:1/nothing"
    done = program(*MAIN, "--json", folder=settings.data_dir, **environment)
    assert done.returncode == 0
    assert json.loads(done.stdout)["outcome"]
    assert "warning: not kept: " in done.stderr
    if state != "unwritable":  # where there is no file, there is no calibration of the user's own either
        assert done.stderr.startswith("warning: answered with the shipped calibration: ")
    assert "Traceback" not in done.stderr


def _set_revision(settings: Settings, revision: str) -> None:
    engine = create_engine(settings.resolved_database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})
    engine.dispose()


def test_the_profiler_has_its_own_arguments(tmp_path: Path) -> None:
    """It runs where typer and SQL are not installed, too, so that its command line is its own."""
    shown = program("profile", "--help", folder=tmp_path)
    assert (shown.returncode, "--simulate-world" in shown.stdout) == (0, True)
    refused = program("profile", "--sweep", str(tmp_path / "none.jsonl"), "--output", "x", folder=tmp_path)
    assert (refused.returncode, "No such file" in refused.stderr) == (2, True)


def test_database_upgrade(tmp_path: Path) -> None:
    first = program("db", "upgrade", folder=tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    assert "was migrated" in first.stdout
    assert "is ready" in program("db", "upgrade", folder=tmp_path).stdout
    _set_revision(Settings(data_dir=tmp_path), "9999")
    ahead = program("db", "upgrade", folder=tmp_path)
    assert ahead.returncode == 1
    assert "newer" in ahead.stderr


def test_database_upgrade_hides_the_password(postgres_url: str, tmp_path: Path) -> None:
    url = postgres_url.replace("postgres@", "postgres:hush@")
    done = program("db", "upgrade", folder=tmp_path, OOMBUDSMAN_DATABASE_URL=url)
    assert done.returncode == 0, done.stderr
    assert "hush" not in done.stdout + done.stderr


def test_serve_refuses_a_database_that_is_not_current(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    migrations.upgrade(settings)
    _set_revision(settings, "9999")
    done = program("serve", folder=tmp_path)
    assert done.returncode == 1
    assert "newer" in done.stderr
    elsewhere = program("serve", folder=tmp_path, OOMBUDSMAN_DATABASE_URL=f"sqlite:///{tmp_path / 'team.db'}")
    assert elsewhere.returncode == 1
    assert "oombudsman db upgrade" in elsewhere.stderr


def test_a_wrong_setting_is_named(tmp_path: Path) -> None:
    done = program("serve", folder=tmp_path, OOMBUDSMAN_PORT="many")
    assert done.returncode == 2
    assert "OOMBUDSMAN_PORT must be a whole number" in done.stderr


def test_serve_answers_over_http(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "OOMBUDSMAN_DATA_DIR": str(tmp_path), "OOMBUDSMAN_LOG_FORMAT": "console"}
    port = 20_000 + os.getpid() % 20_000
    command = [str(Path(sys.executable).parent / "oombudsman"), "serve", "--port", str(port)]
    server = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
    try:
        for _ in range(100):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2) as response:
                    assert json.load(response) == {"status": "ready"}
                break
            except urllib.error.URLError:
                assert server.poll() is None
                time.sleep(0.1)
        else:
            pytest.fail("the server did not answer")
    finally:
        server.terminate()
        _, errors = server.communicate(timeout=20)
    assert server.returncode in (0, -15)
    assert b"Traceback" not in errors


def test_version() -> None:
    assert ESTIMATOR_VERSION in run("version").stdout
    assert json.loads(run("version", "--json").stdout)["estimator_version"] == ESTIMATOR_VERSION


def test_what_the_command_line_does_not_load() -> None:
    code = "import app.cli.commands, app.cli.report, app.services.answers, estimator.answers, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(re.split(r"\s+", done.stdout))
    assert not loaded & {"fastapi", "starlette", "sqlalchemy", "alembic", "uvicorn", "torch", "structlog"}
