"""A stand-in for Slack that speaks its protocol: Web API, Socket Mode, files, events signed over HTTP.

Every call is recorded with its time; what the bot sends is checked against Block Kit's limits at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import ClientSession, WSMsgType, web

from app.slackbot.limits import MESSAGE_TEXT, problems_of_blocks, problems_of_view

BOT_USER, TEAM, CHANNEL, USER = "UBOT", "T1", "C1", "U1"
SECRET = "a signing secret"
TOKEN, APP_TOKEN = "xoxb-very-secret", "xapp-very-secret"


@dataclass
class Call:
    method: str
    arguments: dict[str, Any]
    at: float


@dataclass
class SlackStandIn:
    """Start with :meth:`start`; ``url`` is the Web API's address."""

    calls: list[Call] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)
    replies: list[dict[str, Any]] = field(default_factory=list)
    fail: dict[str, list[tuple[int, dict[str, Any], dict[str, str]]]] = field(default_factory=dict)
    """By method: answers (status, body, headers) that are given once each before it works."""
    url: str = ""
    origin: str = ""

    def __post_init__(self) -> None:
        self._socket: web.WebSocketResponse | None = None
        self.connected = asyncio.Event()
        self._acks: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._runner: web.AppRunner | None = None
        self._numbers = iter(range(1, 10_000))

    async def start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/api/{method}", self._api)
        app.router.add_get("/link", self._link)
        app.router.add_get("/files/{name}", self._file)
        app.router.add_post("/upload/{name}", self._upload)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self.origin = f"http://127.0.0.1:{port}"
        self.url = self.origin + "/api/"

    async def stop(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        if self._runner is not None:
            await self._runner.cleanup()

    # -- Web API ---------------------------------------------------------------------------------------------------
    async def _api(self, request: web.Request) -> web.Response:
        method = request.match_info["method"]
        arguments = await _arguments(request)
        self.calls.append(Call(method, arguments, time.monotonic()))
        if self.fail.get(method):
            status, body, headers = self.fail[method].pop(0)
            return web.json_response(body, status=status, headers=headers)
        expected = APP_TOKEN if method == "apps.connections.open" else TOKEN
        if request.headers.get("Authorization") != f"Bearer {expected}" and arguments.get("token") != expected:
            return web.json_response({"ok": False, "error": "invalid_auth"})
        problems = _problems(method, arguments)
        if problems:
            return web.json_response(
                {"ok": False, "error": "invalid_blocks", "response_metadata": {"messages": problems}}
            )
        return web.json_response({"ok": True, **self._answer(method, arguments)})

    def _answer(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        if method == "auth.test":
            return {"user_id": BOT_USER, "bot_id": "B1", "team_id": TEAM, "user": "oombudsman", "team": "x", "url": "x"}
        if method == "apps.connections.open":
            return {"url": self.origin.replace("http", "ws") + "/link"}
        if method in ("chat.postMessage", "chat.update"):
            return {"channel": arguments["channel"], "ts": arguments.get("ts") or f"1700.{number:06d}", "message": {}}
        if method in ("views.open", "views.update"):
            return {"view": {"id": arguments.get("view_id") or f"V{number}", "hash": f"h{number}"}}
        if method == "conversations.replies":
            return {"messages": self.replies}
        if method == "files.getUploadURLExternal":
            name = f"F{number}"
            return {"upload_url": f"{self.origin}/upload/{name}", "file_id": name}
        if method == "files.completeUploadExternal":
            return {"files": [{"id": "F1", "title": "x"}]}
        return {}

    async def _file(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.Response(text="<html>sign in</html>", content_type="text/html")
        if request.match_info["name"] not in self.files:
            return web.Response(status=404)
        return web.Response(body=self.files[request.match_info["name"]], content_type="text/plain")

    async def _upload(self, request: web.Request) -> web.Response:
        content = await request.read()
        if request.content_type == "multipart/form-data":
            content = content.split(b"\r\n\r\n", 1)[-1]
        self.uploads[request.match_info["name"]] = content
        return web.Response(text="OK")

    # -- Socket Mode -----------------------------------------------------------------------------------------------
    async def _link(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self._socket = socket
        await socket.send_json({"type": "hello", "num_connections": 1, "connection_info": {"app_id": "A1"}})
        self.connected.set()
        async for message in socket:
            if message.type == WSMsgType.TEXT and message.data.startswith("{"):
                data = json.loads(message.data)
                waiting = self._acks.pop(data.get("envelope_id"), None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(data.get("payload") or {})
        return socket

    async def send(
        self, kind: str, payload: dict[str, Any], *, envelope: str | None = None
    ) -> tuple[float, dict[str, Any]]:
        """Deliver by Socket Mode; (seconds until it was acknowledged, what the acknowledgement said)."""
        assert self._socket is not None
        identity = envelope or f"e{next(self._numbers)}"
        waiting: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._acks[identity] = waiting
        started = time.monotonic()
        message = {"envelope_id": identity, "type": kind, "payload": payload, "accepts_response_payload": True}
        await self._socket.send_json(message)
        answer = await asyncio.wait_for(waiting, 10)
        return time.monotonic() - started, answer

    # -- what the bot did ------------------------------------------------------------------------------------------
    def of(self, *methods: str) -> list[Call]:
        return [call for call in self.calls if call.method in methods]

    async def wait_for(self, found: Callable[[], Any], seconds: float = 20) -> Any:
        """What ``found`` gives once it gives something."""
        for _ in range(int(seconds / 0.02)):
            result = found()
            if result:
                return result
            await asyncio.sleep(0.02)
        raise AssertionError(
            f"not within {seconds} s; calls: {[(c.method, str(c.arguments)[:200]) for c in self.calls]}"
        )

    async def update(self, count: int = 1) -> Call:
        """The ``count``-th update of a message."""
        calls = await self.wait_for(lambda: self.of("chat.update")[count - 1 : count])
        found: Call = calls[0]
        return found


async def _arguments(request: web.Request) -> dict[str, Any]:
    if request.method == "GET":
        return dict(request.query)
    if request.content_type == "application/json":
        return dict(await request.json())
    raw = dict(parse_qsl((await request.read()).decode(), keep_blank_values=True))
    return {name: _maybe_json(value) for name, value in raw.items()}


def _maybe_json(value: str) -> Any:
    if value[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _problems(method: str, arguments: dict[str, Any]) -> list[str]:
    if method.startswith("views."):
        return problems_of_view(arguments["view"])
    if method.startswith("chat."):
        long = len(str(arguments.get("text", ""))) > MESSAGE_TEXT
        return (problems_of_blocks(arguments["blocks"]) if arguments.get("blocks") else []) + (["text"] if long else [])
    return []


def text_in(blocks: list[dict[str, Any]]) -> str:
    """All that a person reads in blocks, in order."""
    parts = []
    for block in blocks:
        if "text" in block:
            parts.append(block["text"]["text"])
        for element in block.get("elements", ()):
            text = element["text"]
            parts.append(text if isinstance(text, str) else f"[{text['text']}]")
    return "\n".join(parts)


def buttons_in(blocks: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {e["action_id"]: e for block in blocks if block["type"] == "actions" for e in block["elements"]}


def command(text: str, trigger: str = "t1") -> dict[str, Any]:
    return {
        "command": "/oom", "text": text, "trigger_id": trigger, "channel_id": CHANNEL, "user_id": USER, "team_id": TEAM,
        "response_url": "https://hooks.slack.example/x",
    }  # fmt: skip


def interaction(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "team": {"id": TEAM}, "user": {"id": USER}, "trigger_id": f"t{time.monotonic_ns()}", **more}


def pressed(call: Call, action_id: str) -> dict[str, Any]:
    """A press on a button of a message that the bot sent or updated."""
    element = buttons_in(call.arguments["blocks"])[action_id]
    action = {"action_id": action_id, "type": "button", "value": element.get("value", ""), "block_id": "b"}
    message = {"ts": call.arguments.get("ts", "1700.1"), "blocks": call.arguments["blocks"]}
    return interaction("block_actions", actions=[action], channel={"id": CHANNEL}, message=message)


def submitted(view: dict[str, Any], identity: str = "V1", **values: str) -> dict[str, Any]:
    state = {name: {"value": {"type": "plain_text_input", "value": value}} for name, value in values.items()}
    sent = {**view, "id": identity, "hash": "h", "state": {"values": state}}
    return interaction("view_submission", view=sent)


def mention(text: str, event_id: str = "Ev1", **more: Any) -> dict[str, Any]:
    event = {
        "type": "app_mention",
        "text": f"<@{BOT_USER}> {text}",
        "ts": "1600.1",
        "channel": CHANNEL,
        "user": USER,
        **more,
    }
    return {"type": "event_callback", "event_id": event_id, "team_id": TEAM, "api_app_id": "A1", "event": event}


async def post_signed(url: str, payload: dict[str, Any], *, secret: str = SECRET, age: int = 0, **headers: str) -> int:
    """An event over HTTP as Slack signs it; the status of the answer."""
    body = json.dumps(payload)
    stamp = str(int(time.time()) - age)
    digest = hmac.new(secret.encode(), f"v0:{stamp}:{body}".encode(), hashlib.sha256).hexdigest()
    sent = {
        "Content-Type": "application/json",
        "X-Slack-Request-Timestamp": stamp,
        "X-Slack-Signature": f"v0={digest}",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    async with ClientSession() as session, session.post(url, data=body, headers=sent) as response:
        return response.status
