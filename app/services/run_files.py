"""Files with measured runs, as runs: the profiler's JSON lines, training logs, memory snapshots."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from app.problems import of_validation_error
from app.schemas import Measured, Run
from app.services import runs
from app.services.evidence import SNAPSHOT, kind_of
from estimator.diagnose import file_lines, job_from_evidence, parse_evidence
from estimator.diagnose.snapshot import SnapshotRefused, read_snapshot

MAX_LINE_BYTES = 4 << 20
SURVIVAL_TOLERANCE = 0.01
"""A bracket that is wider says too little."""
GRAIN_BYTES = 4 << 20
_STACK = ("megatron_core", "megatron_bridge", "transformer_engine", "torch")


class BadRow(ValueError):
    """A row that is no run; the message names the line and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class About:
    """What a log or a snapshot leaves out."""

    job: Mapping[str, Any]
    """As POST /estimate takes it."""
    gpu: str
    world_size: int
    rank: int = 0
    allocator: str = "default"
    stack: Mapping[str, str] = field(default_factory=dict)

    def as_run(self) -> dict[str, Any]:
        return {
            "job": dict(self.job),
            "gpu": self.gpu,
            "world_size": self.world_size,
            "rank": self.rank,
            "allocator": self.allocator,
            "stack": dict(self.stack),
        }


def read(path: Path, about: About | None = None) -> Iterator[Run | BadRow]:
    """The runs of a file in order, a bad row in the place of what could not be read. Streams; raises OSError.

    ``about``: job and cluster where a log or a snapshot does not say them.
    """
    with path.open("rb") as file:
        head = file.read(64)
    if kind_of(head) == SNAPSHOT:
        yield _of_snapshot(path, about)
    elif head.lstrip().startswith(b"{"):
        yield from _of_records(path)
    else:
        yield _of_log(path, about)


def _of_records(path: Path) -> Iterator[Run | BadRow]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{path}:{number}"
            if len(line) > MAX_LINE_BYTES:
                yield BadRow(f"{where}: the line is longer than {MAX_LINE_BYTES} bytes")
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES)
                continue
            if not line.strip():
                continue
            try:
                document = json.loads(line)
            except ValueError as error:
                cut = "" if line.endswith(b"\n") else " (the last line, without its end: was the file cut?)"
                yield BadRow(f"{where}: is not JSON{cut}: {str(error)[:80]}")
                continue
            yield of_record(document, where)


def of_record(document: Any, where: str) -> Run | BadRow:
    """A record of the profiler, or a run as POST /runs takes it."""
    if not isinstance(document, dict):
        return BadRow(f"{where}: is {type(document).__name__}, not an object")
    plain = _from_profiler(document) if document.get("record_version") else document
    try:
        run = Run.model_validate(plain)
    except ValidationError as error:
        problems = of_validation_error(error, Run).errors
    else:
        problems = tuple(runs.check(run))
        if not problems:
            return run
    words = (f"{p.path} {p.message}" + (f" ({p.suggestion})" if p.suggestion else "") for p in problems[:5])
    return BadRow(f"{where}: " + "; ".join(words))


def _from_profiler(record: Mapping[str, Any]) -> dict[str, Any]:
    gpu = record.get("gpu")
    stack = record.get("stack")
    measured = {name: record.get(name) for name in Measured.model_fields}
    phases = record.get("phases")
    job = record.get("job")
    if record.get("kind") == "survival":
        measured["survival_bytes"] = _bisected(record)
        parallel = _inner(job, "settings", "parallel")
        record = {**record, "world_size": parallel.get("world_size"), "rank": _inner(job).get("rank")}
    return {
        "run_id": record.get("run_id"),
        "source": "profiler",
        "method": record.get("method"),
        "outcome": record.get("outcome"),
        "gpu": gpu.get("name") if isinstance(gpu, dict) else gpu,
        "world_size": record.get("world_size"),
        "rank": record.get("rank"),
        "allocator": record.get("allocator"),
        "stack": {k: v for k, v in stack.items() if k in _STACK and v} if isinstance(stack, dict) else {},
        "profile": job,
        "measured": {name: value for name, value in measured.items() if value is not None},
        "phases": [_phase(p) for p in phases] if isinstance(phases, list) else [],
        "measured_at": record.get("started_at"),
        "error": record.get("error") if isinstance(record.get("error"), str) else None,
    }


def _bisected(record: Mapping[str, Any]) -> int | None:
    """The cap that a run survived, where the next lower one that was tried killed it."""
    dies, survives = record.get("dies_at_bytes"), record.get("survives_at_bytes")
    if not isinstance(dies, int) or not isinstance(survives, int):
        return None
    return survives if survives - dies <= max(GRAIN_BYTES, SURVIVAL_TOLERANCE * survives) else None


def _inner(document: Any, *names: str) -> Mapping[str, Any]:
    for name in names:
        document = document.get(name) if isinstance(document, dict) else None
    return document if isinstance(document, dict) else {}


def _phase(phase: Any) -> Any:
    if not isinstance(phase, dict):
        return phase
    names = ("name", "allocated_bytes", "peak_allocated_bytes", "peak_reserved_bytes")
    return {name: phase[name] for name in names if name in phase}


def _of_log(path: Path, about: About | None) -> Run | BadRow:
    """A training log of Megatron-LM or Megatron-Bridge: the job it prints, and the highest of its memory lines.

    The rank is the one that printed them: it need not be the worst of the job.
    """
    with path.open("rb") as file:
        evidence = parse_evidence(file_lines(file))
    readings = [r for r in evidence.readings if r.source in ("megatron", "bridge")]
    if not readings:
        return BadRow(f"{path}: is a text without a memory line of Megatron-LM or Megatron-Bridge")
    if about is None:
        proposal = job_from_evidence(evidence)
        if proposal.job is None or proposal.cluster is None:
            absent = ", ".join(m.path for m in proposal.missing)
            return BadRow(f"{path}: the log does not say {absent} (--about FILE does)")
        job, cluster = proposal.job, proposal.cluster
        about = About(
            {"recipe": job.recipe, "module": job.module, "config": job.config, "overrides": list(job.overrides)},
            cluster.gpu,
            cluster.num_gpus,
        )
    peaks = [r.value("max_allocated_bytes") or r.value("allocated_bytes") or 0 for r in readings]
    worst = readings[peaks.index(max(peaks))]
    document = {
        **about.as_run(),
        "run_id": f"log:{_digest(path)}",
        "source": "log",
        "outcome": "oom" if evidence.first is not None and evidence.first.kind.place == "gpu" else "ok",
        "rank": worst.rank if worst.rank is not None else about.rank,
        "measured": {
            "peak_allocated_bytes": max(peaks),
            "peak_reserved_bytes": worst.value("max_reserved_bytes"),
        },
    }
    return of_record(document, str(path))


def _of_snapshot(path: Path, about: About | None) -> Run | BadRow:
    """Totals of a memory snapshot, which says nothing of job and GPU."""
    try:
        snapshot = read_snapshot(path)
    except SnapshotRefused as error:
        return BadRow(f"{path}: {error}")
    if about is None:
        return BadRow(
            f"{path}: is a memory snapshot with a peak of {snapshot['peak_allocated_bytes']} bytes, but says nothing "
            "of job and GPU: --about FILE does"
        )
    document = {
        **about.as_run(),
        "run_id": f"snapshot:{_digest(path)}",
        "source": "snapshot",
        "measured": {"peak_allocated_bytes": snapshot["peak_allocated_bytes"]},
    }
    return of_record(document, str(path))


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()[:24]
