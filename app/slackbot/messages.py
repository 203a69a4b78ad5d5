"""Text and files of a Slack message, read with the bot's token; files stream on to the service."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from app.slackbot.asking import MAX_INPUT_CHARACTERS, Asked, filled
from app.slackbot.service import Service, ServiceDown, ServiceRefused
from app.slackbot.settings import BotSettings

PIECE_BYTES = 1 << 16
_NAMED_LINK = re.compile(r"<(?:https?|mailto):[^|<>]*\|([^<>]*)>")
_BARE_LINK = re.compile(r"<((?:https?|mailto):[^|<>]*)>")
_MENTION = re.compile(r"<[@!#][^<>]*>")
_HOST = re.compile(r"[a-z0-9.-]+")


class FileRefused(Exception):
    """A file that the bot does not read, with the reason for a person."""


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message as it was typed, and that of its attachments (monitoring posts there).

    Slack makes a link of every ``run.py`` and escapes what people typed, so a bare ``<`` is always its own.
    """
    attached = [a.get("text") or a.get("fallback") for a in message.get("attachments") or () if isinstance(a, dict)]
    text = "\n".join(str(part) for part in (message.get("text"), *attached) if part)
    text = _MENTION.sub("", _BARE_LINK.sub(r"\1", _NAMED_LINK.sub(r"\1", text))).strip()
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


def files_of(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [f for f in message.get("files") or () if isinstance(f, dict) and f.get("url_private")]


async def read_message(
    message: Mapping[str, Any], asked: Asked, service: Service, settings: BotSettings
) -> tuple[Asked, dict[str, Any], list[str]]:
    """(what is now known, what the service says, notes for the person). Raises ServiceDown, ServiceRefused."""
    notes: list[str] = []
    evidence_id = asked.evidence_id
    for file in files_of(message)[:3]:
        download = Download(file, settings)
        try:
            download.check()
            evidence_id = await service.keep_evidence(download.pieces())
            break
        except FileRefused as refused:
            notes.append(str(refused))
        except ServiceDown:
            if download.refused is None:
                raise
            notes.append(str(download.refused))
        except ServiceRefused as refused:
            if refused.status in (401, 403):
                raise
            notes.append(f"{download.name} was not taken: {refused}.")
    text = text_of(message)
    asked = Asked(asked.recipe, asked.gpu, asked.num_gpus, asked.overrides, text[:MAX_INPUT_CHARACTERS], evidence_id)
    body: dict[str, Any] = {"log": text or None, "evidence_id": evidence_id or None}
    if not text and not evidence_id:
        return asked, {"summary": "I found no text and no log in this message."}, notes
    answer = await service.diagnose({name: value for name, value in body.items() if value})
    return filled(asked, answer), answer, notes


class Download:
    """A file on its way from Slack to the service. The token goes to Slack's own hosts only."""

    def __init__(self, file: Mapping[str, Any], settings: BotSettings) -> None:
        self._settings = settings
        self.name = str(file.get("name") or "a file")[:100]
        self._size = int(file.get("size") or 0)
        self._kind = str(file.get("mimetype") or "")
        self._address = str(file["url_private"])
        self.refused: FileRefused | None = None
        """Why it broke off: an upload whose source fails looks like a service that is down."""

    def check(self) -> None:
        """Raises FileRefused for what can be known before anything is fetched."""
        if self._kind.startswith(("image/", "video/", "audio/")):
            raise FileRefused(f"{self.name} is a picture or a recording, which I cannot read: paste its text.")
        if self._size > self._settings.max_file_bytes:
            most = self._settings.max_file_bytes >> 20
            raise FileRefused(f"{self.name} is larger than {most} MB: attach the end of the log.")
        if not _is_slack(self._address, self._settings):
            raise FileRefused(f"{self.name} does not lie at Slack and was not read.")

    async def pieces(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._fetched():
                yield piece
        except FileRefused as refused:
            self.refused = refused
            raise
        except (aiohttp.ClientError, TimeoutError) as error:
            self.refused = FileRefused(f"{self.name} could not be read from Slack ({type(error).__name__}).")
            raise self.refused from error

    async def _fetched(self) -> AsyncIterator[bytes]:
        headers = {"Authorization": f"Bearer {self._settings.bot_token.get_secret_value()}"}
        got = 0
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
            session.get(self._address, headers=headers, allow_redirects=False) as response,
        ):
            if response.status != 200 or response.content_type == "text/html":
                raise FileRefused(f"{self.name} could not be read: the app needs the scope files:read.")
            async for piece in response.content.iter_chunked(PIECE_BYTES):
                got += len(piece)
                if got > self._settings.max_file_bytes:
                    raise FileRefused(f"{self.name} is larger than {self._settings.max_file_bytes >> 20} MB.")
                yield piece


def _is_slack(address: str, settings: BotSettings) -> bool:
    """Over TLS and on one of Slack's hosts: the address of a remote file is whatever somebody wrote there."""
    own = urlsplit(settings.slack_api_url)
    try:
        parts = urlsplit(address)
        host = parts.hostname or ""
    except ValueError:
        return False
    if not _HOST.fullmatch(host):
        return False
    if (parts.scheme, parts.netloc) == (own.scheme, own.netloc):
        return True
    return parts.scheme == "https" and (host == "slack.com" or host.endswith((".slack.com", ".slack-files.com")))
