"""The bot: listeners by feature. Each acknowledges first, then works, and answers in one message that it updates."""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from slack_bolt.async_app import AsyncApp
from slack_sdk.errors import SlackApiError
from slack_sdk.http_retry.builtin_async_handlers import (
    AsyncConnectionErrorRetryHandler,
    AsyncRateLimitErrorRetryHandler,
)
from slack_sdk.web.async_client import AsyncWebClient

from app.slackbot import blocks as b
from app.slackbot.asking import Asked, override_lines, read_command
from app.slackbot.messages import read_message, text_of
from app.slackbot.service import Service, ServiceDown, ServiceRefused
from app.slackbot.settings import BotSettings

REMEMBERED_EVENTS = 2000
REMEMBER_SECONDS = 3600
RATE_LIMIT_RETRIES = 5

log = logging.getLogger("oombudsman.slackbot")


class Seen:
    """Ids of deliveries that were taken: Slack sends again what it believes lost."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, float] = OrderedDict()

    def before(self, identity: str) -> bool:
        """Whether this id came before; from now on it has."""
        now = time.monotonic()
        while self._ids and (
            len(self._ids) > REMEMBERED_EVENTS or next(iter(self._ids.values())) < now - REMEMBER_SECONDS
        ):
            self._ids.popitem(last=False)
        if identity in self._ids:
            return True
        self._ids[identity] = now
        return False

    def forget(self, identity: str) -> None:
        """What was taken came to nothing: it may come again."""
        self._ids.pop(identity, None)


def build_client(settings: BotSettings) -> AsyncWebClient:
    """Slack's Web API, with patience: it says how long to wait (429, Retry-After)."""
    client = AsyncWebClient(settings.bot_token.get_secret_value(), base_url=settings.slack_api_url)
    client.retry_handlers.append(AsyncRateLimitErrorRetryHandler(max_retry_count=RATE_LIMIT_RETRIES))
    client.retry_handlers.append(AsyncConnectionErrorRetryHandler(max_retry_count=2))
    return client


def build_app(settings: BotSettings, service: Service) -> AsyncApp:
    """The application with all listeners."""
    secret = settings.signing_secret
    app = AsyncApp(
        client=build_client(settings),
        signing_secret=secret.get_secret_value() if secret else "socket mode needs none",
        request_verification_enabled=settings.mode == "http",
        raise_error_for_unhandled_request=False,
    )
    bot = Bot(settings, service)
    app.command("/oom")(bot.command)
    app.shortcut("why_oom")(bot.shortcut)
    app.event("app_mention")(bot.mention)
    app.view("oom_form")(bot.form_submitted)
    app.view("oom_outcome")(bot.outcome_submitted)
    app.action("open_form")(bot.open_form)
    app.action("next_alternative")(bot.next_alternative)
    app.action("it_ran")(bot.it_ran)
    app.action("it_oomed")(bot.it_oomed)
    app.action("full_report")(bot.full_report)
    return app


class Bot:
    """What happens on each thing that people do."""

    def __init__(self, settings: BotSettings, service: Service) -> None:
        self.settings, self.service = settings, service
        self.seen = Seen()

    # -- asking ---------------------------------------------------------------------------------------------------
    async def command(self, ack: Any, body: Mapping[str, Any], client: AsyncWebClient) -> None:
        """``/oom`` opens the form; ``/oom <recipe> <n>x<gpu> [override ...]`` answers."""
        await ack()
        if self.seen.before(f"command {body.get('trigger_id')}"):
            return
        asked = read_command(str(body.get("text") or ""))
        place = {"channel": body["channel_id"], "user": body.get("user_id")}
        if asked.is_complete:
            await self.answer(client, place, asked)
        else:
            notes = [] if not body.get("text") else ["Say recipe and GPUs: /oom llama3_8b_pretrain_config 2xh100-80gb"]
            await client.views_open(trigger_id=body["trigger_id"], view=b.form_view(asked, place, notes))

    async def shortcut(self, ack: Any, body: Mapping[str, Any], client: AsyncWebClient) -> None:
        """A message's "Why did this OOM?": a form at once, filled when the message has been read."""
        await ack()
        if self.seen.before(f"shortcut {body.get('trigger_id')}"):
            return
        message = body.get("message") or {}
        place = {
            "channel": body["channel"]["id"],
            "thread": message.get("thread_ts") or message.get("ts"),
            "user": body.get("user", {}).get("id"),
        }
        opened = await client.views_open(trigger_id=body["trigger_id"], view=b.loading_view(place))
        try:
            asked, seen, notes = await read_message(message, Asked(), self.service, self.settings)
            notes = [*notes, str(seen.get("summary") or "")][-3:]
        except ServiceDown:
            asked, notes = (
                Asked(text=text_of(message)),
                ["The service does not answer right now; the form can still be sent."],
            )
        except ServiceRefused as refused:
            asked, notes = Asked(text=text_of(message)), [str(refused)]
        view = b.form_view(asked, place, [note for note in notes if note])
        try:
            await client.views_update(view_id=opened["view"]["id"], view=view)
        except SlackApiError as error:  # closed meanwhile
            log.warning("form not filled: %s", error.response.get("error"))

    async def mention(self, body: Mapping[str, Any], event: Mapping[str, Any], client: AsyncWebClient) -> None:
        """A mention with a traceback, in it or at the top of its thread: answered there."""
        if event.get("bot_id") or self.seen.before(f"event {body.get('event_id')}"):
            return
        if self.seen.before(f"message {event['channel']} {event['ts']}"):  # an edit is delivered as another event
            return
        thread = event.get("thread_ts") or event["ts"]
        place = {"channel": event["channel"], "thread": thread, "user": event.get("user")}
        message = await self._with_thread(client, event, thread)
        try:
            asked, seen, notes = await read_message(message, Asked(), self.service, self.settings)
        except ServiceDown:
            text, found = b.down_message(Asked(text=text_of(message)))
        except ServiceRefused as refused:
            text, found = b.refused_message(refused, Asked(text=text_of(message)))
        else:
            if asked.is_complete and (asked.recipe or asked.config):
                await self.answer(client, place, asked)
                return
            text, found = b.read_message(seen, asked)
            found = [*[b.context(b.escape(note)) for note in notes], *found]
        await client.chat_postMessage(channel=place["channel"], thread_ts=thread, text=text, blocks=found)

    async def _with_thread(self, client: AsyncWebClient, event: Mapping[str, Any], thread: str) -> dict[str, Any]:
        """The mention and, below it, the message that began the thread, as one."""
        texts, files = [text_of(event)], list(event.get("files") or ())
        if event.get("thread_ts") and event["thread_ts"] != event["ts"]:
            try:
                replies = await client.conversations_replies(channel=event["channel"], ts=thread, limit=1)
                for message in list(replies.get("messages") or ())[:1]:
                    texts.append(text_of(message))
                    files += list(message.get("files") or ())
            except SlackApiError as error:
                log.warning("thread not read: %s", error.response.get("error"))
        return {"text": "\n".join(texts), "files": files}

    async def open_form(self, ack: Any, body: Mapping[str, Any], client: AsyncWebClient) -> None:
        await ack()
        asked = b.unpacked(body["actions"][0].get("value", ""))
        await client.views_open(trigger_id=body["trigger_id"], view=b.form_view(asked, _place_of(body)))

    async def form_submitted(
        self, ack: Any, body: Mapping[str, Any], view: Mapping[str, Any], client: AsyncWebClient
    ) -> None:
        """Checked here for what can be known at once, so that errors stand in the form; then answered."""
        values = {name: _typed(view, name) for name in ("recipe", "gpu", "num_gpus", "overrides", "text")}
        place = json.loads(view.get("private_metadata") or "{}")
        asked = Asked(
            recipe=values["recipe"].strip(),
            gpu=values["gpu"].strip(),
            num_gpus=values["num_gpus"].strip(),
            overrides=override_lines(values["overrides"]),
            text=values["text"],
            evidence_id=str(place.get("evidence_id") or ""),
        )
        errors = {}
        count = asked.num_gpus
        if not (count.isascii() and count.isdigit() and len(count) <= 7 and 1 <= int(count) <= 1_000_000):
            errors["num_gpus"] = "A whole number, such as 16"
        if not asked.gpu:
            errors["gpu"] = "Which GPU, such as h100-80gb"
        if not (asked.recipe or asked.text or asked.evidence_id):
            errors["recipe"] = "Name a recipe, or paste what the run left"
        if errors:
            await ack(response_action="errors", errors=errors)
            return
        await ack()
        if not self.seen.before(f"view {view.get('id')} {view.get('hash')}"):
            await self.answer(client, place, asked)

    async def answer(self, client: AsyncWebClient, place: Mapping[str, Any], asked: Asked) -> None:
        """One message that says that it looks, and becomes the answer."""
        text, found = b.looking(asked)
        try:
            posted = await client.chat_postMessage(
                channel=place["channel"], thread_ts=place.get("thread"), text=text, blocks=found
            )
        except SlackApiError as error:
            await self._cannot_post(client, place, error)
            return
        answer = None
        try:
            answer = await self.service.recommend(asked.body())
            text, found = b.answer_message(answer, b.title_of(asked), self.settings.pages_url)
        except ServiceDown:
            text, found = b.down_message(asked)
        except ServiceRefused as refused:
            text, found = b.refused_message(refused, asked)
        except Exception as error:  # whatever it is, the message must not say "Looking" for ever
            log.error("answer not shown: %s", type(error).__name__)
            answer = None
            text, found = b.failed_message("I could not show this answer; the log of the bot says what failed.")
        try:
            await client.chat_update(channel=posted["channel"], ts=posted["ts"], text=text, blocks=found)
        except SlackApiError as error:
            log.warning("message not updated: %s", error.response.get("error"))
            await client.chat_postMessage(
                channel=posted["channel"], thread_ts=place.get("thread"), text=text, blocks=found
            )
        if answer is not None:
            await self._attach(client, posted["channel"], place.get("thread") or posted["ts"], answer, 1)

    async def _attach(
        self, client: AsyncWebClient, channel: str, thread: str, answer: Mapping[str, Any], shown: int
    ) -> None:
        """An override that is too long for a message, as a file in the thread."""
        recommendations = answer.get("recommendations") or []
        if not recommendations or not b.needs_file(recommendations[shown - 1]):
            return
        if self.seen.before(f"file {channel} {thread} {answer.get('id')} {shown}"):
            return
        try:
            await client.files_upload_v2(
                channel=channel,
                thread_ts=thread,
                filename=f"override_{shown}.py",
                title=f"Override {shown}",
                content=b.override_text(recommendations[shown - 1]) + "\n",
            )
        except SlackApiError as error:
            text = _scope_words(error, "files:write") or "The override could not be attached: see the full report."
            await client.chat_postMessage(channel=channel, thread_ts=thread, text=text)

    async def _cannot_post(self, client: AsyncWebClient, place: Mapping[str, Any], error: SlackApiError) -> None:
        """The channel is closed to the bot: tell the person alone."""
        code = str(error.response.get("error"))
        words = (
            {
                "not_in_channel": "I am not in this channel: /invite me first.",
                "channel_not_found": "I cannot see this channel: /invite me first.",
                "is_archived": "This channel is archived.",
            }.get(code)
            or _scope_words(error, "chat:write")
            or f"Slack refused my message ({code})."
        )
        log.warning("message refused: %s", code)
        if place.get("user"):
            try:
                await client.chat_postMessage(channel=str(place["user"]), text=words)
            except SlackApiError as second:
                log.warning("nor could the person be told: %s", second.response.get("error"))

    # -- answers --------------------------------------------------------------------------------------------------
    async def next_alternative(self, ack: Any, body: Mapping[str, Any], client: AsyncWebClient) -> None:
        """The same message with another recommendation."""
        await ack()
        identity, shown = _pair_of(body)
        place = _place_of(body)
        try:
            answer = await self.service.recommendation(identity)
        except ServiceRefused as refused:
            await self._whisper(client, body, b.escape(f"This answer cannot be shown any more: {refused}."))
            return
        except ServiceDown:
            await self._whisper(client, body, "The service does not answer right now: press again in a moment.")
            return
        text, found = b.answer_message(answer, _title_in(body), self.settings.pages_url, shown)
        await client.chat_update(channel=place["channel"], ts=body["message"]["ts"], text=text, blocks=found)
        await self._attach(client, place["channel"], str(place["thread"]), answer, shown)

    async def it_ran(self, ack: Any, body: Mapping[str, Any], client: AsyncWebClient) -> None:
        await ack()
        identity, shown = _pair_of(body)
        once = f"ran {identity} {shown}"
        if self.seen.before(once):
            await self._whisper(client, body, "That it ran is noted already.")
        elif not await self._report(client, body, identity, {"rank": shown, "ran": True}, "Noted: it ran. Thank you."):
            self.seen.forget(once)

    async def it_oomed(self, ack: Any, body: Mapping[str, Any], client: AsyncWebClient) -> None:
        await ack()
        identity, shown = _pair_of(body)
        place = {**_place_of(body), "id": identity, "rank": shown}
        await client.views_open(trigger_id=body["trigger_id"], view=b.outcome_view(place))

    async def outcome_submitted(
        self, ack: Any, body: Mapping[str, Any], view: Mapping[str, Any], client: AsyncWebClient
    ) -> None:
        place = json.loads(view.get("private_metadata") or "{}")
        report: dict[str, Any] = {"rank": place["rank"], "ran": False, "log": _typed(view, "text")}
        peak = _typed(view, "peak").strip().replace(",", ".")
        if peak:
            try:
                report["peak"] = round(float(peak) * (1 << 30))
            except (ValueError, OverflowError):
                await ack(response_action="errors", errors={"peak": "A number of GiB, such as 71.5"})
                return
        await ack()
        text = "Noted: it ran out of memory again. The next alternative may do, and the prediction will learn from it."
        await self._report(client, {**body, "place": place}, place["id"], report, text)

    async def full_report(self, ack: Any) -> None:
        """A button that is a link: Slack still wants an answer."""
        await ack()

    async def _report(
        self, client: AsyncWebClient, body: Mapping[str, Any], identity: str, report: Mapping[str, Any], words: str
    ) -> bool:
        """Whether it was stored; said in the thread either way."""
        stored = False
        place = body.get("place") or _place_of(body)
        try:
            done = await self.service.outcome(identity, report)
            stored = True
            if done.get("relative_error") is not None:
                words += f" Predicted within {abs(float(done['relative_error'])):.1%} of the measured peak."
        except ServiceDown:
            words = "The service does not answer right now: your report was not stored, please press again."
        except ServiceRefused as refused:
            words = f"Your report was not stored: {b.escape(_all_of(refused))}"
        await client.chat_postMessage(channel=place["channel"], thread_ts=place.get("thread"), text=words)
        return stored

    async def _whisper(self, client: AsyncWebClient, body: Mapping[str, Any], text: str) -> None:
        place = _place_of(body)
        await client.chat_postEphemeral(channel=place["channel"], user=str(place["user"]), text=text)


def _all_of(refused: ServiceRefused) -> str:
    if refused.status in (401, 403):
        return "the service refuses the bot's API key. " + b.KEY_WORDS
    return "; ".join(f"{path} {message}" for path, message, _ in refused.errors[:3]) or str(refused)


def _typed(view: Mapping[str, Any], name: str) -> str:
    entry = (view.get("state") or {}).get("values", {}).get(name, {}).get("value", {})
    return str(entry.get("value") or "")


def _pair_of(body: Mapping[str, Any]) -> tuple[str, int]:
    identity, shown = json.loads(body["actions"][0]["value"])
    return str(identity), int(shown)


def _place_of(body: Mapping[str, Any]) -> dict[str, Any]:
    message = body.get("message") or {}
    return {
        "channel": (body.get("channel") or {}).get("id"),
        "thread": message.get("thread_ts") or message.get("ts"),
        "user": (body.get("user") or {}).get("id"),
    }


def _title_in(body: Mapping[str, Any]) -> str:
    """The title that the message already carries."""
    for block in (body.get("message") or {}).get("blocks") or ():
        if block.get("type") == "context" and block.get("elements"):
            text = str(block["elements"][0].get("text") or "")
            return text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    return ""


def _scope_words(error: SlackApiError, scope: str) -> str | None:
    if error.response.get("error") != "missing_scope":
        return None
    return (
        f"The app lacks the scope {error.response.get('needed') or scope}: an administrator can add it and reinstall."
    )
