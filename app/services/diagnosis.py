"""Ask the estimator why a run failed: pasted text, uploaded logs, memory snapshots. No HTTP here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.schemas import DiagnoseBody, Evidence
from app.services import evidence as uploads
from app.settings import Settings
from estimator import ESTIMATOR_VERSION, SCHEMA_VERSION
from estimator import diagnose as reader
from estimator.diagnose.snapshot import SnapshotRefused, differences, read_snapshot
from estimator.errors import FieldProblem, JobError


def diagnose(body: DiagnoseBody, settings: Settings) -> dict[str, Any]:
    """The answer of POST /diagnose. Raises JobError where the evidence cannot be had."""
    job = body.job.to_request() if body.job else None
    cluster = body.cluster.to_request() if body.cluster else None
    stored = _stored(body.evidence_id, settings)
    snapshot = stored is not None and stored.kind == uploads.SNAPSHOT
    text = _read(body.log, None if snapshot else stored)
    answer = with_versions(reader.diagnose(text, job, cluster, body.stack).as_dict())
    if snapshot and stored is not None:
        answer |= of_snapshot(stored.path, "evidence_id", job, cluster, body.stack)
    return answer


def evidence_of(evidence: Evidence, settings: Settings) -> reader.Evidence | None:
    """What the ``evidence`` of POST /recommend says, or None if there is none. Raises JobError as above."""
    if not evidence.log and not evidence.evidence_id:
        return None
    stored = _stored(evidence.evidence_id, settings)
    if stored is not None and stored.kind == uploads.SNAPSHOT:
        raise JobError(
            [
                FieldProblem(
                    "evidence.evidence_id", "is a memory snapshot, which says nothing of the job", "POST /diagnose"
                )
            ]
        )
    return _read(evidence.log, stored)


def of_file(path: Path, job: Any = None, cluster: Any = None, stack: Any = None) -> dict[str, Any]:
    """One file of the command line: a log or a snapshot, told apart by its first bytes. Raises OSError, JobError."""
    with path.open("rb") as file:
        head = file.read(2)
        file.seek(0)
        if uploads.kind_of(head) == uploads.TEXT:
            found = reader.parse_evidence(reader.file_lines(file))
            return with_versions(reader.diagnose(found, job, cluster, stack or {}).as_dict())
    return with_versions(of_snapshot(path, str(path), job, cluster, stack or {}))


def of_snapshot(path: Path, where: str, job: Any, cluster: Any, stack: Any) -> dict[str, Any]:
    """What a snapshot shows, and where it differs from the timeline of the job, if that is known."""
    try:
        snapshot = read_snapshot(path)
    except SnapshotRefused as error:
        raise JobError([FieldProblem(where, f"is no memory snapshot that can be read: {error}")]) from error
    predicted = reader.predicted_components(job, cluster, stack)
    answer: dict[str, Any] = {
        "outcome": "gpu_memory",
        "summary": reader.snapshot_summary(snapshot),
        "snapshot": snapshot,
    }
    if predicted:
        answer["differences"] = differences(snapshot, predicted)
    return answer


def with_versions(answer: dict[str, Any]) -> dict[str, Any]:
    return {**answer, "estimator_version": ESTIMATOR_VERSION, "schema_version": SCHEMA_VERSION}


def _stored(evidence_id: str | None, settings: Settings) -> uploads.Stored | None:
    if not evidence_id:
        return None
    stored = uploads.find(settings, evidence_id)
    if stored is None:
        raise JobError(
            [FieldProblem("evidence_id", "no upload has this id; uploads expire", "send it to /evidence again")]
        )
    return stored


def _read(log: str | None, stored: uploads.Stored | None) -> reader.Evidence:
    """An uploaded log, then the pasted text."""
    if stored is None:
        return reader.parse_text(log or "")
    with stored.path.open("rb") as file:
        lines = reader.file_lines(file)
        if not log:
            return reader.parse_evidence(lines)
        return reader.parse_evidence([*lines, b"\n", log.encode()])
