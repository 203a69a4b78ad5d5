"""Configuration by environment (prefix OOMBUDSMAN_), validated at start."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

from platformdirs import user_data_path
from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

MIB = 1024**2


class Settings(BaseSettings):
    """Every setting has a default that works on one machine without a server."""

    model_config = SettingsConfigDict(env_prefix="OOMBUDSMAN_", extra="ignore")

    data_dir: Path = Field(default_factory=lambda: user_data_path("oombudsman", appauthor=False))
    """Folder of the embedded database; created when needed."""
    database_url: SecretStr | None = None
    """None = the embedded SQLite file in ``data_dir``; or postgresql+psycopg://user:password@host/name."""
    database_pool_size: int = Field(default=10, ge=1, le=1000)
    """PostgreSQL connections a process keeps; as many again may be opened for a peak."""
    database_timeout_seconds: float = Field(default=5.0, gt=0, le=300)
    """How long a request waits for a connection, or for SQLite's write lock."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    workers: int = Field(default=1, ge=1, le=256)

    max_estimate_body_bytes: int = Field(default=2 * MIB, ge=1024)
    max_recommend_body_bytes: int = Field(default=8 * MIB, ge=1024)
    """Larger than an estimate's: a pasted log may come with it."""

    max_runs_body_bytes: int = Field(default=64 * MIB, ge=1024)
    """Ten thousand runs of the profiler are about 60 MiB."""
    max_evidence_body_bytes: int = Field(default=600 * MIB, ge=1024)
    """One upload: a log or a memory snapshot."""
    evidence_quota_bytes: int = Field(default=5 * 1024 * MIB, ge=1024)
    """All uploads together."""
    evidence_ttl_seconds: int = Field(default=24 * 3600, ge=60, le=366 * 86400)
    evidence_dir: Path | None = None
    """Folder of uploads, None = ``evidence`` in ``data_dir``; replicas share one."""

    require_api_key: bool | None = None
    """None = as soon as a key exists."""
    trusted_user_header: str | None = None
    """Header in which a proxy in front of the service names the user whom it has signed in; None = no such proxy."""
    rate_limit_per_key: int = Field(default=0, ge=0, le=1_000_000)
    """Requests a minute of one key, in each process; 0 = no limit."""
    rate_limit_per_address: int = Field(default=0, ge=0, le=1_000_000)
    """Requests a minute of one address without a key, in each process; 0 = no limit."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"

    @property
    def is_embedded(self) -> bool:
        """Whether the database is the file in ``data_dir``."""
        return self.database_url is None

    @property
    def resolved_database_url(self) -> str:
        """A SQLAlchemy URL, with the password in it: not for printing."""
        if self.database_url is not None:
            return _with_driver(self.database_url.get_secret_value())
        return f"sqlite:///{self.data_dir.expanduser().absolute() / 'oombudsman.db'}"


def _with_driver(url: str) -> str:
    for prefix in ("postgresql://", "postgres://"):
        if url.startswith(prefix):
            return "postgresql+psycopg://" + url.removeprefix(prefix)
    return url


@functools.cache
def get_settings() -> Settings:
    """The settings of this process, read once."""
    return Settings()
