"""Numbers into sentences a tired person understands."""

from __future__ import annotations

from collections.abc import Sequence

from estimator.components import MEANING
from estimator.estimate import Estimate
from estimator.search.recommend import Candidate
from estimator.search.space import Point, Recompute

GIB = 1024**3

PHASE_WORDS = {
    "model_build": "while the model is built",
    "optimizer_build": "while the optimizer is built",
    "first_forward_backward": "in the first forward and backward",
    "first_optimizer_step": "in the first optimizer step",
    "steady_forward_backward": "in forward and backward from the second iteration on",
    "steady_optimizer_step": "in the optimizer step from the second iteration on",
}

STRATEGY_WORDS = {
    "ddp": "plain DDP",
    "distopt": "the distributed optimizer",
    "no_shard": "Megatron FSDP no_shard",
    "optim": "Megatron FSDP optim",
    "optim_grads": "Megatron FSDP optim_grads",
    "optim_grads_params": "Megatron FSDP optim_grads_params",
}


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def chance(probability: float) -> str:
    """A probability; never rounded up to certainty, nor down to impossibility."""
    if probability >= 0.9995:
        return "over 99.9 %"
    return "under 0.1 %" if probability < 0.0005 else f"{100 * probability:.3g} %"


def what_fills(estimate: Estimate, most: int = 3) -> str:
    """ "27.0 GiB gradient buffers ..., 13.5 GiB ..." for the largest components at the peak."""
    largest = sorted(estimate.rank.components_at_peak.items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{gib(n)} {MEANING[name]}" for name, n in largest)


def current_sentence(estimate: Estimate) -> str:
    peak = estimate.rank.peak
    where = f" on pipeline rank {estimate.rank.pipeline_rank}" if len(estimate.ranks) > 1 else ""
    return (
        f"The job needs {gib(estimate.required_bytes())} of the {gib(estimate.cluster.usable_bytes)} usable on each "
        f"{estimate.cluster.gpu.name}: it peaks {PHASE_WORDS[peak.name]}{where}, with {what_fills(estimate)}."
    )


def fits_but_failed(estimate: Estimate) -> str:
    """Evidence shows a failure of a job that fits by the estimate."""
    need, room = gib(estimate.required_bytes()), gib(estimate.cluster.usable_bytes)
    sure = chance(estimate.verdict.probability)
    return (
        f"By the estimate the job needs {need} of {room} and fits (probability {sure}): "
        "what ran differs from this job, or the cause lies outside of it."
    )


def recompute_words(recompute: Recompute) -> str:
    if recompute.granularity is None:
        return "no recompute"
    if recompute.granularity == "selective":
        return f"recompute of {', '.join(recompute.modules)}"
    return f"recompute of {recompute.layers} layers a stage" if recompute.method == "block" else "full recompute"


def title(candidate: Candidate) -> str:
    """What changes, in a few words."""
    parts = []
    families = {change.family for change in candidate.changes}
    point = candidate.point
    if "dp_strategy" in families:
        parts.append(STRATEGY_WORDS[point.strategy])
    if "layout" in families:
        layout = [("TP", point.tensor), ("PP", point.pipeline), ("CP", point.context)]
        parts.append(" ".join(f"{name} {size}" for name, size in layout if size > 1) or "no model parallelism")
    if "micro_batch" in families:
        parts.append(f"micro batch {point.micro_batch_size}")
    if "recompute" in families:
        parts.append(recompute_words(point.recompute))
    if "cross_entropy" in families:
        parts.append("Transformer Engine's cross entropy")
    if "fsdp_buffers" in families:
        parts.append("smaller FSDP buffers")
    if "allocator" in families:
        parts.append("expandable segments")
    text = " + ".join(parts) or "repairs"
    return text[0].upper() + text[1:]


def point_title(point: Point, now: Point) -> str:
    """A combination of settings by what differs from the job's own."""
    parts = []
    if point.strategy != now.strategy:
        parts.append(STRATEGY_WORDS[point.strategy])
    layout = [("TP", "tensor"), ("PP", "pipeline"), ("CP", "context")]
    parts += [
        f"{name} {getattr(point, field)}" for name, field in layout if getattr(point, field) != getattr(now, field)
    ]
    if point.micro_batch_size != now.micro_batch_size:
        parts.append(f"micro batch {point.micro_batch_size}")
    if point.recompute != now.recompute:
        parts.append(recompute_words(point.recompute))
    if point.cross_entropy_te != now.cross_entropy_te:
        parts.append("Transformer Engine's cross entropy")
    if point.small_communication_unit != now.small_communication_unit:
        parts.append("smaller FSDP buffers")
    if point.expandable_segments != now.expandable_segments:
        parts.append("expandable segments")
    return ", ".join(parts) or "the job as it is"


def recommendation_sentences(candidates: Sequence[Candidate]) -> str:
    first = candidates[0]
    change = (first.relative_step_time - 1) * 100
    pace = (
        "about the same step time"
        if abs(change) < 1
        else f"{abs(change):.0f} % {'more' if change > 0 else 'less'} step time"
    )
    conversion = " Existing checkpoints have to be converted." if first.conversion_needed else ""
    sure = chance(first.estimate.verdict.probability)
    return (
        f"Change to: {title(first)}. It then needs {gib(first.estimate.required_bytes())} "
        f"(fits with probability {sure}) at {pace} (predicted).{conversion}"
    )
