"""``oombudsman keys``: make, list, revoke."""

from __future__ import annotations

from rich.table import Table

from app.cli.console import console
from app.cli.database import opened
from app.services import keys


def create(name: str, scopes: list[str], days: int | None) -> str:
    with opened() as database:
        return keys.create(database, name, scopes, days)


def revoke(prefix: str) -> None:
    with opened() as database:
        keys.revoke(database, prefix)


def print_keys() -> None:
    with opened() as database:
        rows = keys.every(database)
    if not rows:
        console().print("There is no key, so none is required. oombudsman keys create NAME makes one.")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for column in ("key", "name", "scopes", "until", "last used", ""):
        table.add_column(column)
    for row in rows:
        until = row.expires_at.date().isoformat() if row.expires_at else "no end"
        used = row.last_used_at.isoformat(" ", "minutes")[:16] if row.last_used_at else "never"
        table.add_row(
            f"oom_{row.prefix}_…", row.name, ", ".join(row.scopes), until, used, "revoked" if row.revoked_at else ""
        )
    console().print(table)
