"""One decoder layer as a program: forward and backward, with what selective recompute leaves out and brings back."""

from __future__ import annotations

from functools import lru_cache

from estimator.components import ACTIVATION_GRADIENTS, RESIDUAL
from estimator.job.settings import ModelSettings
from estimator.model.attention import Attention
from estimator.model.experts import ExpertLayer
from estimator.model.latent_attention import LatentAttention
from estimator.model.mlp import Mlp
from estimator.model.program import Program, Step
from estimator.model.shapes import Shapes
from estimator.timeline import Block, Scribe


@lru_cache(maxsize=512)
def layer_program(
    model: ModelSettings,
    shapes: Shapes,
    *,
    modules: tuple[str, ...],
    fused_wgrad: bool,
    out_of_place: bool,
    experts: bool = False,
    keep_output_grad: bool = False,
    keep_input: bool = False,
) -> Program:
    """Forward from ``prev/output`` to ``output``; backward from ``^grad`` (of output) to ``^grad`` (of the input).

    ``modules``: recomputed ones. ``experts``: a mixture of experts instead of the dense MLP. ``keep_output_grad``,
    ``keep_input``: the pipeline schedule still refers to the received tensors, which backward
    leaves as ``^kept_output_grad`` and ``^kept_input``.
    """
    attention, mlp = _parts(model, shapes, modules, experts)
    s = Scribe()
    attention.forward(s, keep=True)
    mlp.forward(s, keep=True)
    forward = s.cut("layer.forward")
    hidden = shapes.hidden
    s.assume("prev/output", hidden, RESIDUAL)
    s.assume("^grad", hidden, ACTIVATION_GRADIENTS)
    steps: list[Step] = mlp.backward(s, fused_wgrad, out_of_place, keep_output_grad)
    steps += attention.backward(s, fused_wgrad, keep_input)
    return Program(forward, tuple(step for step in steps if not (isinstance(step, Block) and not step.ops)))


@lru_cache(maxsize=512)
def discarded_forward(model: ModelSettings, shapes: Shapes, experts: bool = False) -> Block:
    """Forward under full activation checkpointing: nothing is saved but ``output``."""
    s = Scribe()
    attention, mlp = _parts(model, shapes, (), experts)
    attention.forward(s, keep=False)
    mlp.forward(s, keep=False)
    return s.cut("layer.forward.discarded")


def _parts(
    model: ModelSettings, shapes: Shapes, modules: tuple[str, ...], experts: bool
) -> tuple[Attention | LatentAttention, Mlp | ExpertLayer]:
    attention = LatentAttention if model.mla else Attention
    return attention(model, shapes, modules), (ExpertLayer if experts else Mlp)(model, shapes, modules)
