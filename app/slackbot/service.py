"""The service as the bot sees it: a few HTTP calls, and two ways in which they fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import quote

import aiohttp

from app.slackbot.settings import BotSettings

ATTEMPTS = 3
PAUSE_SECONDS = 0.5


class ServiceDown(Exception):
    """The service cannot be reached, or answers that it is not available."""


class ServiceRefused(Exception):
    """The service refused the request. ``errors``: (path, message, suggestion) of each field."""

    def __init__(self, status: int, detail: str, errors: list[tuple[str, str, str | None]]) -> None:
        self.status, self.errors = status, errors
        super().__init__(detail)


class Service:
    """One session of connections; :meth:`close` ends it."""

    def __init__(self, settings: BotSettings) -> None:
        self._base = settings.service_url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=settings.service_timeout_seconds)
        key = settings.api_key
        self._headers = {"Authorization": f"Bearer {key.get_secret_value()}"} if key else {}
        self._session: aiohttp.ClientSession | None = None

    async def recommend(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._call("POST", "/recommend", json=body)

    async def recommendation(self, recommendation_id: str) -> dict[str, Any]:
        return await self._call("GET", f"/recommendations/{quote(recommendation_id, safe='')}")

    async def diagnose(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._call("POST", "/diagnose", json=body)

    async def outcome(self, recommendation_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._call("POST", f"/recommendations/{quote(recommendation_id, safe='')}/outcome", json=body)

    async def keep_evidence(self, chunks: AsyncIterator[bytes]) -> str:
        """The id under which an upload is kept; it is streamed, so it is tried once only."""
        answer = await self._once("POST", "/evidence", data=chunks)
        return str(answer["evidence_id"])

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _call(self, method: str, path: str, json: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Again after a pause while the service is down; every call here may be repeated."""
        for attempt in range(ATTEMPTS):
            try:
                return await self._once(method, path, json=json)
            except ServiceDown:
                if attempt == ATTEMPTS - 1:
                    raise
                await asyncio.sleep(PAUSE_SECONDS * 2**attempt)
        raise AssertionError("unreachable")

    async def _once(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout, headers=self._headers)
        try:
            async with self._session.request(method, self._base + path, **arguments) as response:
                answer = await _json(response)
                if response.status in (429, 502, 503, 504):
                    raise ServiceDown(f"the service answers {response.status}")
                if response.status >= 400:
                    raise _refusal(response.status, answer)
                return answer
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ServiceDown(type(error).__name__) from error


async def _json(response: aiohttp.ClientResponse) -> dict[str, Any]:
    try:
        answer = await response.json(content_type=None)
    except ValueError:
        answer = None
    return answer if isinstance(answer, dict) else {}


def _refusal(status: int, answer: Mapping[str, Any]) -> ServiceRefused:
    errors = [
        (str(e.get("path") or ""), str(e.get("message") or ""), e.get("suggestion"))
        for e in answer.get("errors") or ()
        if isinstance(e, dict)
    ]
    return ServiceRefused(status, str(answer.get("detail") or answer.get("title") or f"status {status}"), errors)
