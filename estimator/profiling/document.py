"""A job as users write it (recipe, config, overrides and a cluster) turned into a job for the profiler.

Needs the parts of this project that read job documents; a GPU machine without them runs jobs that were turned before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from estimator.profiling.job import ProfileJob


def job_from_request(request: Mapping[str, Any], run_id: str, world_size: int | None = None) -> ProfileJob:
    """The job of an estimate request (``{"job": ..., "cluster": ...}``), effective settings as Bridge would run them.

    ``world_size`` replaces the cluster's number of GPUs. Raises what reading a job raises.
    """
    from estimator.catalog import find_gpu
    from estimator.job import Stack, build_document, effective_document, read_settings

    asked, cluster = request["job"], request["cluster"]
    world = world_size or int(cluster["num_gpus"])
    document = build_document(
        recipe=asked.get("recipe"),
        module=asked.get("module"),
        config=asked.get("config"),
        overrides=tuple(asked.get("overrides", ())),
    )
    effective = effective_document(document.values, world, find_gpu(cluster["gpu"]).family)
    settings = read_settings(effective.values, world, Stack(**request.get("stack", {})))
    return ProfileJob(run_id=run_id, settings=settings)
