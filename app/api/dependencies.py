"""What routes are given."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from app.db.session import Database


def _database(request: Request) -> Database:
    database: Database = request.app.state.database
    return database


DatabaseDependency = Annotated[Database, Depends(_database)]
