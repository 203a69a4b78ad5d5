"""The size that was asked for, matched against the tensors that this job makes.

The sizes are those of the timeline itself (every buffer of a step of that rank, whatever the model or strategy), and a
few that a job makes when it does not do what its configuration says: logits in FP32, unfused attention scores.
PyTorch prints the size of the segment it wanted, not of the tensor: up to 1 MiB becomes 2 MiB, below 10 MiB becomes 20
MiB, larger ones are rounded up to 2 MiB (c10/cuda/CUDACachingAllocator.cpp get_allocation_size, torch 2.11).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from estimator import components
from estimator.diagnose.units import GIB, MIB
from estimator.job.settings import Settings
from estimator.model.shapes import shapes_of
from estimator.step.compose import StepTimeline

TOLERANCE = 0.01
SMALLEST_BYTES = 21 * MIB
"""Up to 20 MiB the allocator asks for the same segments whatever the tensor: nothing to recognise."""
MAX_MATCHES = 5

CAUSE_OF_COMPONENT = {
    components.PARAMETERS: "model_states",
    components.MAIN_PARAMETERS: "model_states",
    components.MAIN_GRADIENTS: "model_states",
    components.OPTIMIZER_STATES: "optimizer_first_step",
    components.GATHERED_PARAMETERS: "fsdp_buffers",
    components.GRADIENT_BUCKETS: "fsdp_buffers",
    components.WEIGHT_GRADIENTS: "activations",
    components.LOGITS: "logits",
    components.OPTIMIZER_TEMPORARIES: "optimizer_temporaries",
}
"""Which cause speaks from a tensor of a component; see :func:`cause_of_component` for the others."""

CAUSE_OF_PREFIX = (("activation", "activations"), ("fp8", "fp8_copies"), ("pipeline", "activations"))


def cause_of_component(name: str) -> str | None:
    """The cause that a tensor of this component speaks for; None if it says nothing."""
    known = CAUSE_OF_COMPONENT.get(name)
    return known or next((cause for prefix, cause in CAUSE_OF_PREFIX if name.startswith(prefix)), None)


PHASES_OF_CAUSE = {
    "optimizer_first_step": ("optimizer_step", "optimizer_build"),
    "optimizer_temporaries": ("optimizer_step", "optimizer_build"),
    "logits": ("forward", "backward"),
    "unfused_attention": ("forward", "backward"),
    "activations": ("forward", "backward"),
    "fsdp_buffers": ("forward", "backward", "gradient_reduction", "optimizer_step"),
}
"""Where a match of that cause can come from; a match in another phase counts less."""


@dataclass(frozen=True, slots=True)
class Match:
    """A tensor of the job whose size is the one that was asked for."""

    name: str
    component: str
    cause: str
    num_bytes: int
    difference: float
    """Of the segment for this tensor to the size asked for, as a share of it."""
    fits_phase: bool

    def words(self) -> str:
        return f"{self.name} ({self.num_bytes / GIB:.2f} GiB)"


def segment_bytes(num_bytes: int) -> int:
    """What the allocator asks the driver for when a tensor of this size does not fit its pool."""
    if num_bytes <= MIB:
        return 2 * MIB
    if num_bytes < 10 * MIB:
        return 20 * MIB
    return -(-num_bytes // (2 * MIB)) * 2 * MIB


def match_request(
    requested_bytes: int, settings: Settings, step: StepTimeline, phase: str | None, resolution_bytes: int = 0
) -> tuple[Match, ...]:
    """The job's tensors that fit within 1 % (or the printed digits, where those are coarser), best first."""
    if requested_bytes < SMALLEST_BYTES:
        return ()
    tolerance = max(TOLERANCE * requested_bytes, resolution_bytes / 2)
    best: dict[str, Match] = {}
    for name, component, cause, size in (*_timeline_sizes(step), *_other_sizes(settings)):
        gap = min(abs(segment_bytes(size) - requested_bytes), abs(size - requested_bytes))
        if gap > tolerance:
            continue
        fits = phase is None or cause not in PHASES_OF_CAUSE or phase in PHASES_OF_CAUSE[cause]
        match = Match(name, component, cause, size, gap / requested_bytes, fits)
        known = best.get(name)
        if known is None or match.difference < known.difference:
            best[name] = match
    ordered = sorted(best.values(), key=lambda m: (not m.fits_phase, m.difference, m.name))
    return tuple(ordered[:MAX_MATCHES])


def _timeline_sizes(step: StepTimeline) -> Iterator[tuple[str, str, str, int]]:
    seen: set[tuple[str, str, int]] = set()
    for _, _, op in step.timeline.ops():
        cause = cause_of_component(op.component) if op.num_bytes >= SMALLEST_BYTES // 2 else None
        if cause is None:
            continue
        last = re.sub(r"\d{1,9}", "", op.name.rpartition("/")[2].partition(">")[2] or op.name.rpartition("/")[2])
        key = (last, op.component, op.num_bytes)
        if key in seen:
            continue
        seen.add(key)
        words = last.strip("_. /").replace("_", " ") or "a buffer"
        meaning = components.MEANING.get(op.component, op.component)
        yield f"{words}: {meaning}", op.component, cause, op.num_bytes


def _other_sizes(settings: Settings) -> Iterator[tuple[str, str, str, int]]:
    shapes = shapes_of(settings)
    tokens, vocab = shapes.tokens, shapes.vocab_size
    yield "logits in FP32, tokens x vocabulary x 4", components.LOGITS, "logits", tokens * vocab * 4
    yield "logits in BF16, tokens x vocabulary x 2", components.LOGITS, "logits", tokens * vocab * 2
    if shapes.tensor_parallel > 1:
        whole = vocab * shapes.tensor_parallel
        yield "logits of the whole vocabulary in FP32", components.LOGITS, "logits", tokens * whole * 4
        yield "logits of the whole vocabulary in BF16", components.LOGITS, "logits", tokens * whole * 2
    scores = shapes.micro_batch_size * shapes.num_heads * shapes.sequence * shapes.sequence * shapes.context_parallel
    for width, dtype in ((2, "BF16"), (4, "FP32"), (1, "a byte mask")):
        name = f"attention scores, heads x sequence x sequence in {dtype}"
        yield name, components.ATTENTION, "unfused_attention", scores * width
    yield "embedding table in BF16", components.PARAMETERS, "model_states", vocab * settings.model.hidden_size * 2
    name = "gradient of the embedding or output layer in FP32"
    yield name, components.WEIGHT_GRADIENTS, "model_states", vocab * settings.model.hidden_size * 4
