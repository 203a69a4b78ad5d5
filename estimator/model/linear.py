"""Transformer Engine's linear layers under tensor parallelism: what they save, and what backward needs for a moment.

Column-parallel layers with their norm (QKV, fc1) keep the norm's output; with sequence parallelism they gather it for
the
product and again for the weight gradient. Row-parallel layers (projection, fc2) reduce-scatter their output; backward
gathers the incoming gradient. Source: transformer_engine 2.12.0 pytorch/module/layernorm_linear.py, linear.py.
"""

from __future__ import annotations

from estimator.components import ACTIVATION_GRADIENTS, NORMS, WEIGHT_GRADIENTS
from estimator.job.settings import ModelSettings
from estimator.model import fp8
from estimator.model.norms import backward_workspace, free_statistics, write_statistics
from estimator.model.shapes import Shapes
from estimator.timeline import Scribe


def norm_and_column_forward(
    s: Scribe, x: Shapes, model: ModelSettings, name: str, output_bytes: int, component: str, keep: bool
) -> None:
    """Norm, then the column-parallel product into ``{name}_output``; the norm's output stays if it is kept."""
    if x.fp8:
        fp8.norm_and_column_forward(s, x, model, name, output_bytes, component, keep)
        return
    write_statistics(s, f"{name}_norm", x.hidden_tokens, model.normalization)
    s.alloc(f"{name}_norm_output", x.hidden, NORMS)
    if x.sequence_parallel:
        s.alloc(f"{name}_gathered", x.gathered_hidden, component)
    s.alloc(f"{name}_output", output_bytes, component)
    if x.sequence_parallel:
        s.free(f"{name}_gathered")
    if not keep:
        free_statistics(s, f"{name}_norm", model.normalization)
        s.free(f"{name}_norm_output")


def row_forward(
    s: Scribe, x: Shapes, name: str, component: str, input_bytes: int, keep: bool, original: bool = False
) -> None:
    """Row-parallel product into ``{name}_output``, [s/c (/t), b, h].

    ``original``: backward has the input anyway (attention keeps its output). In FP8 the input is not needed afterwards
    otherwise: the caller frees it.
    """
    if x.fp8:
        fp8.row_forward(s, x, name, component, input_bytes, keep, original)
        return
    if x.sequence_parallel:
        s.alloc(f"{name}_partial", x.gathered_hidden, component)
        s.alloc(f"{name}_output", x.hidden, component)
        s.free(f"{name}_partial")
    else:
        s.alloc(f"{name}_output", x.hidden, component)


def row_backward_input(
    s: Scribe,
    x: Shapes,
    name: str,
    input_bytes: int,
    weight_bytes: int,
    fused_wgrad: bool,
    incoming: str | None,
    original: bool = False,
) -> None:
    """Gradient of a row-parallel layer's input (and of its weight, unless that is added to main_grad in place)."""
    if x.fp8:
        fp8.row_backward_input(s, x, name, input_bytes, weight_bytes, fused_wgrad, incoming, original)
        return
    if x.sequence_parallel:
        s.alloc(f"{name}_grad_gathered", x.gathered_hidden, ACTIVATION_GRADIENTS)
    s.alloc(f"{name}_input_grad", input_bytes, ACTIVATION_GRADIENTS)
    if not fused_wgrad:
        s.alloc(f"{name}_wgrad", weight_bytes, WEIGHT_GRADIENTS)
    if x.sequence_parallel:
        s.free(f"{name}_grad_gathered")
    if incoming:
        s.free(incoming)


def column_backward(
    s: Scribe,
    x: Shapes,
    model: ModelSettings,
    name: str,
    weight_bytes: int,
    fused_wgrad: bool,
    output_grad: str,
    saved_input: str | None,
) -> None:
    """Backward of norm and column-parallel product: leaves ``{name}_input_grad``, ``{name}_gamma_grad`` (and wgrad)."""
    gamma = x.hidden_size * x.element_bytes * _vectors(model)
    if x.fp8:
        fp8.column_backward(s, x, model, name, weight_bytes, fused_wgrad, output_grad, saved_input, gamma)
        return
    if x.sequence_parallel:
        s.alloc(f"{name}_gathered", x.gathered_hidden, NORMS)
    s.alloc(f"{name}_norm_grad", x.gathered_hidden, ACTIVATION_GRADIENTS)
    if x.sequence_parallel:
        s.alloc(f"{name}_scattered", x.hidden, ACTIVATION_GRADIENTS)
    if not fused_wgrad:
        s.alloc(f"{name}_wgrad", weight_bytes, WEIGHT_GRADIENTS)
    s.free(f"{name}_norm_output")
    if x.sequence_parallel:
        s.free(f"{name}_gathered")
    s.alloc(f"{name}_input_grad", x.hidden, ACTIVATION_GRADIENTS)
    s.alloc(f"{name}_gamma_grad", gamma, WEIGHT_GRADIENTS)
    s.transient(f"{name}_norm_workspace", backward_workspace(x.hidden_size, model.normalization), NORMS)
    if x.sequence_parallel:
        s.free(f"{name}_scattered")
    free_statistics(s, f"{name}_norm", model.normalization)
    s.free(f"{name}_norm_grad", output_grad)
    if saved_input:
        s.free(saved_input)


def _vectors(model: ModelSettings) -> int:
    return 2 if model.normalization == "LayerNorm" else 1
