"""API keys: made, found, revoked. What is stored cannot be turned back into a key."""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from app.db.models import ApiKey
from app.db.session import Database
from estimator.errors import FieldProblem, JobError

SCOPES = ("read", "recommend", "ingest", "admin")
"""read: recipes, runs, calibrations; recommend: ask, and send evidence; ingest: store runs; admin: everything."""
_KEY = re.compile(r"oom_([a-z0-9]{8})_([A-Za-z0-9_-]{43})")
_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
USED_EVERY = dt.timedelta(minutes=1)
"""How exactly the last use is known: writing it at every request would cost more than the request."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: a key's name and what it may do."""

    name: str
    scopes: frozenset[str]

    def may(self, scope: str) -> bool:
        return scope in self.scopes or "admin" in self.scopes


def create(database: Database, name: str, scopes: Collection[str], days: int | None) -> str:
    """A new key, shown once: only its hash is kept. Raises JobError for an unknown scope or a life of no days."""
    problems = [
        FieldProblem("scope", f"unknown scope {scope[:40]!r}", f"one of {', '.join(SCOPES)}")
        for scope in scopes
        if scope not in SCOPES
    ]
    if not scopes:
        problems.append(FieldProblem("scope", "at least one is needed", f"one of {', '.join(SCOPES)}"))
    if not 1 <= len(name) <= 200:
        problems.append(FieldProblem("name", "has to have 1 to 200 characters"))
    if days is not None and not 1 <= days <= 3650:
        problems.append(FieldProblem("days", f"{days} is not possible", "1 to 3650, or none for a key without an end"))
    if problems:
        raise JobError(problems)
    prefix = "".join(secrets.choice(_ALPHABET) for _ in range(8))
    secret = secrets.token_urlsafe(32)
    now = dt.datetime.now(dt.UTC)
    row = ApiKey(
        prefix=prefix,
        secret_hash=_hash(secret),
        name=name,
        scopes=sorted(set(scopes)),
        created_at=now,
        expires_at=now + dt.timedelta(days=days) if days is not None else None,
    )
    with database.transaction() as session:
        session.add(row)
    return f"oom_{prefix}_{secret}"


def exists(database: Database) -> bool:
    """Whether any key was ever made and not revoked: from then on keys are required. An expired one counts, so that
    the service does not open up when it ends."""
    with database.transaction() as session:
        statement = select(func.count()).select_from(ApiKey).where(ApiKey.revoked_at.is_(None))
        return bool(session.execute(statement).scalar_one())


def find(database: Database, text: str) -> Caller | None:
    """Who presents this key; None for one that is unknown, revoked or at its end."""
    match = _KEY.fullmatch(text)
    if match is None:
        return None
    now = dt.datetime.now(dt.UTC)
    with database.transaction() as session:
        row = session.get(ApiKey, match[1])
        known = row.secret_hash if row is not None else _hash("")
        if not hmac.compare_digest(known, _hash(match[2])) or row is None:
            return None
        if row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= now):
            return None
        _note_use(session, row, now)
        return Caller(row.name, frozenset(row.scopes))


def _note_use(session: Session, row: ApiKey, now: dt.datetime) -> None:
    """A clock that went back does not move the last use back."""
    if row.last_used_at is None or now - row.last_used_at > USED_EVERY:
        session.execute(update(ApiKey).where(ApiKey.prefix == row.prefix).values(last_used_at=now))


def revoke(database: Database, prefix: str) -> None:
    """Raises JobError if there is no such key; revoking twice changes nothing."""
    cleaned = prefix.removeprefix("oom_").partition("_")[0]
    with database.transaction() as session:
        row = session.get(ApiKey, cleaned)
        if row is None:
            raise JobError([FieldProblem("PREFIX", f"no key begins with oom_{cleaned[:20]}", "oombudsman keys list")])
        row.revoked_at = row.revoked_at or dt.datetime.now(dt.UTC)


def every(database: Database) -> Sequence[ApiKey]:
    """All keys, newest first."""
    with database.transaction() as session:
        return session.scalars(select(ApiKey).order_by(ApiKey.created_at.desc(), ApiKey.prefix)).all()


def _hash(secret: str) -> str:
    """256 random bits need no slow hash."""
    return hashlib.sha256(secret.encode()).hexdigest()
