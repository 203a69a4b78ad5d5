"""What the estimate says of measured runs: made once for each fingerprint and version, and kept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from pydantic import ValidationError

from app.db.models import ProfiledRun, RunPrediction
from app.db.repositories import Runs
from app.db.session import Database
from app.schemas import Job
from estimator import ESTIMATOR_VERSION
from estimator.catalog import find_gpu
from estimator.changes import Change, apply_changes
from estimator.cluster import Cluster, resolve_cluster
from estimator.errors import EstimatorError
from estimator.job.settings import ModelSettings, Settings
from estimator.overhead import communicators
from estimator.profiling.job import job_from_dict
from estimator.reading import ReadJob, read_job, read_stack, read_values
from estimator.requests import ClusterRequest
from estimator.step import step_timeline
from estimator.survival import peak_reserved_bytes, survival_bytes
from estimator.validation.comparison import compare_record, pipeline_rank_of

CHUNK = 100
"""Fingerprints predicted between two commits: what a kill can lose."""
IN_THIS_PROCESS = 16
"""Fewer are not worth other processes."""
MODEL_FIELDS = (
    "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "vocab_size",
    "num_moe_experts", "moe_ffn_hidden_size", "multi_latent_attention",
)  # fmt: skip
"""What makes a model another one. Not its depth or sequence: shortened models are held out with the whole one."""

_CAPABILITY = {"ampere": "8.0", "ada": "8.9", "hopper": "9.0", "blackwell": "10.0"}
Predicted = dict[str, Any]


def of_runs(database: Database, runs: Iterable[ProfiledRun]) -> dict[str, RunPrediction]:
    """What this version says of each run, by fingerprint: read where it was said before, else estimated and kept."""
    wanted = {run.fingerprint: run for run in runs}
    with database.transaction() as session:
        known = Runs(session).predictions(list(wanted), ESTIMATOR_VERSION)
    for key, run in wanted.items():
        if key in known:
            continue
        values = predict(run.fingerprint, run.document)
        known[key] = RunPrediction(**values)
        with database.transaction() as session:
            Runs(session).add_prediction(RunPrediction(**values))
    return known


def fill(
    database: Database,
    stack: str,
    gpus: Sequence[str],
    *,
    at_most: int | None = None,
    processes: int = 1,
    progress: Callable[[int], None] = lambda _count: None,
) -> int:
    """Predict every fingerprint of these runs that this version has not predicted; how many that were.

    ``at_most``: stops after as many. Each chunk is committed, so that nothing is done twice after a kill.
    """
    done = 0
    pool: ProcessPoolExecutor | None = None
    try:
        while at_most is None or done < at_most:
            limit = CHUNK if at_most is None else min(CHUNK, at_most - done)
            with database.transaction() as session:
                missing = Runs(session).without_prediction(stack, gpus, ESTIMATOR_VERSION, limit)
            if not missing:
                break
            work = [(run.fingerprint, run.document) for run in missing]
            if processes > 1 and len(work) > IN_THIS_PROCESS:
                pool = pool or ProcessPoolExecutor(processes)
                found = list(pool.map(_predict_pair, work, chunksize=4))
            else:
                found = [predict(*pair) for pair in work]
            with database.transaction() as session:
                for values in found:
                    Runs(session).add_prediction(RunPrediction(**values))
            done += len(found)
            progress(done)
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
    return done


def _predict_pair(pair: tuple[str, Mapping[str, Any]]) -> Predicted:
    return predict(*pair)


def predict(fingerprint: str, document: Mapping[str, Any]) -> Predicted:
    """Columns of a row of ``run_predictions``; ``refused`` says why there are no figures."""
    try:
        values = _of_profile(document) if document.get("profile") is not None else _of_job(document)
    except (EstimatorError, ValidationError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        values = {"refused": f"the job cannot be read: {' '.join(str(error).split())}"[:200]}
    return {"fingerprint": fingerprint, "estimator_version": ESTIMATOR_VERSION, "refused": None} | values


def _of_profile(document: Mapping[str, Any]) -> Predicted:
    survives = bool((document.get("measured") or {}).get("survival_bytes"))
    row = compare_record(as_record(document), with_survival=survives)
    if row.refused is not None:
        return {"refused": row.refused[:200]}
    settings = job_from_dict(document["profile"]).settings
    return {
        "peak_allocated_bytes": row.predicted["peak"],
        "persistent_bytes": row.predicted["persistent"],
        "peak_reserved_bytes": row.predicted["reserved"],
        "survival_bytes": row.predicted.get("survival"),
        "components": row.components_at_peak,
        **_about(settings),
    }


def _of_job(document: Mapping[str, Any]) -> Predicted:
    """A job as POST /estimate takes it: of logs, of feedback, and of runs that were sent."""
    cluster = resolve_cluster(ClusterRequest(document["gpu"], document["world_size"]))
    read = _read(document, cluster)
    if not read.laid_out:
        return {"refused": f"the job cannot be laid out: {read.errors[0].message}"[:200]}
    settings = read.settings
    step = step_timeline(settings, pipeline_rank_of(settings, document.get("rank", 0)), cluster.gpu.family)
    phases = {phase.name: phase for phase in step.timeline.phases()}
    worst = max(phases.values(), key=lambda phase: phase.peak_bytes)
    setting = document.get("allocator", "default")
    survives = bool((document.get("measured") or {}).get("survival_bytes"))
    return {
        "peak_allocated_bytes": worst.peak_bytes,
        "persistent_bytes": phases["steady_optimizer_step"].allocated_bytes,
        "peak_reserved_bytes": peak_reserved_bytes(step.timeline, setting),
        "survival_bytes": survival_bytes(step.timeline, (setting,))[setting] if survives else None,
        "components": step.timeline.components_at_peak(worst),
        **_about(settings),
    }


def _read(document: Mapping[str, Any], cluster: Cluster) -> ReadJob:
    """The job of a run; of feedback, the job that was asked about with the recommended changes."""
    about = document["job"]
    request = about.get("request")
    stack = read_stack((request or document).get("stack") or {})
    if request is None:
        return read_job(Job.model_validate(about).to_request(), cluster, stack)
    read = read_job(Job.model_validate(request["job"]).to_request(), cluster, stack)
    changes = [Change(c["path"], c["from"], c["to"], c["why"], c["family"]) for c in about.get("changes") or ()]
    values = apply_changes(read.document.values, changes)
    return read_values(values, read.document, cluster, stack, read.moe_load_imbalance)


def _about(settings: Settings) -> Predicted:
    return {"model": model_key(settings.model), "num_communicators": len(communicators(settings))}


def model_key(model: ModelSettings) -> str:
    """Equal for runs of one model, however deep or long it was run."""
    text = " ".join(f"{name}={getattr(model, name, None)}" for name in MODEL_FIELDS)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def as_record(document: Mapping[str, Any]) -> dict[str, Any]:
    """A stored run as the profiler's record, as far as a comparison needs it.

    Always as one that was ok: the prediction belongs to the job, of which other runs may have ended otherwise.
    """
    measured = document.get("measured") or {}
    family = find_gpu(document["gpu"]).family
    return {
        "run_id": document["run_id"],
        "job": document["profile"],
        "rank": document.get("rank", 0),
        "outcome": "ok",
        "phases": document.get("phases", []),
        "gpu": {"compute_capability": _CAPABILITY.get(family, "9.0")},
        "peak_allocated_bytes": measured.get("peak_allocated_bytes"),
        "persistent_bytes": measured.get("persistent_bytes"),
        "peak_reserved_bytes": measured.get("peak_reserved_bytes"),
    }
