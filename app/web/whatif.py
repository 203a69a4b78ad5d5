"""What-if: one combination of settings, estimated beside the job as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from app.schemas import RecommendBody
from estimator.calibration import Calibration
from estimator.changes import apply_changes
from estimator.cluster import Cluster, resolve_cluster
from estimator.errors import EstimatorError, JobError, NotModelled
from estimator.estimate import estimate
from estimator.job.settings import Settings
from estimator.reading import ReadJob, read_job, read_stack, read_values
from estimator.render import render_override
from estimator.search.changes import point_changes
from estimator.search.space import Point, Recompute, current_point

STRATEGIES = {
    "ddp": "DDP",
    "distopt": "Distributed optimizer",
    "optim": "Megatron FSDP optim",
    "optim_grads": "Megatron FSDP optim_grads",
    "optim_grads_params": "Megatron FSDP optim_grads_params",
}
SIZES = (1, 2, 4, 8, 16, 32)
MICRO_BATCHES = (1, 2, 4, 8, 16)
ALLOCATORS = {"default": "default", "expandable": "expandable segments"}


@dataclass(frozen=True, slots=True)
class Choice:
    """One select of the form."""

    name: str
    title: str
    options: tuple[tuple[str, str], ...]
    value: str


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The form, and the estimate for what is chosen; ``refused`` says why there is none."""

    choices: tuple[Choice, ...]
    changed: bool
    estimate: dict[str, Any] | None = None
    problems: tuple[str, ...] = ()
    adjusted: tuple[str, ...] = ()
    """What had to differ from the choice, so that it can run at all."""
    python: str | None = None
    refused: str | None = None


def what_if(body: RecommendBody, query: Mapping[str, str], calibrations: tuple[Calibration, ...] = ()) -> WhatIf:
    """Settings of the query on top of the request's job, with the calibration of its answer.

    Raises EstimatorError if the job itself cannot be read.
    """
    cluster = resolve_cluster(replace(body.cluster.to_request(), calibrations=calibrations))
    stack = read_stack(body.stack)
    job = read_job(body.job.to_request(), cluster, stack)
    now = current_point(job.settings)
    point, problems = _point(now, job.settings, query)
    choices = _choices(point, job.settings)
    if problems:
        return WhatIf(choices, changed=True, refused=" ".join(problems))
    if point == now:
        return WhatIf(choices, changed=False)
    return replace(_estimated(body, job, now, point, cluster), choices=choices)


def _estimated(body: RecommendBody, job: ReadJob, now: Point, point: Point, cluster: Cluster) -> WhatIf:
    stack = read_stack(body.stack)
    values = job.document.values
    try:
        changes = point_changes(point, now, values, job.effective.values, cluster, stack)
        if now.expandable_segments and not point.expandable_segments:
            return WhatIf((), True, refused="Switching expandable segments off is not something to recommend.")
        changed = read_values(apply_changes(values, changes), job.document, cluster, stack, job.moe_load_imbalance)
        if not changed.laid_out:
            return WhatIf((), True, refused=" ".join(p.message for p in changed.errors[:3]))
        result = estimate(changed.settings, cluster, body.min_fit_probability, exact_ranks=1, both_settings=False)
    except (JobError, NotModelled) as error:
        return WhatIf((), True, refused=str(error))
    except (EstimatorError, ValueError) as error:
        return WhatIf((), True, refused=f"This combination cannot exist: {error}")
    override = render_override(changes, values, cluster, stack)
    problems = tuple(f"{p.rule_id}: {p.message}" for p in changed.errors)
    adjusted = _adjusted(point, current_point(changed.settings))
    return WhatIf((), True, result.as_dict(), problems, adjusted, override.as_dict()["python"])


_TITLES = {
    "strategy": "data parallelism",
    "tensor": "tensor parallel size",
    "pipeline": "pipeline stages",
    "context": "context parallel size",
    "micro_batch_size": "micro batch",
    "expandable_segments": "expandable segments",
}


def _adjusted(wanted: Point, got: Point) -> tuple[str, ...]:
    differing = [name for name in _TITLES if getattr(wanted, name) != getattr(got, name)]
    return tuple(f"{_TITLES[name]} {getattr(got, name)} instead of {getattr(wanted, name)}" for name in differing)


def _point(now: Point, settings: Settings, query: Mapping[str, str]) -> tuple[Point, list[str]]:
    """The combination that the query names; what it leaves out stays."""
    problems: list[str] = []

    def number(name: str, current: int) -> int:
        text = query.get(name, "")
        if not text:
            return current
        if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= 100_000:
            problems.append(f"{name} has to be a whole number from 1 to 100000.")
            return current
        return int(text)

    strategy = query.get("strategy") or now.strategy
    if strategy not in STRATEGIES and strategy != now.strategy:
        problems.append(f"strategy has to be one of {', '.join(STRATEGIES)}.")
        strategy = now.strategy
    recompute = _recompute(query.get("recompute", ""), now, settings, problems)
    allocator = query.get("allocator", "")
    return (
        replace(
            now,
            strategy=strategy,
            micro_batch_size=number("micro_batch", now.micro_batch_size),
            tensor=number("tensor", now.tensor),
            pipeline=number("pipeline", now.pipeline),
            context=number("context", now.context),
            recompute=recompute,
            expandable_segments=now.expandable_segments if not allocator else allocator == "expandable",
        ),
        problems,
    )


def _recompute(text: str, now: Point, settings: Settings, problems: list[str]) -> Recompute:
    if text in ("", "now"):
        return now.recompute
    if text == "none":
        return Recompute(None)
    if text == "full":
        return Recompute("full", "uniform", 1)
    if text == "mlp":
        return Recompute("selective", modules=("mlp",))
    layers = text.removeprefix("block-")
    if text.startswith("block-") and layers.isascii() and layers.isdigit():
        return Recompute("full", "block", max(1, min(int(layers[:6]), settings.model.num_layers)))
    problems.append("recompute has to be none, mlp, full or block-N.")
    return now.recompute


def _choices(point: Point, settings: Settings) -> tuple[Choice, ...]:
    layers = settings.model.num_layers // max(1, point.pipeline)
    blocks = sorted({max(1, layers * k // 4) for k in (1, 2, 3)})
    recomputes = [("none", "nothing"), ("mlp", "the MLP")]
    recomputes += [(f"block-{n}", f"{n} layers of a stage") for n in blocks]
    recomputes += [("full", "every layer")]
    return (
        _choice("strategy", "Data parallelism", tuple(STRATEGIES.items()), point.strategy),
        _choice("tensor", "Tensor parallel", _sizes(SIZES), str(point.tensor)),
        _choice("pipeline", "Pipeline stages", _sizes(SIZES), str(point.pipeline)),
        _choice("context", "Context parallel", _sizes(SIZES), str(point.context)),
        _choice("micro_batch", "Micro batch", _sizes(MICRO_BATCHES), str(point.micro_batch_size)),
        _choice("recompute", "Recompute", tuple(recomputes), _recompute_name(point.recompute)),
        _choice("allocator", "Allocator", tuple(ALLOCATORS.items()), _allocator_name(point)),
    )


def _sizes(values: tuple[int, ...]) -> tuple[tuple[str, str], ...]:
    return tuple((str(value), str(value)) for value in values)


def _choice(name: str, title: str, options: tuple[tuple[str, str], ...], value: str) -> Choice:
    """A value that the list lacks stands first: nothing of the job is hidden."""
    if value not in {key for key, _ in options}:
        options = ((value, value.replace("-", " ")), *options)
    return Choice(name, title, options, value)


def _allocator_name(point: Point) -> str:
    return "expandable" if point.expandable_segments else "default"


def _recompute_name(recompute: Recompute) -> str:
    if recompute.granularity is None:
        return "none"
    if recompute.granularity == "full":
        return f"block-{recompute.layers}" if recompute.method == "block" else "full"
    return "mlp" if recompute.modules == ("mlp",) else "now"
