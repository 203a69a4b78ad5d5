"""Memory that Megatron-LM's own training tests recorded, beside the estimate of the same rank.

A record has the arguments as Megatron-LM parsed them and two of torch's figures of the last rank: allocated bytes after
an optimizer step, and their peak since the start. The last rank is on the last pipeline stage. What the record says of
attention comes first: with ``--attention-backend auto`` the arguments do not tell which one Transformer Engine chose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from estimator.errors import JobError, NotModelled
from estimator.job import build_document, effective_document, read_settings
from estimator.job.megatron_lm import megatron_config
from estimator.step import step_timeline
from estimator.validation.comparison import Row

FAMILIES = {"a100": "ampere", "h100": "hopper", "gb200": "blackwell"}
LARGE_BYTES = 5 * 1024**3
MARK = "mem_max_allocated_bytes"
"""The field by which such a record is told from the profiler's."""

SHARED = "shared_megatron_lm_args"
"""A line with this field alone gives arguments that all later records have unless they say otherwise."""

REQUIRED = ("id", "platform", "args", "mem_allocated_bytes", MARK)


def compare_megatron_test(record: Mapping[str, Any]) -> Row:
    """Peak and persistent bytes. Raises ValueError naming the field if the record cannot be read."""
    platform = record["platform"]
    if platform not in FAMILIES:
        raise ValueError(f"platform: {str(platform)[:40]!r} is none of {', '.join(FAMILIES)}")
    published, world = bool(record.get("world_size")), record.get("world_size") or record.get("world_size_inferred")
    if not isinstance(world, int):
        raise ValueError("world_size: must be the number of ranks, or world_size_inferred")
    size = "over 5 GiB" if record[MARK] > LARGE_BYTES else "up to 5 GiB"
    origin = "world size published" if published else "world size inferred"
    kind = "experts" if record["args"].get("num_experts") else "dense"
    about = (
        str(record["id"]),
        (platform, kind, f"{size}, {origin}"),
        str(record.get("dp_strategy", "unknown")),
    )
    arguments = dict(record["args"])
    if record.get("attention_backend_effective") == "unfused":
        arguments["attention_backend"] = "unfused"
    family = FAMILIES[platform]
    try:
        document = build_document(config=megatron_config(arguments))
        settings = read_settings(effective_document(document.values, world, family).values, world)
    except NotModelled as error:
        paths = sorted(field.path.removeprefix("job.config.") for field in error.fields)
        return Row(*about, refused="not modelled: " + ", ".join(paths))
    except JobError as error:
        return Row(*about, refused="not read: " + ", ".join(sorted(problem.path for problem in error.problems)))
    timeline = step_timeline(settings, settings.parallel.pipeline_model_parallel_size - 1, family).timeline
    phases = {phase.name: phase for phase in timeline.phases()}
    worst = max(phases.values(), key=lambda phase: phase.peak_bytes)
    return Row(
        *about,
        measured={"peak": record[MARK], "persistent": record["mem_allocated_bytes"]},
        predicted={"peak": worst.peak_bytes, "persistent": phases["steady_optimizer_step"].allocated_bytes},
        components_at_peak=timeline.components_at_peak(worst),
        groups=about[1],
    )
