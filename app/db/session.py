"""One engine a process, one transaction a unit of work. SQLite runs with WAL, a busy timeout and foreign keys."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.orm import Session, sessionmaker

from app.settings import Settings


def create_database_engine(settings: Settings, *, immediate: bool = False) -> Engine:
    """An engine for the configured database; ``immediate``: SQLite transactions take the write lock at once."""
    url = make_url(settings.resolved_database_url)
    timeout = settings.database_timeout_seconds
    if url.get_backend_name() == "sqlite":
        _make_folder(url, private=settings.is_embedded)
        engine = create_engine(url, connect_args={"timeout": timeout})
        _configure_sqlite(engine, "BEGIN IMMEDIATE" if immediate else "BEGIN")
        return engine
    return create_engine(
        url,
        pool_size=settings.database_pool_size,
        max_overflow=settings.database_pool_size,
        pool_timeout=timeout,
        pool_pre_ping=True,
        connect_args={"connect_timeout": max(2, round(timeout))},
    )


def _make_folder(url: URL, private: bool) -> None:
    if url.database and url.database != ":memory:":
        Path(url.database).parent.mkdir(mode=0o700 if private else 0o755, parents=True, exist_ok=True)


def _configure_sqlite(engine: Engine, begin: str) -> None:
    @event.listens_for(engine, "connect")
    def _on_connect(connection: sqlite3.Connection, _record: Any) -> None:
        # SQLAlchemy says BEGIN itself (below), so that DDL is part of the transaction too.
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            _switch_to_wal(connection)

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Any) -> None:
        connection.exec_driver_sql(begin)


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    """The mode stays in the file; if another process holds a lock to switch it, the next connection finds it done."""
    try:
        connection.execute("PRAGMA journal_mode = WAL")
    except sqlite3.OperationalError as error:
        if "locked" not in str(error) and "readonly" not in str(error):
            raise


class Database:
    """The engine and its sessions."""

    def __init__(self, settings: Settings) -> None:
        self.engine = create_database_engine(settings)
        self._sessions = sessionmaker(self.engine, expire_on_commit=False)

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """A session that commits at the end, or rolls back on any exception."""
        with self._sessions.begin() as session:
            yield session

    def close(self) -> None:
        """Give all connections back."""
        self.engine.dispose()
