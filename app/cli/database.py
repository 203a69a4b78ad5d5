"""The database as the commands use it: failures become words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from pydantic import ValidationError
from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from app.cli.failures import BAD_INPUT, FAULT, Failure, warn
from app.db import migrations
from app.db.models import Recommendation
from app.db.session import Database, create_database_engine
from app.problems import Problem, of_validation_error
from app.schemas import RecommendBody
from app.services import calibrations, storage
from app.settings import Settings, get_settings
from estimator.calibration import Calibration


def keep(body: RecommendBody, answer: dict[str, Any]) -> None:
    """Store one answer, in a new embedded database if there is none; raises Failure."""
    with _opened() as database:
        storage.store(database, body, answer)


def find(recommendation_id: str) -> Recommendation | None:
    """A stored answer; raises Failure if the database cannot be read."""
    with _opened() as database:
        return storage.load(database, recommendation_id)


def active_calibrations() -> tuple[Calibration, ...]:
    """Those that answer; none, and a warning, where the database cannot be used. Makes no database."""
    try:
        settings = _settings()
        if settings.is_embedded and not Path(make_url(settings.resolved_database_url).database or "").exists():
            return ()
        with _opened(settings) as database:
            return calibrations.active(database)
    except Failure as failure:
        warn(f"answered with the shipped calibration: {failure.problem.detail}")
        return ()


@contextmanager
def opened() -> Iterator[Database]:
    """The database of the settings, at the head; raises Failure."""
    with _opened() as database:
        yield database


def upgrade() -> str:
    """Migrate to the head; says what was done, or ends the program."""
    with _ending():
        settings = get_settings()
        with _named(settings):
            engine = create_database_engine(settings)
            try:
                before = migrations.state(engine)
                if before is migrations.State.AHEAD:
                    migrations.require_current(engine)
                if before is not migrations.State.CURRENT:
                    migrations.upgrade(settings)
            finally:
                engine.dispose()
        done = "is ready" if before is migrations.State.CURRENT else "was migrated"
        return f"The database {done}, at revision {migrations.HEAD}: {engine.url.render_as_string(hide_password=True)}"


def prepare_or_exit() -> Settings:
    """The settings, once the database is at the head; else ends the program with the command to run."""
    with _ending():
        settings = get_settings()
        with _opened(settings):
            return settings


@contextmanager
def _opened(settings: Settings | None = None) -> Iterator[Database]:
    settings = settings or _settings()
    with _named(settings):
        database = Database(settings)
        try:
            migrations.prepare(settings, database.engine)
            yield database
        finally:
            database.close()


def _settings() -> Settings:
    try:
        return get_settings()
    except ValidationError as error:
        raise Failure(Problem("unavailable", _wrong_setting(error))) from error


def _wrong_setting(error: ValidationError) -> str:
    problems = of_validation_error(error, Settings).errors
    return "; ".join(f"OOMBUDSMAN_{problem.path.upper()} {problem.message}" for problem in problems)


@contextmanager
def _named(settings: Settings) -> Iterator[None]:
    try:
        yield
    except migrations.DatabaseNotReady as error:
        raise Failure(Problem("unavailable", str(error))) from error
    except (SQLAlchemyError, OSError) as error:
        where = (
            f"the folder {settings.data_dir} (OOMBUDSMAN_DATA_DIR)"
            if settings.is_embedded
            else "OOMBUDSMAN_DATABASE_URL"
        )
        cause = getattr(error, "orig", None) or error
        raise Failure(Problem("unavailable", f"the database cannot be used, see {where}: {cause}")) from error


@contextmanager
def _ending() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        typer.echo(f"error: {_wrong_setting(error)}", err=True)
        raise typer.Exit(BAD_INPUT) from error
    except Failure as failure:
        typer.echo(f"error: {failure.problem.detail}", err=True)
        raise typer.Exit(FAULT) from failure
