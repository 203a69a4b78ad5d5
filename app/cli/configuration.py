"""``oombudsman config``: what the service would run with, and where each value comes from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import SecretStr, ValidationError
from rich.table import Table
from rich.text import Text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from app.cli.console import console
from app.cli.failures import Failure
from app.problems import Problem
from app.settings import Settings
from estimator.errors import FieldProblem

HIDDEN = "***"


def effective() -> list[dict[str, Any]]:
    """Every setting: ``variable``, ``value`` (secrets hidden), ``from`` (environment or default).

    Raises Failure that names each variable that cannot be used, without its value.
    """
    try:
        settings = Settings()
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        raise Failure(
            Problem(
                "invalid-request",
                "the configuration cannot be used",
                tuple(FieldProblem(variable(str(one["loc"][0])), one["msg"]) for one in found),
            )
        ) from None
    given = {name.upper() for name in os.environ}
    return [
        {
            "variable": variable(name),
            "value": shown(getattr(settings, name)),
            "from": "environment" if variable(name) in given else "default",
        }
        for name in Settings.model_fields
    ]


def variable(field: str) -> str:
    """The environment variable of a setting; pydantic names either."""
    prefix = str(Settings.model_config["env_prefix"])
    upper = field.upper()
    return upper if upper.startswith(prefix) else prefix + upper


def shown(value: object) -> object:
    """As it may be printed: of a secret only what an address says beside its password."""
    if isinstance(value, SecretStr):
        return without_password(value.get_secret_value())
    return str(value) if isinstance(value, Path) else value


def without_password(url: str) -> str:
    """An address without its password and without the values of its query, where a password may be too.

    Nothing of it where it is not certain which part is the password: one that holds an unescaped @ ends up in the host.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return HIDDEN
    if "@" in (parsed.host or "") or "@" in (parsed.database or ""):
        return HIDDEN
    query = "&".join(f"{name}={HIDDEN}" for name in parsed.query)
    return parsed.set(query={}).render_as_string(hide_password=True) + (f"?{query}" if query else "")


def print_settings(rows: list[dict[str, Any]]) -> None:
    """A table on standard output."""
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for column in ("variable", "value", "from"):
        table.add_column(column, overflow="fold")
    for row in rows:
        value = "" if row["value"] is None else str(row["value"])
        table.add_row(row["variable"], Text(value), row["from"])
    console().print(table)
