"""From a point of the search space to the changes that take the job there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from estimator.changes import Change, apply_changes, routed
from estimator.cluster import Cluster
from estimator.job import effective_document
from estimator.job.settings import Stack
from estimator.rules.companions import strategy_changes
from estimator.search.space import FSDP, SMALL_COMMUNICATION_UNIT, Point

ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"

_WHY_LAYOUT = {
    "model.tensor_model_parallel_size": "splits every layer's weights and activations over the GPUs of a node",
    "model.sequence_parallel": "splits what tensor parallelism leaves whole along the sequence",
    "model.pipeline_model_parallel_size": "deals the layers to pipeline stages",
    "model.pipeline_dtype": "stages exchange activations in this type",
    "model.context_parallel_size": "splits the sequence, and with it the activations",
}
_WHY_LESS = "frees these GPUs for the other kinds of parallelism"


def point_changes(
    point: Point, now: Point, values: Mapping[str, Any], effective: Mapping[str, Any], cluster: Cluster, stack: Stack
) -> tuple[Change, ...]:
    """Changes from the job as written (``values``; ``effective`` after Bridge) to ``point``, companions included."""
    changes = [
        *_layout(point, now, effective),
        *_micro_batch(point, now),
        *_recompute(point, now, effective),
        *_cross_entropy(point, now, effective),
        *_allocator(point, now, effective),
    ]
    changed = apply_changes(values, changes)
    if point.strategy != now.strategy or point.strategy in FSDP:
        after = effective_document(changed, cluster.num_gpus, cluster.gpu.family).values
        changes += strategy_changes(changed, after, point.strategy, cluster.num_gpus, cluster.gpu.family, stack)
    if point.small_communication_unit and not now.small_communication_unit:
        why = "gathers and reduces about one layer ahead instead of half a billion parameters"
        path = "ddp.suggested_communication_unit_size"
        changes.append(Change(path, None, SMALL_COMMUNICATION_UNIT, why, "fsdp_buffers"))
    return routed(changes, values)


def _set(effective: Mapping[str, Any], path: str, to: Any, why: str, family: str) -> list[Change]:
    section, _, field = path.partition(".")
    current = (effective.get(section) or {}).get(field)
    return [] if current == to else [Change(path, current, to, why, family)]


def _layout(point: Point, now: Point, effective: Mapping[str, Any]) -> list[Change]:
    if (point.tensor, point.pipeline, point.context) == (now.tensor, now.pipeline, now.context):
        return []
    wanted: dict[str, Any] = {
        "model.tensor_model_parallel_size": point.tensor,
        "model.sequence_parallel": point.tensor > 1,
        "model.pipeline_model_parallel_size": point.pipeline,
        "model.context_parallel_size": point.context,
    }
    if point.pipeline > 1:
        wanted["model.pipeline_dtype"] = (effective.get("model") or {}).get("params_dtype")
    changes = [
        c for path, to in wanted.items() for c in _set(effective, path, to, _why_layout(effective, path, to), "layout")
    ]
    if point.pipeline != now.pipeline:
        for field in (
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
            "virtual_pipeline_model_parallel_size",
            "pipeline_model_parallel_layout",
        ):
            changes += _set(effective, f"model.{field}", None, "belongs to the old split of layers", "layout")
        for field in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
            if (effective.get("model") or {}).get(field):
                changes += _set(effective, f"model.{field}", False, "belongs to the old split of layers", "layout")
    return changes


def _why_layout(effective: Mapping[str, Any], path: str, to: Any) -> str:
    before = (effective.get("model") or {}).get(path.partition(".")[2])
    less = isinstance(before, int) and isinstance(to, int) and to < before
    return _WHY_LESS if less else _WHY_LAYOUT[path]


def _micro_batch(point: Point, now: Point) -> list[Change]:
    if point.micro_batch_size == now.micro_batch_size:
        return []
    why = "fewer activations live at once; the global batch stays, in more microbatches"
    return [Change("train.micro_batch_size", now.micro_batch_size, point.micro_batch_size, why, "micro_batch")]


def _recompute(point: Point, now: Point, effective: Mapping[str, Any]) -> list[Change]:
    wanted = point.recompute
    if wanted == now.recompute:
        return []
    why = "backward computes activations again instead of keeping them"
    values: dict[str, Any] = {
        "model.recompute_granularity": wanted.granularity,
        "model.recompute_method": wanted.method,
        "model.recompute_num_layers": wanted.layers,
    }
    if wanted.granularity == "selective":
        values["model.recompute_modules"] = list(wanted.modules)
    return [c for path, to in values.items() for c in _set(effective, path, to, why, "recompute")]


def _cross_entropy(point: Point, now: Point, effective: Mapping[str, Any]) -> list[Change]:
    if point.cross_entropy_te == now.cross_entropy_te:
        return []
    why = "Transformer Engine's cross entropy works in place on the logits"
    return [
        *_set(effective, "model.cross_entropy_loss_fusion", True, why, "cross_entropy"),
        *_set(effective, "model.cross_entropy_fusion_impl", "te", why, "cross_entropy"),
    ]


def _allocator(point: Point, now: Point, effective: Mapping[str, Any]) -> list[Change]:
    if point.expandable_segments == now.expandable_segments:
        return []
    current = (effective.get("env_vars") or {}).get(ALLOCATOR_VARIABLE)
    kept = [o for o in str(current or "").split(",") if o and not o.strip().startswith("expandable_segments")]
    to = ",".join([*kept, "expandable_segments:True"])
    why = "segments grow instead of being cut to size, so little is lost to fragmentation"
    return [Change(f"env.{ALLOCATOR_VARIABLE}", current, to, why, "allocator")]
