"""Feedback: what became of a recommendation. Each report becomes a run, so that it counts like a measurement."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from app.db.models import Recommendation
from app.db.session import Database
from app.schemas import Measured, OutcomeBody, Run
from app.services import runs
from estimator import SCHEMA_VERSION
from estimator.diagnose import parse_text
from estimator.errors import FieldProblem, JobError


def report(database: Database, kept: Recommendation, body: OutcomeBody) -> dict[str, Any]:
    """Store the report and say what was predicted beside it. Raises JobError for a rank that the answer does not have.

    The same report sent twice is stored once.
    """
    predicted = _predicted(kept.result, body.rank)
    evidence = parse_text(body.log) if body.log else None
    peak = body.peak or _peak_of(evidence)
    failed = evidence is not None and evidence.first is not None and evidence.first.kind.place in ("gpu", "gpu_driver")
    expected = (predicted or {}).get("peak_allocated_bytes")
    cluster = kept.request["cluster"]
    digest = hashlib.sha256(f"{body.rank} {body.ran} {body.peak} {body.log}".encode()).hexdigest()[:16]
    run = Run(
        run_id=f"feedback:{kept.id}:{digest}",
        source="feedback",
        method="real",
        outcome="ok" if body.ran else "oom" if failed or not body.log else "error",
        gpu=cluster["gpu"],
        world_size=cluster["num_gpus"],
        allocator=(predicted or {}).get("allocator", {}).get("setting", "default"),
        job={
            "request": kept.request,
            "changes": _changes(kept.result, body.rank),
            "rank": body.rank,
            "predicted_peak_bytes": expected,
        },
        measured=Measured(peak_allocated_bytes=peak),
        error=None if body.ran else (body.log or "")[-20_000:] or None,
    )
    stored = runs.store(database, [run], kept.id)
    return {
        "run_id": run.run_id,
        "stored": bool(stored.stored),
        "outcome": run.outcome,
        "measured_peak_bytes": peak,
        "predicted_peak_bytes": expected,
        "relative_error": _relative(expected, peak),
        "schema_version": SCHEMA_VERSION,
    }


def of(database: Database, recommendation_id: str) -> list[dict[str, Any]]:
    """The reports on one recommendation, newest first: predicted beside measured."""
    page = runs.page(database, {"recommendation_id": recommendation_id}, 100, None)
    reports = []
    for row in page.rows:
        about = row.document.get("job") or {}
        expected = about.get("predicted_peak_bytes")
        reports.append(
            {
                "run_id": row.run_id,
                "stored_at": row.stored_at.isoformat(),
                "rank": about.get("rank"),
                "outcome": row.outcome,
                "measured_peak_bytes": row.peak_allocated_bytes,
                "predicted_peak_bytes": expected,
                "relative_error": _relative(expected, row.peak_allocated_bytes),
            }
        )
    return reports


def _relative(predicted: int | None, measured: int | None) -> float | None:
    return round(predicted / measured - 1, 6) if predicted and measured else None


def _predicted(result: Mapping[str, Any], rank: int) -> Mapping[str, Any] | None:
    if rank == 0:
        return result.get("current")
    recommendations = result.get("recommendations") or []
    if rank > len(recommendations):
        message = f"the recommendation has no rank {rank}"
        raise JobError([FieldProblem("rank", message, f"0 to {len(recommendations)}")])
    found: Mapping[str, Any] = recommendations[rank - 1]["estimate"]
    return found


def _changes(result: Mapping[str, Any], rank: int) -> list[Any]:
    return list(result["recommendations"][rank - 1]["changes"]) if rank else []


def _peak_of(evidence: Any) -> int | None:
    if evidence is None:
        return None
    values = [reading.value("max_allocated_bytes") for reading in evidence.readings]
    if evidence.first is not None:
        values.append(evidence.first.value("allocated_bytes"))
    return max((value for value in values if value), default=None)
