"""The residual stream: bias + dropout + add, forward and backward. Source: megatron-core 0.19.2,
fusions/fused_bias_dropout.py."""

from __future__ import annotations

from estimator.components import ACTIVATION_GRADIENTS, RESIDUAL
from estimator.job.settings import ModelSettings
from estimator.model.shapes import Shapes
from estimator.timeline import Scribe


def write_add_forward(
    s: Scribe, x: Shapes, model: ModelSettings, branch: str, result: str, mask: str, keep: bool
) -> None:
    """Adds ``branch`` to the residual stream into ``result``; dropout keeps a mask of one byte an element."""
    if model.hidden_dropout > 0:
        s.alloc(mask, x.hidden // x.element_bytes, RESIDUAL)
    s.alloc(result, x.hidden, RESIDUAL)
    s.free(branch)
    if model.hidden_dropout > 0 and not keep:
        s.free(mask)


def write_dropout_backward(s: Scribe, x: Shapes, model: ModelSettings, mask: str) -> str | None:
    """Gradient of the branch through dropout: its own tensor, whose name is returned; None without dropout."""
    if model.hidden_dropout <= 0:
        return None
    name = f"{mask}_grad"
    s.alloc(name, x.hidden, ACTIVATION_GRADIENTS)
    s.free(mask)
    return name
