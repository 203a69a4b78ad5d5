"""The space of settings that the search looks through, as columns of a table: one row a candidate.

Every family of changes adds a dimension; the first row is the job as it is. Combinations that cannot exist (Megatron
FSDP
with a pipeline, a batch that does not divide) are left out here; the rules decide about the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np

from estimator.job.settings import (
    BatchSettings,
    ParallelSettings,
    RecomputeSettings,
    Settings,
    ShardingSettings,
)

DEFAULT_FAMILIES = frozenset(
    {"allocator", "dp_strategy", "recompute", "micro_batch", "fsdp_buffers", "cross_entropy", "layout"}
)
"""Families that keep convergence and the GPUs."""

FSDP = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SMALL_COMMUNICATION_UNIT = 100_000_000
"""Elements: prefetch and reduce-scatter queue of about one layer instead of the default's 0.5e9 and 1e9."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """A recompute setting and its name; ``layers`` for the block method."""

    granularity: str | None
    method: str | None = None
    layers: int | None = None
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Point:
    """One combination of settings."""

    strategy: str
    micro_batch_size: int
    recompute: Recompute
    tensor: int
    pipeline: int
    context: int
    cross_entropy_te: bool
    small_communication_unit: bool
    expandable_segments: bool


def current_point(settings: Settings) -> Point:
    """The job as it is."""
    p, r = settings.parallel, settings.recompute
    return Point(
        strategy=settings.sharding.strategy,
        micro_batch_size=settings.batch.micro_batch_size,
        recompute=Recompute(r.recompute_granularity, r.recompute_method, r.recompute_num_layers, r.recompute_modules),
        tensor=p.tensor_model_parallel_size,
        pipeline=p.pipeline_model_parallel_size,
        context=p.context_parallel_size,
        cross_entropy_te=_is_te(settings),
        small_communication_unit=settings.sharding.suggested_communication_unit_size is not None,
        expandable_segments=settings.runtime.expandable_segments,
    )


def _is_te(settings: Settings) -> bool:
    return settings.model.cross_entropy_loss_fusion and settings.model.cross_entropy_fusion_impl == "te"


def points(settings: Settings, gpus_per_node: int, allow: Collection[str]) -> Iterator[Point]:
    """Every combination of the allowed families, the current settings first."""
    now = current_point(settings)
    yield now
    strategies = [now.strategy]
    if "dp_strategy" in allow:
        strategies += [s for s in ("distopt", "optim_grads_params") if s != now.strategy]
    micro_batches = [now.micro_batch_size]
    if "micro_batch" in allow:
        micro_batches += [b for b in _divisors(now.micro_batch_size) if b < now.micro_batch_size]
    recomputes = [now.recompute]
    if "recompute" in allow and now.recompute.granularity != "full":
        recomputes += _more_recompute(settings)
    entropies = [now.cross_entropy_te]
    if "cross_entropy" in allow and not now.cross_entropy_te:
        entropies.append(True)
    allocators = [now.expandable_segments]
    if "allocator" in allow and not now.expandable_segments:
        allocators.append(True)
    layouts = [(now.tensor, now.pipeline, now.context)]
    if "layout" in allow:
        layouts += [x for x in _layouts(settings, gpus_per_node) if x not in layouts]
    if "dp_strategy" in allow and now.strategy not in FSDP and now.pipeline > 1:
        flat = (now.tensor, 1, now.context)
        layouts += [flat] if flat not in layouts else []
    units = (
        [False, True]
        if "fsdp_buffers" in allow and not now.small_communication_unit
        else [now.small_communication_unit]
    )
    seen = {now}
    for strategy, batch, recompute, te, expandable, (t, p, c) in itertools.product(
        strategies, micro_batches, recomputes, entropies, allocators, layouts
    ):
        if not _possible(settings, strategy, batch, t, p, c):
            continue
        for small in units if strategy == "optim_grads_params" else [now.small_communication_unit]:
            point = Point(strategy, batch, recompute, t, p, c, te, small, expandable)
            if point not in seen:
                seen.add(point)
                yield point


def _divisors(n: int) -> list[int]:
    return [d for d in range(n, 0, -1) if n % d == 0]


def _more_recompute(settings: Settings) -> list[Recompute]:
    p = settings.parallel
    layers = settings.model.num_layers // (p.pipeline_model_parallel_size * p.num_model_chunks)
    blocks = sorted({max(1, layers * k // 8) for k in range(1, 8)} - {layers})
    options = [Recompute("selective", modules=modules) for modules in _more_modules(settings)]
    options += [Recompute("full", "block", n) for n in blocks]
    options.append(Recompute("full", "uniform", 1))
    return options


def _more_modules(settings: Settings) -> list[tuple[str, ...]]:
    """Modules to recompute, cheapest first; those of the job stay where there are experts or latents."""
    model = settings.model
    if not (model.moe or model.mla):
        return [("mlp",)]
    now = settings.recompute.recompute_modules
    latents = ("mla_up_proj",) if model.mla else ()
    steps: list[tuple[str, ...]] = [latents] if latents else []
    if model.moe:
        steps += [(*latents, "layernorm", "moe_act"), (*latents, "moe")]
    if not model.moe or 0 in model.moe.pattern:
        steps.append((*latents, "mlp", "moe") if model.moe else (*latents, "mlp"))
    found = (tuple(sorted({*now, *step} - ({"moe_act"} if "moe" in step else set()))) for step in steps)
    return [modules for modules in dict.fromkeys(found) if set(modules) != set(now)]


def _layouts(settings: Settings, gpus_per_node: int) -> Iterator[tuple[int, int, int]]:
    """(TP, PP, CP): TP stays in a node and divides heads, groups (or the reverse), FFN and vocabulary."""
    m, world = settings.model, settings.parallel.world_size
    powers = [2**k for k in range(7)]
    for t, p, c in itertools.product(powers, powers, powers):
        if t > gpus_per_node or t * p * c > world or world % (t * p * c):
            continue
        if m.num_attention_heads % t or (m.num_query_groups % t and t % m.num_query_groups):
            continue
        if m.ffn_hidden_size % t or m.vocab_size % t or m.num_layers % p or m.seq_length % (2 * c if c > 1 else 1):
            continue
        if m.seq_length // c % t or not _experts_can_stay(settings, t, p):
            continue
        yield t, p, c


def _experts_can_stay(settings: Settings, t: int, p: int) -> bool:
    """Expert parallelism is left as it is: its ranks must divide the GPUs. Unset, expert tensor parallelism follows
    TP where there is no expert parallelism, so that TP cannot change alone."""
    parallel, moe = settings.parallel, settings.model.moe
    if moe is None:
        return True
    if parallel.expert_model_parallel_size == 1 and t != parallel.tensor_model_parallel_size:
        return False
    ranks = p * parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size
    return parallel.world_size % ranks == 0 and (moe.shared_size % t == 0)


def _possible(settings: Settings, strategy: str, batch: int, t: int, p: int, c: int) -> bool:
    if strategy in FSDP and (p > 1 or settings.model.mtp_num_layers):
        return False
    if settings.model.mla and c > 1:
        return False
    world = settings.parallel.world_size
    if world % (t * p * c):
        return False
    data_parallel = world // (t * p * c)
    if settings.batch.global_batch_size % (batch * data_parallel):
        return False
    if data_parallel * c % settings.sharding.num_distributed_optimizer_instances:
        return False
    parallel = settings.parallel
    if p != parallel.pipeline_model_parallel_size or parallel.num_model_chunks == 1:
        return True
    group = parallel.microbatch_group_size_per_vp_stage or p
    return group_fits(settings.batch.global_batch_size // (batch * data_parallel), group, p)


def group_fits(num_microbatches: int, group: int, num_stages: int) -> bool:
    """Whether the interleaved schedule takes this many microbatches (megatron-core 0.19.2,
    pipeline_parallel/schedules.py:1126-1148)."""
    return num_stages <= group <= num_microbatches and not 0 < num_microbatches % group < num_stages


def variant(settings: Settings, point: Point) -> Settings:
    """The settings that a point would have, for cost and memory bounds; what the override really gives is read
    again."""
    parallel = settings.parallel
    layout = (point.tensor, point.pipeline, point.context)
    if layout != (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    ):
        if point.pipeline == parallel.pipeline_model_parallel_size:
            parallel = replace(
                parallel,
                tensor_model_parallel_size=point.tensor,
                context_parallel_size=point.context,
                sequence_parallel=point.tensor > 1,
            )
        else:
            parallel = ParallelSettings(
                parallel.world_size,
                point.tensor,
                point.pipeline,
                point.context,
                parallel.expert_model_parallel_size,
                parallel.expert_tensor_parallel_size,
                sequence_parallel=point.tensor > 1,
            )
    return replace(
        settings,
        parallel=parallel,
        batch=BatchSettings(point.micro_batch_size, settings.batch.global_batch_size),
        recompute=RecomputeSettings(
            point.recompute.granularity, point.recompute.method, point.recompute.layers, point.recompute.modules
        ),
        sharding=_sharding(settings, point),
    )


def _sharding(settings: Settings, point: Point) -> ShardingSettings:
    sharding = settings.sharding
    if point.strategy != sharding.strategy:
        fp32 = sharding.grad_reduce_in_fp32 if not sharding.is_megatron_fsdp else sharding.main_grads_dtype == "float32"
        sharding = replace(
            sharding,
            strategy=point.strategy,
            grad_reduce_in_fp32=fp32,
            main_grads_dtype="float32" if fp32 else None,
        )
    if point.small_communication_unit and sharding.suggested_communication_unit_size is None:
        sharding = replace(sharding, suggested_communication_unit_size=SMALL_COMMUNICATION_UNIT)
    return sharding


def columns(candidates: list[Point]) -> dict[str, np.ndarray]:
    """Numeric columns for cost and bounds."""
    return {
        "t": np.array([x.tensor for x in candidates], dtype=np.int64),
        "p": np.array([x.pipeline for x in candidates], dtype=np.int64),
        "c": np.array([x.context for x in candidates], dtype=np.int64),
        "b": np.array([x.micro_batch_size for x in candidates], dtype=np.int64),
        "small": np.array([x.small_communication_unit for x in candidates]),
    }
