"""A workspace that means no good, or merely uses Slack as people do: markup, odd files, double presses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from stand_in import CHANNEL, SlackStandIn, command, interaction, mention, pressed, text_in
from test_bot import LOG, MAIN, OOM, free_port, run, running, service  # noqa: F401 (a fixture)

from app.slackbot import blocks as b
from app.slackbot.bot import Seen
from app.slackbot.messages import Download, FileRefused, text_of
from app.slackbot.settings import BotSettings


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"text": "python <http://run.py|run.py> --a &lt;b&gt;"}, "python run.py --a <b>"),
        ({"text": "<@UBOT> <!channel> see <https://x.example/a?b=1&amp;c=2>"}, "see https://x.example/a?b=1&c=2"),
        ({"text": "&lt;@U1&gt; is typed, &amp;lt; too"}, "<@U1> is typed, &lt; too"),
        ({"text": "", "attachments": [{"text": OOM.strip()}, {"fallback": "alert"}]}, OOM.strip() + "\nalert"),
        ({"text": None, "attachments": ["odd", {}]}, ""),
        ({"text": "<http://" * 20_000}, "<http://" * 20_000),
    ],
)
def test_text_as_it_was_typed(message: dict[str, Any], text: str) -> None:
    assert text_of(message) == text


@pytest.mark.parametrize(
    "address",
    [
        "http://files.slack.com/x",
        "https://slack.com@evil.example/x",
        "https://evil.example\\.slack.com/x",
        "https://evilslack.com/x",
        "https://[/x",
        "//files.slack.com/x",
        "file:///etc/passwd",
        "http://127.0.0.1:1/x",
        "",
    ],
)
def test_the_token_goes_to_slack_only(address: str) -> None:
    settings = BotSettings(bot_token="xoxb-1", app_token="xapp-1")
    with pytest.raises(FileRefused, match="does not lie at Slack"):
        Download({"name": "x", "url_private": address}, settings).check()
    Download({"name": "x", "url_private": "https://files.slack.com/x"}, settings).check()


def test_notifications_carry_no_markup() -> None:
    assert "<!channel>" not in b.answer_message({"id": "r", "outcome": "fits_already"}, "<!channel>", "https://x")[0]
    assert "<!channel>" not in b.read_message({"summary": "<!channel>"}, b.unpacked(""))[0]
    assert "<!channel>" not in b.failed_message("<!channel>")[0]


def test_an_impossible_layout_is_said_once(service: str) -> None:  # noqa: F811
    async def flow(slack: SlackStandIn, _: BotSettings) -> None:
        await slack.send("slash_commands", command("llama3_8b_pretrain_config 1xh100-80gb"))
        shown = text_in((await slack.update()).arguments["blocks"])
        assert "cannot be laid out" in shown
        assert shown.count("no multiple of TP x PP x CP") == 1
        assert "Missing" not in shown
        assert "OOMed again" not in shown

    run(flow, service)


def test_what_came_to_nothing_may_come_again() -> None:
    seen = Seen()
    assert [seen.before("a"), seen.before("a")] == [False, True]
    seen.forget("a")
    seen.forget("unknown")
    assert not seen.before("a")


def shortcut(message: dict[str, Any]) -> dict[str, Any]:
    return interaction("message_action", callback_id="why_oom", channel={"id": CHANNEL}, message=message)


@pytest.mark.parametrize(
    ("file", "words"),
    [({"name": "shot.png", "mimetype": "image/png"}, "paste its text"), ({"name": "empty.log"}, "the upload is empty")],
)
def test_a_file_that_is_no_log_leaves_the_text(service: str, file: dict[str, Any], words: str) -> None:  # noqa: F811
    async def flow(slack: SlackStandIn, _: BotSettings) -> None:
        slack.files["x"] = b""
        attached = {"size": 0, "url_private": slack.origin + "/files/x", **file}
        text = LOG.replace("run.py", "<http://run.py|run.py>")
        await slack.send("interactive", shortcut({"ts": "1500.1", "text": text, "files": [attached]}))
        (updated,) = await slack.wait_for(lambda: slack.of("views.update"))
        view = updated.arguments["view"]
        assert words in json.dumps(view)
        values = {b["block_id"]: b["element"].get("initial_value") for b in view["blocks"] if b["type"] == "input"}
        assert values["recipe"] == "llama3_8b_pretrain_config"
        assert "python run.py --recipe" in values["text"]

    run(flow, service)


def test_a_message_without_words_is_said_to_be_empty(service: str) -> None:  # noqa: F811
    async def flow(slack: SlackStandIn, _: BotSettings) -> None:
        slack.fail["views.update"] = [(200, {"ok": False, "error": "not_found"}, {})]  # closed meanwhile
        await slack.send("interactive", shortcut({"ts": "1500.1", "text": ""}))
        await slack.wait_for(lambda: slack.of("views.update"))
        assert "no text and no log" in json.dumps(slack.of("views.update")[0].arguments["view"])
        await slack.send("events_api", mention(""))
        (posted,) = await slack.wait_for(lambda: slack.of("chat.postMessage"))
        assert "no text and no log" in text_in(posted.arguments["blocks"])

    run(flow, service)


def test_presses_and_edits_are_counted_once(service: str) -> None:  # noqa: F811
    async def flow(slack: SlackStandIn, _: BotSettings) -> None:
        await slack.send("slash_commands", command(MAIN))
        shown = await slack.update()
        for _press in range(3):
            await slack.send("interactive", pressed(shown, "it_ran"))
        await slack.wait_for(lambda: len(slack.of("chat.postEphemeral")) == 2)
        (noted,) = await slack.wait_for(lambda: slack.of("chat.postMessage")[1:])
        assert noted.arguments["text"].startswith("Noted: it ran")
        await slack.send("events_api", mention(OOM, event_id="Ev1"))
        await slack.send("events_api", mention(OOM, event_id="Ev2", edited={"ts": "1600.9"}))
        await slack.wait_for(lambda: len(slack.of("chat.postMessage")) == 3)
        await asyncio.sleep(0.5)
        assert len(slack.of("chat.postMessage")) == 3

    run(flow, service)


def test_an_answer_whose_message_was_deleted_is_posted_again(service: str) -> None:  # noqa: F811
    async def flow(slack: SlackStandIn, _: BotSettings) -> None:
        slack.fail["chat.update"] = [(200, {"ok": False, "error": "message_not_found"}, {})]
        await slack.send("slash_commands", command(MAIN))
        posted = (await slack.wait_for(lambda: slack.of("chat.postMessage")[1:]))[0]
        assert "Does not fit" in text_in(posted.arguments["blocks"])

    run(flow, service)


def test_an_answer_that_cannot_be_shown_does_not_look_for_ever() -> None:
    async def main() -> None:
        async def odd(_request: web.Request) -> web.Response:
            return web.json_response({"id": "rec_x", "outcome": "recommended", "recommendations": [{"title": "x"}]})

        app = web.Application()
        app.router.add_post("/recommend", odd)
        runner = web.AppRunner(app)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        async with running(f"http://127.0.0.1:{port}") as (slack, _):
            await slack.send("slash_commands", command(MAIN))
            assert "could not show" in text_in((await slack.update()).arguments["blocks"])
        await runner.cleanup()

    asyncio.run(main())
