"""The smallest memory in which a job survives, by bisecting the allocator's cap with a fresh process each time."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import replace
from typing import Any

from estimator.profiling.job import ProfileJob, fingerprint, job_to_dict
from estimator.profiling.record import RECORD_VERSION

TOLERANCE = 0.0025
SURVIVAL_ITERATIONS = 4
_GRAIN = 2 * 2**20
"""Segments of the caching allocator come in multiples of 2 MiB, so caps between them say nothing new."""

Probe = Generator[ProfileJob, dict[str, Any], dict[str, Any]]


def survival_search(job: ProfileJob, allocator: str, tolerance: float = TOLERANCE) -> Probe:
    """Ask for probes (yield) until the bracket is narrower than ``tolerance`` of its upper end; return its record.

    The first probe has no cap. Its peak of allocated bytes bounds the answer from below (what is allocated is
    reserved), its peak of reserved bytes from above (a cap that is never reached changes nothing). Survival means
    ``SURVIVAL_ITERATIONS`` training steps.
    """
    base = replace(
        job.with_allocator(allocator),
        iterations=SURVIVAL_ITERATIONS,
        exclusive=False,
        trace=False,
        memory_cap_bytes=None,
    )
    name = f"{job.run_id}/survival/{allocator}"
    probes: list[dict[str, Any]] = []
    free = yield replace(base, run_id=f"{name}/free")
    result: dict[str, Any] = {
        "record_version": RECORD_VERSION,
        "kind": "survival",
        "run_id": name,
        "fingerprint": fingerprint(base),
        "method": free.get("method"),
        "allocator": allocator,
        "iterations": SURVIVAL_ITERATIONS,
        "tolerance": tolerance,
        "stack": free.get("stack"),
        "gpu": free.get("gpu"),
        "peak_allocated_bytes": free.get("peak_allocated_bytes"),
        "peak_reserved_bytes": free.get("peak_reserved_bytes"),
        "job": job_to_dict(base),
    }
    if free["outcome"] != "ok":
        return {**result, **{name: free.get(name) for name in ("outcome", "error", "out_of_memory")}}

    dies = int(free["peak_allocated_bytes"]) // _GRAIN * _GRAIN
    survives = int(free["peak_reserved_bytes"])
    dies_tested = survives_tested = False
    while survives - dies > max(_GRAIN, tolerance * survives):
        cap = (dies + survives) // 2 // _GRAIN * _GRAIN
        if not dies < cap < survives:
            break
        probe = yield replace(base, run_id=f"{name}/{cap}", memory_cap_bytes=cap)
        retries = probe.get("num_alloc_retries")
        probes.append({"cap_bytes": cap, "outcome": probe["outcome"], "num_alloc_retries": retries})
        if probe["outcome"] == "ok":
            survives, survives_tested = cap, True
        elif probe["outcome"] == "oom":
            dies, dies_tested = cap, True
        else:
            return {**result, "outcome": "error", "error": probe.get("error"), "probes": probes}
    return {
        **result,
        "outcome": "ok",
        "dies_at_bytes": dies,
        "dies_at_tested": dies_tested,
        "survives_at_bytes": survives,
        "survives_at_tested": survives_tested,
        "probes": probes,
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def single_run(job: ProfileJob) -> Probe:
    """A plain job as the sweep sees it: one probe, whose record is the result."""
    return (yield job)
