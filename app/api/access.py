"""Who may do what, as one table, and how often. Checked before a body is read.

Keys are required as soon as one exists (or as settings say). A route that the table does not name needs an admin key,
and a test finds it: a new route is never open by accident.
"""

from __future__ import annotations

import base64
import binascii
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog
from fastapi.concurrency import run_in_threadpool
from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.errors import problem_response
from app.db.migrations import DatabaseNotReady
from app.db.session import Database
from app.problems import KINDS, Problem
from app.services import keys
from app.services.keys import Caller
from app.settings import Settings
from estimator.errors import FieldProblem

log = structlog.get_logger("oombudsman.access")

PUBLIC = ""

# method, path below "" or "/v1" as a pattern, scope
RULES: tuple[tuple[str, str, str], ...] = (
    ("GET", r"/livez|/readyz|/version|/openapi\.json|/problems/[^/]*", PUBLIC),
    ("GET", r"/recommendations/[^/]+(?:/request|/outcomes)?", PUBLIC),  # who has the id may read
    ("GET", r"/r/[^/]+(?:/what-if)?|/static/[^/]*", PUBLIC),
    ("GET", r"/recipes(?:/[^/]+)?|/gpus|/runs(?:/.*)?|/calibrations(?:/[^/]+(?:/runs)?)?", "read"),
    ("POST", r"/estimate|/recommend|/diagnose|/evidence|/capacity|/compare", "recommend"),
    ("POST", r"/recommendations/[^/]+/outcome|/r/[^/]+/outcome", "recommend"),
    ("GET", r"/metrics", "read"),
    ("POST", r"/runs", "ingest"),
    ("POST", r"/calibrations(?:/[^/]+/(?:de)?activate)?", "admin"),
    ("GET", r"/", "recommend"),
    ("POST", r"/", "recommend"),
    ("GET", r"/measured", "read"),
    ("POST", r"/measured", "ingest"),
)
_COMPILED = tuple((method, re.compile(path), scope) for method, path, scope in RULES)
ADMIN = "admin"
KEYS_KNOWN_SECONDS = 2.0
"""How long it is remembered whether keys exist."""


def scope_of(method: str, path: str) -> str:
    """The scope that a request needs; PUBLIC for none."""
    method = "GET" if method == "HEAD" else method
    bare = path.removeprefix("/v1") or "/"
    return next((s for m, p, s in _COMPILED if m == method and p.fullmatch(bare)), ADMIN)


def is_named(method: str, path: str) -> bool:
    """Whether the table says anything of it."""
    bare = path.removeprefix("/v1") or "/"
    return any(m == method and p.fullmatch(bare) for m, p, _ in _COMPILED)


@dataclass(slots=True)
class Limiter:
    """Requests a minute, by key and by address; in this process only, 0 = no limit."""

    per_key: int
    per_address: int
    _windows: MovingWindowRateLimiter = field(default_factory=lambda: MovingWindowRateLimiter(MemoryStorage()))

    def wait_seconds(self, kind: str, who: str) -> int | None:
        """None if this request may pass (it counts from now on), else how long to wait."""
        most = self.per_key if kind == "key" else self.per_address
        if not most:
            return None
        item = RateLimitItemPerMinute(most)
        if self._windows.hit(item, kind, who):
            return None
        reset = self._windows.get_window_stats(item, kind, who).reset_time
        return max(1, round(reset - time.time()))


class AccessMiddleware:
    """Refuses what the table does not allow: 401 without a key, 403 with one that may not, 429 too often."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings
        self._limiter = Limiter(settings.rate_limit_per_key, settings.rate_limit_per_address)
        self._known: tuple[float, bool] = (-1e9, False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            refusal = await self._refusal(scope)
        except (OperationalError, InterfaceError, PoolTimeoutError, DatabaseNotReady) as error:
            log.error("database_unavailable", error=type(error).__name__)
            refusal = Problem("unavailable", KINDS["unavailable"].meaning, headers={"Retry-After": "5"})
        if refusal is None:
            await self._app(scope, receive, send)
            return
        await problem_response(refusal)(scope, receive, send)

    async def _refusal(self, scope: Scope) -> Problem | None:
        needed = scope_of(scope["method"], scope["path"])
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if needed == PUBLIC:
            return self._too_often("address", _address(scope))
        database: Database = scope["app"].state.database
        required = await run_in_threadpool(self._required, database)
        presented = _presented(headers)
        if presented is None:
            wait = self._too_often("address", _address(scope))
            if wait is not None or not required:
                return wait
            caller = self._of_proxy(headers)
            return _unauthorized("this needs an API key") if caller is None else _forbidden(caller, needed)
        caller = await run_in_threadpool(keys.find, database, presented)
        if caller is None:
            wrong = self._too_often("address", _address(scope))
            return wrong or _unauthorized("this API key is unknown, revoked or expired")
        return self._too_often("key", presented[:16]) or _forbidden(caller, needed)

    def _required(self, database: Database) -> bool:
        if self._settings.require_api_key is not None:
            return self._settings.require_api_key
        checked, found = self._known
        now = time.monotonic()
        if now - checked > KEYS_KNOWN_SECONDS:
            found = keys.exists(database)
            self._known = (now, found)
        return found

    def _of_proxy(self, headers: Mapping[str, str]) -> Caller | None:
        """A user whom a proxy in front of the service has signed in; off unless a header is named."""
        name = (self._settings.trusted_user_header or "").lower()
        user = headers.get(name, "") if name else ""
        return Caller(user, frozenset({"read", "recommend", "ingest"})) if user else None

    def _too_often(self, kind: str, who: str) -> Problem | None:
        wait = self._limiter.wait_seconds(kind, who)
        if wait is None:
            return None
        return Problem("too-many-requests", "too many requests", headers={"Retry-After": str(wait)})


def _presented(headers: Mapping[str, str]) -> str | None:
    """The key of ``Authorization: Bearer``, or the password of ``Basic``, which browsers ask people for."""
    kind, _, value = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return ""
    return None


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else "unknown"


def _unauthorized(text: str) -> Problem:
    error = FieldProblem("header.authorization", text, "Authorization: Bearer oom_…; oombudsman keys create makes one")
    headers = {"WWW-Authenticate": 'Bearer realm="oombudsman", Basic realm="oombudsman: the key as password"'}
    return Problem("unauthorized", text, (error,), headers=headers)


def _forbidden(caller: Caller, needed: str) -> Problem | None:
    if caller.may(needed):
        return None
    text = f"this key may not do that: it lacks the scope {needed}"
    return Problem("forbidden", text, (FieldProblem("header.authorization", text, f"a key with --scope {needed}"),))
