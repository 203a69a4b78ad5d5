"""The record that a profiled run leaves: one JSON object, whatever happened."""

from __future__ import annotations

import time
from typing import Any

from estimator.profiling.job import ProfileJob, fingerprint, job_to_dict

RECORD_VERSION = "1"

PHASES = (
    "model_build",
    "wrap",
    "optimizer_build",
    "first_forward_backward",
    "first_optimizer_step",
    "steady_forward_backward",
    "steady_optimizer_step",
)
"""Phases a run passes; DESIGN.md section 3's names, with ``wrap`` (DDP or FSDP taking over the model) as a part of the
build of its own. Not measured by this profiler: checkpoint_load, evaluation, checkpoint_save."""

_OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "cudaErrorMemoryAllocation",
)


def new_record(job: ProfileJob) -> dict[str, Any]:
    """A record before the run: what was asked for, and nothing measured yet."""
    return {
        "record_version": RECORD_VERSION,
        "kind": "run",
        "run_id": job.run_id,
        "fingerprint": fingerprint(job),
        "method": "simulated" if job.simulate else "real",
        "outcome": "error",
        "rank": job.rank,
        "world_size": job.settings.parallel.world_size,
        "allocator": job.allocator,
        "memory_cap_bytes": job.memory_cap_bytes,
        "exclusive": job.exclusive,
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "stack": None,
        "gpu": None,
        "environment": {},
        "parameters_on_rank": None,
        "baseline_allocated_bytes": None,
        "phases": [],
        "iterations": [],
        "persistent_bytes": None,
        "peak_allocated_bytes": None,
        "peak_reserved_bytes": None,
        "num_alloc_retries": None,
        "device_used_bytes": None,
        "step_time_seconds": None,
        "out_of_memory": None,
        "at_failure": None,
        "error": None,
        "wall_seconds": None,
        "job": job_to_dict(job),
    }


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that GPU memory ran out: torch's own, or a library's that could not allocate."""
    if type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(word.lower() in text.lower() for word in _OUT_OF_MEMORY_TEXTS)


def phase_of(record: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The measurements of one phase of a record, if it was passed."""
    return next((phase for phase in record["phases"] if phase["name"] == name), None)


def summarise(record: dict[str, Any], steady_iteration: int) -> None:
    """Fill in the record's totals from its phases.

    ``persistent_bytes`` is what is allocated when ``optimizer.step()`` of the second iteration returns (of the last one
    where CUDA graphs are captured first); the peaks are over the whole life of the process.
    """
    measured = record["phases"] + [phase for iteration in record["iterations"] for phase in iteration["phases"]]
    if not measured:
        return
    record["peak_allocated_bytes"] = max(phase["peak_allocated_bytes"] for phase in measured)
    record["peak_reserved_bytes"] = max(phase["peak_reserved_bytes"] for phase in measured)
    record["num_alloc_retries"] = measured[-1]["num_alloc_retries"]
    for iteration in record["iterations"]:
        label = {0: "first", steady_iteration: "steady"}.get(iteration["index"])
        if label is None:
            continue
        for phase in iteration["phases"]:
            record["phases"].append({**phase, "name": f"{label}_{phase['name']}"})
    steady = phase_of(record, "steady_optimizer_step")
    record["persistent_bytes"] = steady["allocated_bytes"] if steady else None
