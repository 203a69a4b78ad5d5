"""What a module's backward hands to the sharding strategy: blocks, and the moments at which gradients matter."""

from __future__ import annotations

from dataclasses import dataclass, field

from estimator.timeline import Block


@dataclass(frozen=True, slots=True)
class NeedsMainGrad:
    """Transformer Engine is about to add a weight gradient to ``main_grad`` itself (gradient accumulation fusion)."""

    parameter: str


@dataclass(frozen=True, slots=True)
class GradReady:
    """The gradient of ``parameter`` is complete. ``buffer`` is its own tensor, or None if it went to main_grad
    already."""

    parameter: str
    buffer: str | None


Step = Block | NeedsMainGrad | GradReady


@dataclass(frozen=True, slots=True)
class Program:
    """Forward and backward of one module for one microbatch.

    Buffer names are local to the scope (microbatch, layer), except ``prev/…`` (the scope of the layer before) and
    ``^…`` (the microbatch): the residual stream and its gradient are handed on under those names.
    """

    forward: Block
    backward: tuple[Step, ...]
    whole_backward: Block = field(init=False)
    """All blocks of backward as one: for strategies that do nothing in between."""

    def __post_init__(self) -> None:
        ops = tuple(op for step in self.backward if isinstance(step, Block) for op in step.ops)
        object.__setattr__(self, "whole_backward", Block("backward", ops))
