"""Runs the bot until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal

from aiohttp import web
from slack_bolt.adapter.socket_mode.aiohttp import AsyncSocketModeHandler

from app.slackbot.bot import build_app
from app.slackbot.service import Service
from app.slackbot.settings import BotSettings


def main(settings: BotSettings) -> None:
    """Socket Mode, or HTTP; returns on SIGTERM or SIGINT."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(settings))


async def serve(settings: BotSettings, stop: asyncio.Event | None = None) -> None:
    """Connects and works until ``stop`` is set."""
    stop = stop or asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            asyncio.get_running_loop().add_signal_handler(name, stop.set)
    service = Service(settings)
    app = build_app(settings, service)
    try:
        if settings.mode == "socket" and settings.app_token is not None:
            handler = AsyncSocketModeHandler(app, settings.app_token.get_secret_value())
            await handler.connect_async()  # type: ignore[no-untyped-call]
            await stop.wait()
            await handler.close_async()  # type: ignore[no-untyped-call]
        else:
            runner = web.AppRunner(app.server(port=settings.port, path="/slack/events").web_app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, settings.host, settings.port).start()
            await stop.wait()
            await runner.cleanup()
    finally:
        await service.close()
