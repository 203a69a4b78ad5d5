"""One decoder layer as a program: forward and backward, with what selective recompute leaves out and brings back."""

from __future__ import annotations

from functools import lru_cache

from estimator.components import ACTIVATION_GRADIENTS, RESIDUAL
from estimator.job.settings import ModelSettings
from estimator.model.attention import Attention
from estimator.model.mlp import Mlp
from estimator.model.program import Program, Step
from estimator.model.shapes import Shapes
from estimator.timeline import Block, Scribe


@lru_cache(maxsize=512)
def layer_program(
    model: ModelSettings,
    shapes: Shapes,
    *,
    recompute_core_attention: bool,
    recompute_mlp: bool,
    fused_wgrad: bool,
    out_of_place: bool,
    keep_output_grad: bool = False,
    keep_input: bool = False,
) -> Program:
    """Forward from ``prev/output`` to ``output``; backward from ``^grad`` (of output) to ``^grad`` (of the input).

    ``keep_output_grad``, ``keep_input``: the pipeline schedule still refers to the received tensors, which backward
    leaves as ``^kept_output_grad`` and ``^kept_input``.
    """
    attention, mlp = Attention(model, shapes), Mlp(model, shapes)
    s = Scribe()
    attention.forward(s, keep=True, recompute_core=recompute_core_attention)
    mlp.forward(s, keep=True, recompute=recompute_mlp)
    forward = s.cut("layer.forward")
    hidden = shapes.hidden
    s.assume("prev/output", hidden, RESIDUAL)
    s.assume("^grad", hidden, ACTIVATION_GRADIENTS)
    steps: list[Step] = mlp.backward(s, fused_wgrad, out_of_place, keep_output_grad, recompute_mlp)
    steps += attention.backward(s, fused_wgrad, recompute_core_attention, keep_input)
    return Program(forward, tuple(step for step in steps if not (isinstance(step, Block) and not step.ops)))


@lru_cache(maxsize=512)
def discarded_forward(model: ModelSettings, shapes: Shapes) -> Block:
    """Forward under full activation checkpointing: nothing is saved but ``output``."""
    s = Scribe()
    Attention(model, shapes).forward(s, keep=False)
    Mlp(model, shapes).forward(s, keep=False)
    return s.cut("layer.forward.discarded")
