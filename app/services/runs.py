"""Measured runs: checked, stored once, listed, and held against the estimate. No HTTP here."""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.exc import IntegrityError

from app.db.models import ProfiledRun, RunPrediction
from app.db.repositories import Runs
from app.db.session import Database
from app.schemas import Run
from estimator import SCHEMA_VERSION
from estimator.calibration import stack_key
from estimator.catalog import find_gpu
from estimator.errors import FieldProblem, JobError
from estimator.reading import read_stack

_VERSION_CHARACTERS = frozenset("0123456789abcdefghijklmnopqrstuvwxyz.+-_")


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of a batch."""

    stored: int
    unchanged: int
    """Runs that were there already, with the same content."""


def store(database: Database, runs: Sequence[Run], recommendation_id: str | None = None) -> Stored:
    """Store all of them or none. When this returns, they are committed. Raises JobError naming each bad row."""
    problems: list[FieldProblem] = []
    rows: dict[str, dict[str, Any]] = {}
    for number, run in enumerate(runs):
        found = check(run, f"runs[{number}]")
        if found:
            problems += found
            continue
        row = _row(run, recommendation_id)
        before = rows.setdefault(run.run_id, row)
        if before["content_hash"] != row["content_hash"]:
            problems.append(FieldProblem(f"runs[{number}].run_id", "stands twice in this batch, with other content"))
    if problems:
        raise JobError(problems)
    for attempt in range(3):
        try:
            return _store_new(database, runs, rows)
        except IntegrityError:  # another process stored one of them meanwhile: look again
            if attempt == 2:
                raise
    raise AssertionError("unreachable")


def _store_new(database: Database, runs: Sequence[Run], rows: dict[str, dict[str, Any]]) -> Stored:
    with database.transaction() as session:
        repository = Runs(session)
        present = repository.hashes(list(rows))
        clashes = [
            FieldProblem(f"runs[{number}].run_id", "is stored already, with other content", "a run_id of its own")
            for number, run in enumerate(runs)
            if present.get(run.run_id, rows[run.run_id]["content_hash"]) != rows[run.run_id]["content_hash"]
        ]
        if clashes:
            raise JobError(clashes)
        repository.add([row for run_id, row in rows.items() if run_id not in present])
    return Stored(len(rows) - len(present), len(present))


def check(run: Run, where: str = "") -> list[FieldProblem]:
    """What cannot be true of a run, each with the place (below ``where``) and what would be right."""
    return [FieldProblem(f"{where}.{p.path}" if where else p.path, p.message, p.suggestion) for p in _check(run)]


def _check(run: Run) -> list[FieldProblem]:
    found: list[FieldProblem] = []
    measured = run.measured
    try:
        total = find_gpu(run.gpu).total_bytes
    except JobError as error:
        found.append(FieldProblem("gpu", error.problems[0].message, error.problems[0].suggestion))
        total = None
    try:
        read_stack(run.stack)
    except JobError as error:
        found += [FieldProblem(p.path, p.message, p.suggestion) for p in error.problems]
    for name, version in run.stack.items():
        if not version[:1].isdigit() or not set(version.lower()) <= _VERSION_CHARACTERS:
            found.append(FieldProblem(f"stack.{name}", f"{version[:40]!r} is no version", "such as 2.11.0"))
    if run.rank >= run.world_size:
        found.append(FieldProblem("rank", f"is not below world_size {run.world_size}"))
    if run.outcome == "ok" and run.source != "feedback" and measured.peak_allocated_bytes is None:
        found.append(FieldProblem("measured.peak_allocated_bytes", "is required for a run that was ok"))
    for name in (
        "peak_allocated_bytes",
        "persistent_bytes",
        "peak_reserved_bytes",
        "device_used_bytes",
        "survival_bytes",
    ):
        value = getattr(measured, name)
        if value is not None and total is not None and value > 1.01 * total:
            found.append(FieldProblem(f"measured.{name}", f"{value} is more than the card has", f"at most {total}"))
    peak, reserved = measured.peak_allocated_bytes, measured.peak_reserved_bytes
    if peak is not None and reserved is not None and reserved < peak:
        found.append(FieldProblem("measured.peak_reserved_bytes", "is below peak_allocated_bytes"))
    if peak is not None and measured.survival_bytes is not None and measured.survival_bytes < 0.99 * peak:
        found.append(FieldProblem("measured.survival_bytes", "is below peak_allocated_bytes"))
    if run.source != "feedback" and run.job is None and run.profile is None:
        found.append(FieldProblem("job", "is required", "the job as POST /estimate takes it"))
    return found


def _row(run: Run, recommendation_id: str | None) -> dict[str, Any]:
    document = run.model_dump(mode="json", exclude_none=True)
    content = json.dumps({k: v for k, v in document.items() if k != "run_id"}, sort_keys=True)
    return {
        "run_id": run.run_id,
        "stored_at": dt.datetime.now(dt.UTC),
        "source": run.source,
        "method": run.method,
        "outcome": run.outcome,
        "fingerprint": fingerprint(run),
        "gpu": find_gpu(run.gpu).name,
        "strategy": strategy_of(run),
        "world_size": run.world_size,
        "rank": run.rank,
        "allocator": run.allocator,
        "peak_allocated_bytes": run.measured.peak_allocated_bytes,
        "persistent_bytes": run.measured.persistent_bytes,
        "peak_reserved_bytes": run.measured.peak_reserved_bytes,
        "survival_bytes": run.measured.survival_bytes,
        "device_used_bytes": run.measured.device_used_bytes,
        "stack": stack_key(read_stack(run.stack)),
        "recommendation_id": recommendation_id,
        "content_hash": hashlib.sha256(content.encode()).hexdigest(),
        "document": document,
    }


def fingerprint(run: Run) -> str:
    """Of what decides the measurement: job, rank, world, allocator, GPU, stack."""
    job: Any = run.job
    if run.profile is not None:
        job = {name: value for name, value in run.profile.items() if name not in ("run_id", "tags")}
    decisive = [job, run.rank, run.world_size, run.allocator, find_gpu(run.gpu).name, sorted(run.stack.items())]
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:32]


def strategy_of(run: Run) -> str | None:
    """The sharding strategy, where the run says it."""
    if run.profile is not None:
        sharding = (run.profile.get("settings") or {}).get("sharding") or {}
        value = sharding.get("strategy")
        return value[:32] if isinstance(value, str) else None
    return None


@dataclass(frozen=True, slots=True)
class Page:
    """Rows, newest first, and where the next page begins."""

    rows: Sequence[ProfiledRun]
    next_cursor: str | None


def page(database: Database, filters: Mapping[str, str], limit: int, cursor: str | None) -> Page:
    """Raises JobError for a cursor that this service did not give."""
    after = read_cursor(cursor) if cursor else None
    with database.transaction() as session:
        rows = Runs(session).page(filters, limit + 1, after)
    more = len(rows) > limit
    rows = rows[:limit]
    return Page(rows, make_cursor(rows[-1].stored_at, rows[-1].run_id) if more else None)


def get(database: Database, run_id: str) -> ProfiledRun | None:
    with database.transaction() as session:
        return Runs(session).get(run_id)


def make_cursor(moment: dt.datetime, name: str) -> str:
    """Where a page ended: the time and the id of its last row."""
    text = f"{moment.astimezone(dt.UTC).isoformat()} {name}"
    return base64.urlsafe_b64encode(text.encode()).decode()


def read_cursor(cursor: str) -> tuple[dt.datetime, str]:
    """The inverse; raises JobError."""
    try:
        stored_at, _, run_id = base64.urlsafe_b64decode(cursor.encode()).decode().partition(" ")
        moment = dt.datetime.fromisoformat(stored_at)
        return moment.astimezone(dt.UTC), run_id
    except (ValueError, binascii.Error, OverflowError) as error:
        message = "is not a cursor of this service"
        raise JobError([FieldProblem("query.cursor", message, "next_cursor of the page before")]) from error


def as_plain(row: ProfiledRun, predicted: RunPrediction | None = None) -> dict[str, Any]:
    """One run for an answer."""
    plain: dict[str, Any] = {
        **row.document,
        "gpu": row.gpu,
        "strategy": row.strategy,
        "fingerprint": row.fingerprint,
        "stored_at": row.stored_at.isoformat(),
        "recommendation_id": row.recommendation_id,
    }
    if predicted is not None:
        plain["predicted"] = {
            "peak_allocated_bytes": predicted.peak_allocated_bytes,
            "persistent_bytes": predicted.persistent_bytes,
            "peak_reserved_bytes": predicted.peak_reserved_bytes,
            "refused": predicted.refused,
            "estimator_version": predicted.estimator_version,
        }
    return plain | {"schema_version": SCHEMA_VERSION}
