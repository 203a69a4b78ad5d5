"""Two jobs side by side: what differs in memory, by phase and component, and which settings did it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from estimator import ESTIMATOR_VERSION, SCHEMA_VERSION
from estimator.cluster import Cluster, resolve_cluster
from estimator.errors import EstimatorError, FieldProblem, JobError
from estimator.estimate import Estimate, estimate
from estimator.job.settings import Stack
from estimator.reading import ReadJob, read_job, read_stack, read_values
from estimator.requests import EstimateRequest

SECTIONS = (
    "model",
    "ddp",
    "dist",
    "optimizer",
    "train",
    "mixed_precision",
    "comm_overlap",
    "dataset",
    "env_vars",
    "peft",
)
"""Sections whose fields can change memory."""
MAX_FIELDS = 60
_FOLLOWERS = {
    ("dataset", "seq_length"): ("model", "seq_length"),
    ("dataset", "sequence_length"): ("model", "seq_length"),
}
"""Fields that Bridge wants equal to another one: they change together, and count as that one."""
GIB = 1 << 30


def compare_answer(a: EstimateRequest, b: EstimateRequest) -> dict[str, Any]:
    """From ``a`` to ``b``: bytes now, bytes then, differences, and each differing field's own share.

    A field's share is what the peak of ``a`` changes by when only that field is taken from ``b``; shares need not add
    up, because settings act together. Raises JobError, NotModelled as an estimate of either does.
    """
    first, second = _estimated(a, "a"), _estimated(b, "b")
    (job_a, cluster_a, stack_a, estimate_a), (job_b, _, _, estimate_b) = first, second
    fields = _differing(job_a.document.values, job_b.document.values)
    causes = _causes(job_a, cluster_a, stack_a, estimate_a, fields[:MAX_FIELDS])
    if a.cluster.num_gpus != b.cluster.num_gpus:
        causes += _cause_of_gpus(a, b, estimate_a)
    causes.sort(key=lambda row: -abs(row["difference_bytes"] or 0))
    return {
        "a": {**estimate_a.as_dict(), "problems": [p.as_dict() for p in job_a.problems]},
        "b": {**estimate_b.as_dict(), "problems": [p.as_dict() for p in job_b.problems]},
        "difference_bytes": estimate_b.required_bytes() - estimate_a.required_bytes(),
        "phases": _by_phase(estimate_a, estimate_b),
        "components": _by_component(estimate_a, estimate_b),
        "fields": causes,
        "num_differing_fields": len(fields),
        "summary": _summary(estimate_a, estimate_b, causes),
        "estimator_version": ESTIMATOR_VERSION,
        "schema_version": SCHEMA_VERSION,
    }


def _estimated(request: EstimateRequest, name: str) -> tuple[ReadJob, Cluster, Stack, Estimate]:
    cluster, stack = resolve_cluster(request.cluster), read_stack(request.stack)
    job = read_job(request.job, cluster, stack)
    if not job.laid_out:
        raise JobError([FieldProblem(f"{name}.job.config.{p.fields[0]}", p.message, p.fix) for p in job.errors[:5]])
    return job, cluster, stack, estimate(job.settings, cluster, request.min_fit_probability, exact_ranks=1)


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, Any, Any]]:
    """(section, field, value of a, value of b) of fields that can change memory, in order."""
    found = []
    for section in SECTIONS:
        left, right = a.get(section), b.get(section)
        if not isinstance(left, Mapping) or not isinstance(right, Mapping):
            if left != right:
                found.append((section, "", left, right))
            continue
        for name in sorted({*left, *right}):
            if left.get(name) != right.get(name):
                found.append((section, name, left.get(name), right.get(name)))
    return found


def _causes(
    job: ReadJob, cluster: Cluster, stack: Stack, before: Estimate, fields: list[tuple[str, str, Any, Any]]
) -> list[dict[str, Any]]:
    rows = []
    changed_fields = {(section, name): new for section, name, _, new in fields}
    for section, name, old, new in fields:
        if (section, name) in _FOLLOWERS and _FOLLOWERS[section, name] in changed_fields:
            continue
        path = f"{section}.{name}" if name else section
        row: dict[str, Any] = {"path": path, "from": _plain(old), "to": _plain(new), "difference_bytes": None}
        values = {**job.document.values}
        values[section] = {**(values.get(section) or {}), name: new} if name else new
        for follower, leader in _FOLLOWERS.items():
            if leader == (section, name) and follower in changed_fields:
                values[follower[0]] = {**values[follower[0]], follower[1]: changed_fields[follower]}
        try:
            changed = read_values(values, job.document, cluster, stack)
            if changed.laid_out:
                after = estimate(changed.settings, cluster, exact_ranks=1, survival_ratios=before.survival_ratios)
                row["difference_bytes"] = after.rank.peak.peak_bytes - before.rank.peak.peak_bytes
            else:
                row["note"] = "cannot be changed alone: " + " ".join(p.message for p in changed.errors[:1])
        except (EstimatorError, ValueError) as error:
            row["note"] = f"cannot be changed alone: {str(error)[:200]}"
        rows.append(row)
    return rows


def _cause_of_gpus(a: EstimateRequest, b: EstimateRequest, before: Estimate) -> list[dict[str, Any]]:
    row: dict[str, Any] = {
        "path": "cluster.num_gpus", "from": a.cluster.num_gpus, "to": b.cluster.num_gpus, "difference_bytes": None
    }  # fmt: skip
    cluster = resolve_cluster(b.cluster)
    try:
        job = read_job(a.job, cluster, read_stack(a.stack))
        if job.laid_out:
            after = estimate(job.settings, cluster, exact_ranks=1, survival_ratios=before.survival_ratios)
            row["difference_bytes"] = after.rank.peak.peak_bytes - before.rank.peak.peak_bytes
    except (EstimatorError, ValueError) as error:
        row["note"] = f"cannot be changed alone: {str(error)[:200]}"
    return [row]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _by_phase(a: Estimate, b: Estimate) -> list[dict[str, Any]]:
    peaks_b = {phase.name: phase.peak_bytes for phase in b.rank.phases}
    return [
        {
            "name": phase.name,
            "a_peak_bytes": phase.peak_bytes,
            "b_peak_bytes": peaks_b[phase.name],
            "difference_bytes": peaks_b[phase.name] - phase.peak_bytes,
        }
        for phase in a.rank.phases
        if phase.name in peaks_b
    ]


def _by_component(a: Estimate, b: Estimate) -> list[dict[str, Any]]:
    """At each one's own peak; the largest difference first."""
    left, right = a.rank.components_at_peak, b.rank.components_at_peak
    rows = [
        {"name": name, "a_bytes": left.get(name, 0), "b_bytes": right.get(name, 0),
         "difference_bytes": right.get(name, 0) - left.get(name, 0)}
        for name in {*left, *right}
    ]  # fmt: skip
    return sorted(rows, key=lambda row: (-abs(row["difference_bytes"]), row["name"]))


def _summary(a: Estimate, b: Estimate, causes: list[dict[str, Any]]) -> str:
    difference = b.required_bytes() - a.required_bytes()
    verb = "more" if difference >= 0 else "less"
    sentences = [
        f"The second job needs {abs(difference) / GIB:.1f} GiB {verb} than the first "
        f"({b.required_bytes() / GIB:.1f} against {a.required_bytes() / GIB:.1f} GiB)."
    ]
    main = [row for row in causes if row["difference_bytes"] and row["difference_bytes"] * difference > 0][:3]
    if main:
        parts = [f"{row['path']} ({row['difference_bytes'] / GIB:+.1f} GiB alone)" for row in main]
        sentences.append("It comes from " + ", ".join(parts) + ".")
    fits = {(True, True): "Both fit.", (True, False): "The first fits, the second does not.",
            (False, True): "The second fits, the first does not.", (False, False): "Neither fits."}  # fmt: skip
    sentences.append(fits[a.verdict.fits, b.verdict.fits])
    return " ".join(sentences)
