"""Which runs are measured: a committed grid, and the ``fit`` and ``check`` sets that a committed seed draws from it.

``check`` is drawn first and is never tuned to. Both are spread evenly over the strategies and meet the grid's quotas.
Drawing uses nothing but the grid, the seed and ``expected`` (a rough size): never the estimator.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from estimator.job.settings import (
    BatchSettings,
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    RecomputeSettings,
    RuntimeSettings,
    Settings,
    ShardingSettings,
)
from estimator.profiling import expected
from estimator.profiling.job import GIB, ProfileJob, fingerprint

DATA = Path(__file__).resolve().parents[1] / "data"
Point = Mapping[str, Any]
_FSDP = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_RECOMPUTE_OF_A_KIND = ("moe_act", "moe", "shared_experts", "mla_up_proj")
_TRIES = 3_000


@dataclass(frozen=True, slots=True)
class Grid:
    """Axes with weights, quotas and limits, as ``estimator/data/grids/*.json`` states them."""

    name: str
    seed: int
    sizes: Mapping[str, int]
    limits: Mapping[str, float]
    axes: Mapping[str, tuple[Any, ...]]
    weights: Mapping[str, tuple[float, ...]]
    quotas: tuple[tuple[int, Mapping[str, tuple[Any, ...]]], ...]
    kinds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By the value of axis ``kind``: ``settings`` by section, ``extra_*`` of the job, axis values it ``requires``."""

    def kind_of(self, point: Point) -> Mapping[str, Any]:
        """What the point's kind adds; nothing in a grid without kinds."""
        return self.kinds[point["kind"]] if "kind" in point else {}


def load_grid(name: str) -> Grid:
    """A committed grid by name (``dense``)."""
    document = json.loads((DATA / "grids" / f"{name}.json").read_text())
    axes = {axis: tuple(entry["values"]) for axis, entry in document["axes"].items()}
    return Grid(
        name=name,
        seed=document["seed"],
        sizes=document["sizes"],
        limits=document["limits"],
        axes=axes,
        weights={a: tuple(e.get("weights", [1] * len(e["values"]))) for a, e in document["axes"].items()},
        quotas=tuple(
            (quota["at_least"], {axis: tuple(values) for axis, values in quota["where"].items()})
            for quota in document["quotas"]
        ),
        kinds=document.get("kinds", {}),
    )


def enumerate_grid(grid: Grid) -> Iterator[Point]:
    """Every point of the grid that can be run, in a fixed order. The product is far larger than anyone would run."""
    for values in itertools.product(*grid.axes.values()):
        point = dict(zip(grid.axes, values, strict=True))
        if not objections(grid, point):
            yield point


def settings_of(point: Point) -> Settings:
    """Settings of a point, as they would be read from a Bridge job."""
    model = {key: value for key, value in point["model"].items() if key != "name"}
    local = point["implementation"] == "local"
    if point["tied"] == "other":
        model["share_embeddings_and_output_weights"] = not model.get("share_embeddings_and_output_weights", False)
    if point["fusions"] != "all" or local:
        model["apply_rope_fusion"] = False
    if point["fusions"] == "none":
        model.update(bias_activation_fusion=False, bias_dropout_fusion=False)
    t, p, c = (point[f"{kind}_parallel_size"] for kind in ("tensor_model", "pipeline_model", "context"))
    multiple = 128 * t
    return Settings(
        model=ModelSettings(
            **model,
            num_layers=point["num_layers"],
            vocab_size=-(-point["vocab_size"] // multiple) * multiple,
            seq_length=point["seq_length"],
            transformer_impl=point["implementation"],
            masked_softmax_fusion=not local,
            cross_entropy_loss_fusion=point["cross_entropy"] != "off",
            cross_entropy_fusion_impl="te" if point["cross_entropy"] == "te" else "native",
            gradient_accumulation_fusion=point["gradient_accumulation_fusion"],
            init_model_with_meta_device=point["init_model_with_meta_device"],
        ),
        parallel=ParallelSettings(
            world_size=t * p * c * point["data_parallel_size"],
            tensor_model_parallel_size=t,
            pipeline_model_parallel_size=p,
            context_parallel_size=c,
            sequence_parallel=t > 1 and point["sequence_parallel"] and not local,
        ),
        sharding=_sharding(point, c * point["data_parallel_size"]),
        optimizer=_optimizer(point),
        recompute=_recompute(point["recompute"]),
        batch=BatchSettings(
            point["micro_batch_size"],
            point["micro_batch_size"] * point["num_microbatches"] * point["data_parallel_size"],
        ),
        runtime=RuntimeSettings(),
    )


def _sharding(point: Point, ranks: int) -> ShardingSettings:
    """Bucket sizes as ``_ddp_wrap`` ends up with them (megatron-core 0.19.2, training/models/dist_utils.py)."""
    buckets = {"default": max(40_000_000, 1_000_000 * ranks), "128Mi": 128 * 2**20, "one": None, "no_overlap": None}
    strategy, overlap = point["strategy"], point["bucket"] != "no_overlap"
    fsdp = strategy in _FSDP
    fp32 = point["gradients"] == "float32"
    return ShardingSettings(
        strategy=strategy,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and strategy != "ddp",
        bucket_size=buckets[point["bucket"]],
        grad_reduce_in_fp32=fp32,
        suggested_communication_unit_size=point["communication_unit"] if fsdp else None,
        fsdp_double_buffer=point["fsdp_double_buffer"],
        main_grads_dtype="float32" if fsdp and fp32 else None,
        grad_comm_dtype=point["grad_comm_dtype"],
        use_decoupled_grad=fsdp and point["optimizer_states"] != "float32",
    )


def _optimizer(point: Point) -> OptimizerSettings:
    if point["optimizer_states"] == "float32":
        return OptimizerSettings()
    moments = point["optimizer_states"].removeprefix("precision_aware_")
    return OptimizerSettings(
        use_precision_aware_optimizer=True,
        main_grads_dtype=point["gradients"],
        exp_avg_dtype=moments,
        exp_avg_sq_dtype=moments,
    )


def _recompute(kind: str) -> RecomputeSettings:
    if kind == "none":
        return RecomputeSettings()
    if kind == "full_uniform":
        return RecomputeSettings("full", "uniform", 1)
    if kind == "full_block":
        return RecomputeSettings("full", "block", 1)
    return RecomputeSettings("selective", recompute_modules=tuple(kind.split("+")))


def rank_of(point: Point) -> int:
    """A rank on the asked stage, first or last of it, in Megatron's order tp-cp-ep-dp-pp."""
    per_stage = point["tensor_model_parallel_size"] * point["context_parallel_size"] * point["data_parallel_size"]
    p = point["pipeline_model_parallel_size"]
    stage = {"first": 0, "middle": p // 2, "last": p - 1}[point["stage"]]
    return int(stage * per_stage + (per_stage - 1 if point["data_parallel_rank"] == "last" else 0))


def _layout_objections(point: Point) -> Iterator[str]:
    model = point["model"]
    t, p, c = (point[f"{kind}_parallel_size"] for kind in ("tensor_model", "pipeline_model", "context"))
    if point["num_layers"] % p:
        yield "layers divide over the stages"
    if model["num_attention_heads"] % t or model["num_query_groups"] % t or model["ffn_hidden_size"] % t:
        yield "heads, groups and FFN divide over the tensor-parallel ranks"
    if (p == 1 and point["stage"] != "first") or (p == 2 and point["stage"] == "middle"):
        yield "the stage exists, and once"
    if t * p * c * point["data_parallel_size"] < 2:
        yield "more than one rank"
    if c > 1 and model.get("attention_dropout"):
        yield "context parallelism without attention dropout"
    if p > 1 and point["num_microbatches"] < 2:
        yield "a pipeline has more than one microbatch"
    if c * t * point["data_parallel_size"] % point.get("expert_size", 1) or c * point["data_parallel_size"] < point.get(
        "expert_size", 1
    ):
        yield "expert-parallel ranks are data-parallel ones"
    if t == 1 and not point["sequence_parallel"]:
        yield "sequence parallelism is a question under tensor parallelism only"
    if p > 1 and point["stage"] == "middle" and point["cross_entropy"] == "off":
        yield "the loss is on the last stage"


def _strategy_objections(point: Point) -> Iterator[str]:
    strategy = point["strategy"]
    fsdp = strategy in _FSDP
    if fsdp and point["pipeline_model_parallel_size"] > 1:
        yield "Megatron FSDP has no pipeline (rule B1)"
    if fsdp and point["bucket"] == "no_overlap":
        yield "Megatron FSDP overlaps (rules O5, B18)"
    if strategy == "optim" and point["gradient_accumulation_fusion"]:
        yield "optim overwrites fused gradients (rule B10)"
    if strategy == "optim_grads_params" and point["bucket"] != "default":
        yield "units, not buckets"
    if strategy == "ddp" and point["optimizer_states"] != "float32":
        yield "precision-aware states need a distributed optimizer (rule A22)"
    if strategy != "ddp" and point["context_parallel_size"] * point["data_parallel_size"] < 2:
        yield "something to shard over"
    if not fsdp and (point["communication_unit"] or point["grad_comm_dtype"]):
        yield "of Megatron FSDP only"
    if point["fsdp_double_buffer"] and strategy != "optim_grads_params":
        yield "double buffers hold units (rule B5)"
    if point["grad_comm_dtype"] and point["gradients"] == "bfloat16":
        yield "the communication dtype is the main one already"
    if point["init_model_with_meta_device"] and (not fsdp or strategy == "no_shard"):
        yield "meta device needs sharded weights (rule B7)"


def _implementation_objections(point: Point) -> Iterator[str]:
    if point["implementation"] == "local":
        if point["context_parallel_size"] > 1:
            yield "local attention has no context parallelism"
        if point["seq_length"] > 4096:
            yield "local attention keeps the scores"
        if point["fusions"] != "all" or not point["sequence_parallel"]:
            yield "one variant of local layers"
        if point["init_model_with_meta_device"] or "layernorm" in point["recompute"]:
            yield "Transformer Engine's"
    if point["fusions"] == "none" and point["model"].get("bias_activation_fusion") is False:
        yield "fusion is off already"


def objections(grid: Grid, point: Point) -> list[str]:
    """Why a point is not run: what it breaks, or a size outside the grid's limits. Empty = it can be run."""
    requires = grid.kind_of(point).get("requires", {})
    for axis, values in requires.items():
        value = point[axis]["name"] if axis == "model" else point[axis]
        if value not in values:
            return [f"{point['kind']} goes with other values of {axis}"]
    if point["recompute"] in _RECOMPUTE_OF_A_KIND and "recompute" not in requires:
        return ["these modules are of mixture-of-experts or latent attention"]
    broken = [*_layout_objections(point), *_strategy_objections(point), *_implementation_objections(point)]
    if broken:
        return broken
    job = job_of(grid, point)
    settings = job.settings
    if settings.parallel.world_size > grid.limits["max_world_size"]:
        return ["world size"]
    gib = expected.expected_bytes(job) / GIB
    if not grid.limits["min_expected_gib"] <= gib <= grid.limits["max_expected_gib"]:
        return ["expected memory"]
    if step_pflop(settings, job.rank) > grid.limits["max_step_pflop"]:
        return ["a step takes too long"]
    return []


def step_pflop(settings: Settings, rank: int) -> float:
    """Rough 10^15 operations of this rank's step: 8 per parameter and token, and attention's scores."""
    stage = expected.pipeline_stage(settings, rank)
    tokens = (
        settings.model.seq_length
        * settings.batch.micro_batch_size
        * settings.num_microbatches
        / settings.parallel.context_parallel_size
    )
    scores = 12 * settings.model.num_layers * settings.model.seq_length * settings.model.hidden_size
    return tokens * (8 * sum(expected.parameters(settings, stage)) + scores) / 1e15


def _draw_point(grid: Grid, generator: random.Random, forced: Mapping[str, tuple[Any, ...]]) -> Point | None:
    """A random valid point with axes forced into given values; None if none is found."""
    for _ in range(_TRIES):
        point = {}
        for axis, values in grid.axes.items():
            weighted = zip(values, grid.weights[axis], strict=True)
            allowed = [(value, weight) for value, weight in weighted if value in forced.get(axis, values)]
            point[axis] = generator.choices([value for value, _ in allowed], [weight for _, weight in allowed])[0]
        if not objections(grid, point):
            return point
    return None


def _meets(point: Point, where: Mapping[str, tuple[Any, ...]]) -> bool:
    return all(point[axis] in values for axis, values in where.items())


def draw(grid: Grid) -> dict[str, list[ProfileJob]]:
    """The grid's sets by name, ``check`` first; the same for the same grid, on any machine. No run is in two sets."""
    generator = random.Random(grid.seed)
    seen: set[str] = set()
    return {name: _draw_set(grid, generator, name, size, seen) for name, size in grid.sizes.items()}


def _draw_set(grid: Grid, generator: random.Random, name: str, size: int, seen: set[str]) -> list[ProfileJob]:
    """Strategies in turn; each takes the quota furthest from being met among those it can serve."""
    points: list[Point] = []
    jobs: list[ProfileJob] = []
    strategies = grid.axes["strategy"]
    impossible: set[tuple[str, int]] = set()
    while len(jobs) < size:
        strategy = strategies[len(jobs) % len(strategies)]
        missing = [
            (at_least - sum(_meets(point, where) for point in points), index)
            for index, (at_least, where) in enumerate(grid.quotas)
            if (strategy, index) not in impossible and strategy in where.get("strategy", (strategy,))
        ]
        lacking, index = max(missing, key=lambda entry: (entry[0], -entry[1]), default=(0, -1))
        forced = dict(grid.quotas[index][1]) if lacking > 0 else {}
        point = _draw_point(grid, generator, {**forced, "strategy": (strategy,)})
        if point is None:
            if index < 0:
                raise ValueError(f"grid {grid.name} has no point with strategy {strategy}")
            impossible.add((strategy, index))
            continue
        tagged = replace(job_of(grid, point), tags=_tags(point))
        job = replace(tagged, run_id=f"{grid.name}-{name}-{len(jobs):03d}")
        if fingerprint(job) not in seen:
            seen.add(fingerprint(job))
            points.append(point)
            jobs.append(job)
    return jobs


def job_of(grid: Grid, point: Point) -> ProfileJob:
    """The job of a point, without a name."""
    kind = grid.kind_of(point)
    settings = settings_of(point)
    for section, values in kind.get("settings", {}).items():
        settings = replace(settings, **{section: replace(getattr(settings, section), **values)})
    transformer = dict(kind.get("extra_transformer_config", {}))
    if point.get("expert_size", 1) > 1:
        transformer["expert_model_parallel_size"] = point["expert_size"]
    return ProfileJob(
        "",
        settings,
        rank_of(point),
        extra_transformer_config=transformer,
        extra_ddp_config=dict(kind.get("extra_ddp_config", {})),
        extra_optimizer_config=dict(kind.get("extra_optimizer_config", {})),
    )


def _tags(point: Point) -> tuple[str, ...]:
    tags = [point["model"]["name"], point["strategy"], point["recompute"], f"ce_{point['cross_entropy']}"]
    for axis, short in (("tensor_model_parallel", "tp"), ("pipeline_model_parallel", "pp"), ("context_parallel", "cp")):
        if point[f"{axis}_size"] > 1:
            tags.append(f"{short}{point[f'{axis}_size']}")
    if point.get("expert_size", 1) > 1:
        tags.append(f"ep{point['expert_size']}")
    if point["implementation"] == "local":
        tags.append("local")
    if "kind" in point:
        tags.append(point["kind"])
    return tuple(tags)


def write_sweeps(grid: Grid, folder: Path = DATA / "sweeps") -> list[Path]:
    """Write ``GRID_SET.jsonl`` for every set; the committed files are what this writes."""
    from estimator.profiling.job import job_to_dict

    paths = []
    for name, jobs in draw(grid).items():
        path = folder / f"{grid.name}_{name}.jsonl"
        path.write_text("".join(json.dumps(job_to_dict(job), separators=(",", ":")) + "\n" for job in jobs))
        paths.append(path)
    return paths
