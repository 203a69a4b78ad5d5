"""Where the database stands, and bringing it to the head. Alembic, slow to load, is imported only to migrate."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Engine, inspect, text

from app.settings import Settings

if TYPE_CHECKING:
    from alembic.config import Config

HEAD = "0004"
"""The newest revision in alembic/versions; a test compares it."""


class State(StrEnum):
    """How the database's schema relates to this version of the service."""

    EMPTY = "empty"
    BEHIND = "behind"
    CURRENT = "current"
    AHEAD = "ahead"


class DatabaseNotReady(Exception):
    """The schema is not the one this version works with; the message says what to run."""


def current_revision(engine: Engine) -> str | None:
    """The revision that the database says it has, None where it was never migrated."""
    with engine.connect() as connection:
        if not inspect(connection).has_table("alembic_version"):
            return None
        return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def state(engine: Engine) -> State:
    """EMPTY, BEHIND, CURRENT or AHEAD (a revision that this version does not know)."""
    revision = current_revision(engine)
    if revision is None:
        return State.EMPTY
    if revision == HEAD:
        return State.CURRENT
    return State.BEHIND if revision in known_revisions() else State.AHEAD


def require_current(engine: Engine) -> None:
    """Raise DatabaseNotReady unless the schema is at the head."""
    found = state(engine)
    if found is State.CURRENT:
        return
    if found is State.AHEAD:
        raise DatabaseNotReady(
            f"The database is at revision {current_revision(engine)}, which this version does not know: it is newer. "
            "Install the version that migrated it, or restore a backup."
        )
    raise DatabaseNotReady("The database is empty or behind this version. Run: oombudsman db upgrade")


def prepare(settings: Settings, engine: Engine) -> None:
    """Create a new embedded database; then raise DatabaseNotReady unless the schema is at the head."""
    if settings.is_embedded and state(engine) is State.EMPTY:
        upgrade(settings)
    require_current(engine)


def upgrade(settings: Settings) -> None:
    """Bring the schema to the head. Safe to run twice at once: the second waits and finds nothing to do."""
    from alembic import command

    command.upgrade(alembic_config(settings), "head")


def known_revisions() -> frozenset[str]:
    """Revisions that this version has a migration for."""
    return frozenset(path.name.partition("_")[0] for path in (scripts_folder() / "versions").glob("*.py"))


def alembic_config(settings: Settings) -> Config:
    """Alembic's configuration with this service's settings, for the commands of the command line and the tests."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(scripts_folder()).replace("%", "%%"))
    config.attributes["settings"] = settings
    return config


def scripts_folder() -> Path:
    """The migrations: beside the packages in a checkout, below sys.prefix where a wheel was installed."""
    checkout = Path(__file__).resolve().parents[2] / "alembic"
    return checkout if (checkout / "versions").is_dir() else Path(sys.prefix) / "share" / "oombudsman" / "alembic"
