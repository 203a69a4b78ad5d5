"""Every flow of the bot: the real slack-bolt and slack-sdk, the real service as a process, a stand-in for Slack."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from stand_in import (
    APP_TOKEN,
    CHANNEL,
    SECRET,
    TOKEN,
    USER,
    Call,
    SlackStandIn,
    buttons_in,
    command,
    interaction,
    mention,
    post_signed,
    pressed,
    submitted,
    text_in,
)

from app.slackbot.run import serve
from app.slackbot.settings import BotSettings

MAIN = "llama3_8b_pretrain_config 2xh100-80gb"
OOM = (
    "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
    "79.11 GiB of which 0.25 GiB is free.\n"
)
LOG = "python run.py --recipe llama3_8b_pretrain_config\nNVIDIA H100 80GB HBM3\n" + OOM


PROGRAM = str(Path(sys.executable).parent / "oombudsman")
KEYS: dict[str, str] = {}
"""The key of each service that was started, by its address."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The real service, which requires keys; its address."""
    address, environment = prepared(tmp_path_factory.mktemp("served"), free_port())
    process = started(address, environment)
    yield address
    process.terminate()
    process.wait(timeout=30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def prepared(folder: Path, port: int) -> tuple[str, dict[str, str]]:
    """A data directory with a key; (address, environment) for a service on it."""
    environment = {**os.environ, "OOMBUDSMAN_DATA_DIR": str(folder), "OOMBUDSMAN_LOG_LEVEL": "error"}
    create = [PROGRAM, "keys", "create", "slack", "--scope", "recommend"]
    address = f"http://127.0.0.1:{port}"
    KEYS[address] = subprocess.run(create, env=environment, check=True, capture_output=True, text=True).stdout.strip()
    return address, environment


def started(address: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([PROGRAM, "serve", "--port", address.rpartition(":")[2]], env=environment)
    for _ in range(200):
        try:
            urllib.request.urlopen(address + "/livez", timeout=1).close()
            break
        except OSError:
            time.sleep(0.1)
    return process


@asynccontextmanager
async def running(service: str, **more: Any) -> AsyncIterator[tuple[SlackStandIn, BotSettings]]:
    """The bot, connected to the stand-in."""
    slack = SlackStandIn()
    await slack.start()
    values: dict[str, Any] = {
        "bot_token": TOKEN, "app_token": APP_TOKEN, "service_url": service, "slack_api_url": slack.url,
        "public_url": "https://oom.example/", "api_key": KEYS.get(service, "oom_very_secret"),
    }  # fmt: skip
    settings = BotSettings(**(values | more))
    stop = asyncio.Event()
    task = asyncio.create_task(serve(settings, stop))
    try:
        if settings.mode == "socket":
            await asyncio.wait_for(slack.connected.wait(), 20)
        yield slack, settings
    finally:
        stop.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(task, 20)
        await slack.stop()


def run(flow: Callable[[SlackStandIn, BotSettings], Awaitable[None]], service: str, **more: Any) -> None:
    async def main() -> None:
        async with running(service, **more) as (slack, settings):
            await flow(slack, settings)

    asyncio.run(main())


def test_a_command_with_a_job_is_answered_in_one_message(service: str) -> None:
    async def flow(slack: SlackStandIn, _: BotSettings) -> None:
        seconds, _answer = await slack.send("slash_commands", command(MAIN))
        assert seconds < 3
        updated = await slack.update()
        (posted,) = slack.of("chat.postMessage")
        assert "Looking at llama3_8b_pretrain_config on 2 x h100-80gb" in posted.arguments["text"]
        shown = text_in(updated.arguments["blocks"])
        assert "Does not fit: here is what does" in shown
        assert "cfg.model.pipeline_model_parallel_size = 2" in shown
        assert "█" in shown
        assert "79.1 GiB usable" in shown
        buttons = buttons_in(updated.arguments["blocks"])
        assert set(buttons) == {"next_alternative", "full_report", "it_ran", "it_oomed"}
        assert buttons["full_report"]["url"].startswith("https://oom.example/r/rec_")

    run(flow, service)


def test_alternatives_and_reports(service: str) -> None:
    async def flow(slack: SlackStandIn, _: BotSettings) -> None:
        await slack.send("slash_commands", command(MAIN))
        shown = await slack.update()
        for number in (2, 3, 4, 5):
            await slack.send("interactive", pressed(shown, "next_alternative"))
            shown = await slack.update(number)
            assert f"{number} of 5" in text_in(shown.arguments["blocks"])
        assert "Megatron FSDP optim_grads_params" in text_in(shown.arguments["blocks"])
        assert "llama3_8b_pretrain_config on 2 x h100-80gb" in text_in(shown.arguments["blocks"])
        await slack.send("interactive", pressed(shown, "it_ran"))
        await slack.wait_for(lambda: [c for c in slack.of("chat.postMessage") if "it ran" in c.arguments["text"]])
        await slack.send("interactive", pressed(shown, "full_report"))
        await slack.send("interactive", pressed(shown, "it_oomed"))
        (opened,) = await slack.wait_for(lambda: slack.of("views.open"))
        view = opened.arguments["view"]
        _, refused = await slack.send("interactive", submitted(view, text=OOM, peak="much"))
        assert refused["errors"]["peak"]
        await slack.send("interactive", submitted(view, text=OOM, peak="78,5"))
        await slack.wait_for(lambda: [c for c in slack.of("chat.postMessage") if "memory again" in c.arguments["text"]])
        identity = json.loads(buttons_in(shown.arguments["blocks"])["it_ran"]["value"])[0]
        reports = json.load(urllib.request.urlopen(f"{service}/recommendations/{identity}/outcomes"))["items"]
        assert [r["outcome"] for r in reports] == ["oom", "ok"]
        assert reports[0]["measured_peak_bytes"] == round(78.5 * 2**30)

    run(flow, service)


def test_the_bare_command_opens_the_form_which_is_checked_and_answered(service: str) -> None:
    async def flow(slack: SlackStandIn, _: BotSettings) -> None:
        await slack.send("slash_commands", command(""))
        (opened,) = await slack.wait_for(lambda: slack.of("views.open"))
        view = opened.arguments["view"]
        empty = {"recipe": "", "gpu": "", "num_gpus": "two", "overrides": "", "text": ""}
        _, refused = await slack.send("interactive", submitted(view, **empty))
        assert set(refused["errors"]) == {"recipe", "gpu", "num_gpus"}
        typed = {"recipe": "llama3_8b_pretrain_config", "gpu": "h100-80gb", "num_gpus": "16"}
        more = {"overrides": "train.micro_batch_size=2", "text": ""}
        seconds, accepted = await slack.send("interactive", submitted(view, **typed, **more))
        assert seconds < 3
        assert accepted == {}
        updated = await slack.update()
        assert "with 1 override(s) on 16 x h100-80gb" in text_in(updated.arguments["blocks"])

    run(flow, service)


def test_a_message_and_its_log_fill_the_form(service: str) -> None:
    async def flow(slack: SlackStandIn, _: BotSettings) -> None:
        slack.files["train.log"] = b"noise\n" * 200_000 + LOG.encode()
        file = {
            "name": "train.log",
            "size": len(slack.files["train.log"]),
            "url_private": slack.origin + "/files/train.log",
        }
        message = {"ts": "1500.1", "text": "help &lt;please&gt;", "files": [file]}
        payload = interaction(
            "message_action", callback_id="why_oom", channel={"id": CHANNEL}, message=message, message_ts="1500.1"
        )
        seconds, _answer = await slack.send("interactive", payload)
        assert seconds < 3
        (updated,) = await slack.wait_for(lambda: slack.of("views.update"))
        opened = slack.of("views.open")[0]
        assert opened.arguments["view"]["callback_id"] == "oom_loading"
        view = updated.arguments["view"]
        values = {b["block_id"]: b["element"].get("initial_value") for b in view["blocks"] if b["type"] == "input"}
        assert values["recipe"] == "llama3_8b_pretrain_config"
        assert values["gpu"] == "h100-80gb"
        assert values["text"] == "help <please>"
        assert "ran out of GPU memory" in json.dumps(view["blocks"])
        typed = {"recipe": values["recipe"], "gpu": values["gpu"], "num_gpus": "2", "overrides": "", "text": ""}
        await slack.send("interactive", submitted(view, **typed))
        answered = await slack.update()
        assert slack.of("chat.postMessage")[0].arguments["thread_ts"] == "1500.1"
        assert "ran out of GPU memory" in text_in(answered.arguments["blocks"])

    run(flow, service)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": 50 << 20}, "larger than"),
        ({"url_private": "https://evil.example/x"}, "does not lie at Slack"),
        ({"url_private": "{origin}/files/big.log"}, "larger than"),
        ({"url_private": "{origin}/files/gone.log"}, "scope files:read"),
    ],
)
def test_files_that_are_not_read(service: str, change: dict[str, Any], words: str) -> None:
    async def flow(slack: SlackStandIn, _: BotSettings) -> None:
        slack.files["big.log"] = b"x" * (21 << 20)
        file = {"name": "x.log", "size": 10, "url_private": "x"} | change
        file["url_private"] = str(file["url_private"]).format(origin=slack.origin)
        message = {"ts": "1500.1", "text": OOM, "files": [file]}
        payload = interaction("message_action", callback_id="why_oom", channel={"id": CHANNEL}, message=message)
        await slack.send("interactive", payload)
        (updated,) = await slack.wait_for(lambda: slack.of("views.update"))
        assert words in json.dumps(updated.arguments["view"])

    run(flow, service)


def test_a_mention_is_answered_in_its_thread_once(service: str) -> None:
    async def flow(slack: SlackStandIn, _: BotSettings) -> None:
        slack.replies = [{"ts": "1599.0", "text": "torchrun --nproc_per_node=2 " + LOG.replace("<", "&lt;")}]
        event = mention("why?", thread_ts="1599.0")
        await slack.send("events_api", event, envelope="same")
        updated = await slack.update()
        assert slack.of("chat.postMessage")[0].arguments["thread_ts"] == "1599.0"
        assert "Does not fit" in text_in(updated.arguments["blocks"])
        await slack.send("events_api", event, envelope="again")
        await slack.send("events_api", mention("from a bot", event_id="Ev2", bot_id="B9"))
        await asyncio.sleep(0.5)
        assert len(slack.of("chat.postMessage")) == 1

    run(flow, service)


def test_a_mention_without_enough_asks_for_the_rest(service: str) -> None:
    async def flow(slack: SlackStandIn, _: BotSettings) -> None:
        await slack.send("events_api", mention(OOM))
        (posted,) = await slack.wait_for(lambda: slack.of("chat.postMessage"))
        shown = text_in(posted.arguments["blocks"])
        assert "ran out of GPU memory" in shown
        assert "job.recipe" in shown
        await slack.send("interactive", pressed(posted, "open_form"))
        (opened,) = await slack.wait_for(lambda: slack.of("views.open"))
        values = {
            b["block_id"]: b["element"].get("initial_value")
            for b in opened.arguments["view"]["blocks"]
            if b["type"] == "input"
        }
        assert values["gpu"] == "h100-80gb"
        assert "CUDA out of memory" in values["text"]

    run(flow, service)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("llama3_8b_pretrain_confg 2xh100-80gb", "one of llama3_8b_pretrain_config"),
        ("llama3_8b_pretrain_config 2xh99", "No GPU is called".lower()),
        ("llama3_8b_pretrain_config 2xh100-80gb model.hidden_sise=1", "hidden_size"),
        ("nemotron_nano_9b_v2_pretrain_config 16xh100-80gb", "hybrid (Mamba) layers"),
    ],
)
def test_what_the_service_refuses_is_said_in_words(service: str, text: str, words: str) -> None:
    async def flow(slack: SlackStandIn, _: BotSettings) -> None:
        await slack.send("slash_commands", command(text))
        shown = text_in((await slack.update()).arguments["blocks"])
        assert words in shown.replace("No GPU", "no gpu") or words in shown.lower()
        assert "[Open the form]" in shown

    run(flow, service)


def test_a_refused_key_is_the_administrators_business(service: str) -> None:
    async def flow(slack: SlackStandIn, _: BotSettings) -> None:
        await slack.send("slash_commands", command(MAIN))
        shown = text_in((await slack.update()).arguments["blocks"])
        assert "OOMBUDSMAN_SLACK_API_KEY" in shown
        assert "header.authorization" not in shown
        await slack.send("events_api", mention(OOM))
        (posted,) = await slack.wait_for(lambda: slack.of("chat.postMessage")[1:])
        assert "administrator" in text_in(posted.arguments["blocks"])

    run(flow, service, api_key="oom_abcdefgh_" + "x" * 43)


def test_a_long_override_becomes_a_file(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from app.slackbot import blocks

    monkeypatch.setattr(blocks, "MAX_CODE", 60)

    async def flow(slack: SlackStandIn, _: BotSettings) -> None:
        await slack.send("slash_commands", command(MAIN))
        updated = await slack.update()
        assert "attached as a file" in text_in(updated.arguments["blocks"])
        await slack.wait_for(lambda: slack.of("files.completeUploadExternal"))
        assert any(b"cfg.model.pipeline_model_parallel_size = 2" in content for content in slack.uploads.values())

    run(flow, service)


def test_rate_limits_are_waited_for(service: str) -> None:
    async def flow(slack: SlackStandIn, _: BotSettings) -> None:
        limited = (429, {"ok": False, "error": "ratelimited"}, {"Retry-After": "1"})
        slack.fail["chat.update"] = [limited]
        await slack.send("slash_commands", command(MAIN))
        await slack.wait_for(lambda: len(slack.of("chat.update")) == 2)
        first, second = slack.of("chat.update")
        assert second.at - first.at >= 1

    run(flow, service)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ({"error": "not_in_channel"}, "/invite me"),
        ({"error": "missing_scope", "needed": "chat:write"}, "lacks the scope chat:write"),
    ],
)
def test_a_channel_that_is_closed_is_said_to_the_person(service: str, error: dict[str, str], words: str) -> None:
    async def flow(slack: SlackStandIn, _: BotSettings) -> None:
        slack.fail["chat.postMessage"] = [(200, {"ok": False, **error}, {})]
        await slack.send("slash_commands", command(MAIN))
        calls: list[Call] = await slack.wait_for(lambda: slack.of("chat.postMessage")[1:])
        assert calls[0].arguments["channel"] == USER
        assert words in calls[0].arguments["text"]

    run(flow, service)


def test_a_slow_service_does_not_delay_the_acknowledgement() -> None:
    async def main() -> None:
        slow = web.Application()

        async def late(_request: web.Request) -> web.Response:
            await asyncio.sleep(10)
            return web.json_response({"detail": "late", "errors": []}, status=422)

        slow.router.add_post("/recommend", late)
        runner = web.AppRunner(slow)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        async with running(f"http://127.0.0.1:{port}") as (slack, _):
            for number in range(3):
                seconds, _answer = await slack.send("slash_commands", command(MAIN, f"t{number}"))
                assert seconds < 3
            await slack.wait_for(lambda: len(slack.of("chat.postMessage")) == 3)
        await runner.cleanup()

    asyncio.run(main())


def test_the_service_down_and_back(tmp_path: Path) -> None:
    address, environment = prepared(tmp_path, free_port())

    async def flow(slack: SlackStandIn, _: BotSettings) -> None:
        await slack.send("slash_commands", command(MAIN, "t1"))
        down = await slack.update()
        assert "does not answer right now" in text_in(down.arguments["blocks"])
        process = await asyncio.to_thread(started, address, environment)
        try:
            await slack.send("interactive", pressed(down, "open_form"))
            (opened,) = await slack.wait_for(lambda: slack.of("views.open"))
            values = {
                "recipe": "llama3_8b_pretrain_config",
                "gpu": "h100-80gb",
                "num_gpus": "2",
                "overrides": "",
                "text": "",
            }
            await slack.send("interactive", submitted(opened.arguments["view"], **values))
            again = await slack.update(2)
            assert "Does not fit" in text_in(again.arguments["blocks"])
        finally:
            process.terminate()
            process.wait(timeout=30)

    run(flow, address)


def test_http_mode_verifies_what_it_is_sent(service: str) -> None:
    port = free_port()
    address = f"http://127.0.0.1:{port}/slack/events"

    async def flow(slack: SlackStandIn, _: BotSettings) -> None:
        for _attempt in range(100):
            try:
                status = await post_signed(address, {"type": "url_verification", "challenge": "x"})
                break
            except OSError:
                await asyncio.sleep(0.05)
        assert status == 200
        event = mention(OOM, event_id="Ev7")
        assert await post_signed(address, event, secret="another") == 401
        assert await post_signed(address, event, age=3600) == 401
        assert slack.of("chat.postMessage") == []
        assert await post_signed(address, event) == 200
        assert await post_signed(address, event, X_Slack_Retry_Num="1", X_Slack_Retry_Reason="http_timeout") == 200
        await slack.wait_for(lambda: slack.of("chat.postMessage"))
        await asyncio.sleep(0.5)
        assert len(slack.of("chat.postMessage")) == 1

    run(flow, service, mode="http", signing_secret=SECRET, app_token=None, port=port)


def test_nothing_secret_and_nothing_pasted_is_logged(service: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def flow(slack: SlackStandIn, _: BotSettings) -> None:
        slack.fail["chat.postMessage"] = [(200, {"ok": False, "error": "not_in_channel"}, {})]
        await slack.send("slash_commands", command(MAIN + " logger.wandb_project=my-secret-project", "t1"))
        await slack.send("slash_commands", command(MAIN + " logger.wandb_project=my-secret-project", "t2"))
        await slack.update()

    run(flow, service)
    for secret in (TOKEN, APP_TOKEN, KEYS[service], SECRET, "my-secret-project"):
        assert secret not in caplog.text
    assert SECRET not in repr(BotSettings(bot_token=TOKEN, app_token=APP_TOKEN, signing_secret=SECRET))
