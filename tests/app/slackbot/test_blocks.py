"""Block Kit's limits on everything that the bot can say, the manifest, and what people type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from app.cli.commands import application
from app.slackbot import blocks as b
from app.slackbot.asking import Asked, filled, override_lines, read_command
from app.slackbot.limits import problems_of_blocks, problems_of_view
from app.slackbot.service import ServiceRefused

MANIFEST = Path(b.__file__).parent / "manifest.json"
GIB = 1 << 30
text = st.text(max_size=5000)


def answer(words: str, count: int) -> dict[str, Any]:
    estimate = {"required_bytes": 70 * GIB, "usable_bytes": 79 * GIB}
    one = {
        "title": words or "x",
        "estimate": estimate,
        "fit_probability": 0.991,
        "headroom_bytes": 9 * GIB,
        "relative_step_time": 1.1,
        "checkpoint": {"conversion_needed": True},
        "override": {"python": words, "env": {"A": "1", "B": None}},
        "warnings": [{"text": words or "x"}] * 9,
    }
    return {
        "id": "rec_" + "a" * 22,
        "outcome": "recommended",
        "diagnosis": {"summary": words, "advice": {"actions": [words or "x"] * 5}},
        "missing": [{"path": words or "x"}] * 20,
        "problems": [{"rule_id": "A1", "message": words}] * 9,
        "current": estimate,
        "recommendations": [one] * count,
    }


@given(text, st.integers(0, 20), st.integers(1, 20))
def test_answers_keep_to_the_limits(words: str, count: int, shown: int) -> None:
    said, blocks = b.answer_message(answer(words, count), words, "https://x.example", min(shown, max(1, count)))
    assert problems_of_blocks(blocks) == []
    assert len(said) <= 300


@given(text, text, st.lists(text, max_size=5))
def test_forms_and_errors_keep_to_the_limits(recipe: str, log: str, overrides: list[str]) -> None:
    asked = Asked(recipe=recipe, gpu=recipe, num_gpus="8", overrides=tuple(overrides), text=log, evidence_id=recipe)
    assert problems_of_view(b.form_view(asked, {"channel": "C1"}, [log or "x"])) == []
    assert problems_of_view(b.loading_view({})) == []
    assert problems_of_view(b.outcome_view({"id": "rec_x"})) == []
    refused = ServiceRefused(422, log, [(recipe, log, overrides[0] if overrides else None)] * 20)
    for _, blocks in (b.refused_message(refused, asked), b.down_message(asked), b.down_message(None), b.looking(asked)):
        assert problems_of_blocks(blocks) == []
    said = {"summary": log, "causes": [{"cause": recipe, "confidence": 0.5, "evidence": log}] * 9, "missing": []}
    assert problems_of_blocks(b.read_message(said, asked)[1]) == []


@given(text, st.lists(st.text(min_size=1, max_size=50).filter(lambda t: "\n" not in t), max_size=3), text)
def test_a_form_survives_a_button(recipe: str, overrides: list[str], log: str) -> None:
    asked = Asked(recipe=recipe[:100], gpu="h100-80gb", num_gpus="8", overrides=tuple(overrides), text=log[:200])
    again = b.unpacked(b.packed(asked, 1900))
    assert (again.recipe, again.gpu, again.num_gpus) == (asked.recipe, "h100-80gb", "8")
    assert len(b.packed(Asked(text=log * 3, overrides=(log,)), 1900)) <= 1900 or len(log) < 100
    assert b.unpacked("nonsense") == Asked()


def test_what_slack_would_take_for_markup_is_escaped() -> None:
    _, blocks = b.answer_message(answer("<!channel> & ```", 1), "<@U1>", "https://x.example")
    shown = json.dumps(blocks)
    assert "<!channel>" not in shown
    assert "<@U1>" not in shown
    assert "``` &amp;" not in shown


@pytest.mark.parametrize(
    ("typed", "recipe", "gpu", "count", "overrides"),
    [
        ("llama3 2xh100-80gb", "llama3", "h100-80gb", "2", ()),
        ("16 x", "16", "", "", ("x",)),
        ("`llama3` 16×b200 a.b=1 c=[1,2]", "llama3", "b200", "16", ("a.b=1", "c=[1,2]")),
        ("2*h100-80gb llama3", "llama3", "h100-80gb", "2", ()),
        ("", "", "", "", ()),
    ],
)
def test_commands(typed: str, recipe: str, gpu: str, count: str, overrides: tuple[str, ...]) -> None:
    asked = read_command(typed)
    assert (asked.recipe, asked.gpu, asked.num_gpus, asked.overrides) == (recipe, gpu, count, overrides)
    assert asked.is_complete == bool(recipe and gpu)


def test_overrides_and_what_was_read() -> None:
    assert override_lines("```\na=1\n\nb=2\n```") == ("a=1", "b=2")
    assert override_lines("import torch\ncfg.a = 1") == ("import torch\ncfg.a = 1",)
    read = {"job": {"recipe": "theirs", "overrides": ["x=1"]}, "known_of_cluster": {"gpu": "b200"}}
    asked = filled(Asked(recipe="mine"), read)
    assert (asked.recipe, asked.gpu, asked.overrides) == ("mine", "b200", ("x=1",))


def test_the_manifest_fits_what_the_bot_listens_to() -> None:
    manifest = json.loads(MANIFEST.read_text())
    assert manifest["features"]["slash_commands"][0]["command"] == "/oom"
    assert manifest["features"]["shortcuts"][0]["callback_id"] == "why_oom"
    assert manifest["settings"]["event_subscriptions"]["bot_events"] == ["app_mention"]
    scopes = set(manifest["oauth_config"]["scopes"]["bot"])
    assert scopes >= {"commands", "chat:write", "files:read", "files:write", "app_mentions:read", "channels:history"}
    assert manifest["settings"]["socket_mode_enabled"] is True
    limits = {"name": 35, "description": 140}
    assert all(len(manifest["display_information"][name]) <= most for name, most in limits.items())
    assert len(manifest["features"]["shortcuts"][0]["name"]) <= 24
    assert len(manifest["features"]["slash_commands"][0]["description"]) <= 2000


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "OOMBUDSMAN_SLACK_BOT_TOKEN is required"),
        ({"BOT_TOKEN": "xoxb-1"}, "app_token is required for Socket Mode"),
        ({"BOT_TOKEN": "xoxb-1", "MODE": "http"}, "signing_secret is required"),
        ({"BOT_TOKEN": "xoxb-1", "MODE": "carrier pigeon"}, "OOMBUDSMAN_SLACK_MODE"),
    ],
)
def test_the_command_says_which_setting_is_missing(
    environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(f"OOMBUDSMAN_SLACK_{name}", value)
    result = CliRunner().invoke(application, ["slackbot"])
    assert result.exit_code == 2
    assert words in result.output
