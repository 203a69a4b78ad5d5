"""Tables. Names of constraints and indexes follow one convention, so that migrations can name what they change."""

from __future__ import annotations

import datetime as dt
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, ForeignKey, Index, MetaData, String, TypeDecorator
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAMING_CONVENTION = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class UtcDateTime(TypeDecorator[dt.datetime]):
    """An aware UTC time; SQLite, which knows no zones, stores it without."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: dt.datetime | None, dialect: Dialect) -> dt.datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a time without a zone")
        return value.astimezone(dt.UTC)

    def process_result_value(self, value: dt.datetime | None, dialect: Dialect) -> dt.datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=dt.UTC) if value.tzinfo is None else value.astimezone(dt.UTC)


class Base(DeclarativeBase):
    """Base of all tables."""

    metadata = MetaData(naming_convention=NAMING_CONVENTION)


class Recommendation(Base):
    """One answer of POST /recommend with all that reproduces it. Rows never change."""

    __tablename__ = "recommendations"
    __table_args__ = (Index(None, "created_at"),)

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    """Unguessable: who has it may read the answer."""
    created_at: Mapped[dt.datetime] = mapped_column(UtcDateTime)
    kind: Mapped[str] = mapped_column(String(32))
    """Which question was answered: "recommend"; an open set."""
    request: Mapped[dict[str, Any]] = mapped_column(JSON)
    result: Mapped[dict[str, Any]] = mapped_column(JSON)
    """The answer as it was sent, keys in order."""
    estimator_version: Mapped[str] = mapped_column(String(64))
    calibration_id: Mapped[str | None] = mapped_column(String(64))
    schema_version: Mapped[str] = mapped_column(String(16))


class ProfiledRun(Base):
    """One measured run of one rank: of the profiler, a log, a snapshot or a user's feedback. Rows never change."""

    __tablename__ = "profiled_runs"
    __table_args__ = (
        Index(None, "stored_at", "run_id"),
        Index(None, "gpu", "stored_at", "run_id"),
        Index(None, "strategy", "stored_at", "run_id"),
        Index(None, "outcome", "stored_at", "run_id"),
        Index(None, "fingerprint"),
        Index(None, "stack", "gpu"),
        Index(None, "recommendation_id"),
    )

    run_id: Mapped[str] = mapped_column(String(200), primary_key=True)
    """Given by the client, so that sending twice stores once and repeats of a job stay apart."""
    stored_at: Mapped[dt.datetime] = mapped_column(UtcDateTime)
    source: Mapped[str] = mapped_column(String(16))
    method: Mapped[str] = mapped_column(String(16))
    outcome: Mapped[str] = mapped_column(String(16))
    fingerprint: Mapped[str] = mapped_column(String(64))
    """What decides the measurement: equal for repeats."""
    gpu: Mapped[str] = mapped_column(String(64))
    strategy: Mapped[str | None] = mapped_column(String(32))
    world_size: Mapped[int]
    rank: Mapped[int]
    allocator: Mapped[str] = mapped_column(String(32))
    peak_allocated_bytes: Mapped[int | None] = mapped_column(BigInteger)
    persistent_bytes: Mapped[int | None] = mapped_column(BigInteger)
    peak_reserved_bytes: Mapped[int | None] = mapped_column(BigInteger)
    survival_bytes: Mapped[int | None] = mapped_column(BigInteger)
    device_used_bytes: Mapped[int | None] = mapped_column(BigInteger)
    stack: Mapped[str] = mapped_column(String(120), server_default="")
    """Versions to the minor, as ``estimator.calibration.stack_key`` writes them."""
    recommendation_id: Mapped[str | None] = mapped_column(String(64))
    """The recommendation that this run answers (feedback)."""
    content_hash: Mapped[str] = mapped_column(String(64))
    document: Mapped[dict[str, Any]] = mapped_column(JSON)
    """The run as it was sent."""


class RunPrediction(Base):
    """What a version of the estimator says of a fingerprint."""

    __tablename__ = "run_predictions"

    fingerprint: Mapped[str] = mapped_column(String(64), primary_key=True)
    estimator_version: Mapped[str] = mapped_column(String(64), primary_key=True)
    refused: Mapped[str | None] = mapped_column(String(200))
    peak_allocated_bytes: Mapped[int | None] = mapped_column(BigInteger)
    persistent_bytes: Mapped[int | None] = mapped_column(BigInteger)
    peak_reserved_bytes: Mapped[int | None] = mapped_column(BigInteger)
    survival_bytes: Mapped[int | None] = mapped_column(BigInteger)
    """Only where a run of this fingerprint measured it."""
    components: Mapped[dict[str, int] | None] = mapped_column(JSON)
    """Bytes by component at the predicted peak."""
    model: Mapped[str | None] = mapped_column(String(64))
    """Which model: runs of one are held out together."""
    num_communicators: Mapped[int | None]


class CalibrationRow(Base):
    """One version of a calibration. Rows never change."""

    __tablename__ = "calibrations"
    __table_args__ = (Index(None, "created_at", "id"),)

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    """Of the content: fitting the same runs again gives the same id."""
    created_at: Mapped[dt.datetime] = mapped_column(UtcDateTime)
    stack: Mapped[str] = mapped_column(String(120))
    gpu_family: Mapped[str] = mapped_column(String(32))
    estimator_version: Mapped[str] = mapped_column(String(64))
    num_runs: Mapped[int]
    document: Mapped[dict[str, Any]] = mapped_column(JSON)
    run_ids: Mapped[list[str]] = mapped_column(JSON)


class ActiveCalibration(Base):
    """The calibration that answers for a stack and a GPU family; without a row, the shipped one."""

    __tablename__ = "active_calibrations"

    stack: Mapped[str] = mapped_column(String(120), primary_key=True)
    gpu_family: Mapped[str] = mapped_column(String(32), primary_key=True)
    calibration_id: Mapped[str] = mapped_column(ForeignKey("calibrations.id"))
    activated_at: Mapped[dt.datetime] = mapped_column(UtcDateTime)


class ApiKey(Base):
    """A key of the API: what it may do, until when; the key itself is not kept."""

    __tablename__ = "api_keys"

    prefix: Mapped[str] = mapped_column(String(16), primary_key=True)
    """The part of the key that may be shown."""
    secret_hash: Mapped[str] = mapped_column(String(64))
    name: Mapped[str] = mapped_column(String(200))
    scopes: Mapped[list[str]] = mapped_column(JSON)
    created_at: Mapped[dt.datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[dt.datetime | None] = mapped_column(UtcDateTime)
    revoked_at: Mapped[dt.datetime | None] = mapped_column(UtcDateTime)
    last_used_at: Mapped[dt.datetime | None] = mapped_column(UtcDateTime)
