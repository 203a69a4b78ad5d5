"""Linear layers in FP8: what Transformer Engine saves instead, and the copies it makes for a moment.

Each operand of a product is quantized into a row-wise copy (for the product that reads it along its rows) and a
column-wise one, transposed (for the weight gradient); each takes a byte an element, block-wise ones an FP32 scale for
128 elements. Of an input only the column-wise copy is saved; of a sequence-parallel one only the row-wise copy of this
rank's part, gathered again in backward, where its transpose is made. Both copies of a gradient live until its layer's
backward ends. Weights are quantized once a step into copies that stay.

Source: transformer_engine 2.12.0 pytorch/module/layernorm_linear.py:197-420 and 625-1010, linear.py:160-400 and
595-960, tensor/float8_tensor.py, tensor/float8_blockwise_tensor.py; megatron-core 0.19.2
transformer/attention.py:427-443 (linear_proj saves its original input, which attention keeps anyway, unless the recipe
is delayed). Order of events as torch's memory history shows it on an H200: delayed, tensorwise (also TP 2), blockwise.
"""

from __future__ import annotations

from estimator.components import ACTIVATION_GRADIENTS, FP8_WEIGHTS, NORMS, WEIGHT_GRADIENTS
from estimator.job.settings import ModelSettings
from estimator.model.norms import backward_workspace, free_statistics, write_statistics
from estimator.model.parameters import Parameter
from estimator.model.shapes import Shapes
from estimator.timeline import Scribe

_BLOCK = 128
_SCALE_BYTES = 4


def write_quantized(s: Scribe, x: Shapes, name: str, elements: int, component: str, usage: str) -> None:
    """One copy (``usage``: "row" or "column") with its scales; one scale a tensor is not counted."""
    s.alloc(f"{name}_{usage}", elements, component)
    if x.fp8 == "blockwise":
        s.alloc(f"{name}_{usage}_scale", elements // _BLOCK * _SCALE_BYTES, component)


def free_quantized(s: Scribe, *names: str) -> None:
    """Frees copies by ``name_usage``, with their scales."""
    for name in names:
        s.free(name)
        if f"{name}_scale" in s.live:
            s.free(f"{name}_scale")


def write_weight_copies(s: Scribe, x: Shapes, parameter: Parameter) -> None:
    """The cached copies of one weight, both usages; block-wise scales are one for 128 x 128 elements, rows of scales
    padded to 4."""
    rows = parameter.num_elements // parameter.row_size
    sides = {"row": (rows, parameter.row_size), "column": (parameter.row_size, rows)}
    for usage in _usages(x):
        outer, inner = sides[usage]
        name = f"{parameter.layer}/{parameter.name}/{usage}"
        s.alloc(name, parameter.num_elements, FP8_WEIGHTS)
        if x.fp8 == "blockwise":
            blocks = -(-inner // _BLOCK)
            scales = -(-outer // _BLOCK) * (-(-blocks // 4) * 4)
            s.alloc(f"{name}/scale", scales * _SCALE_BYTES, FP8_WEIGHTS)


def norm_and_column_forward(
    s: Scribe, x: Shapes, model: ModelSettings, name: str, output_bytes: int, component: str, keep: bool
) -> None:
    """As :func:`estimator.model.linear.norm_and_column_forward`; leaves ``{name}_norm_row`` or ``_column``.

    Delayed scaling lets the norm's kernel write FP8; other recipes need its output in the compute dtype for a moment.
    """
    norm = f"{name}_norm"
    elements = x.hidden_tokens * x.hidden_size
    write_statistics(s, norm, x.hidden_tokens, model.normalization)
    write_quantized(s, x, norm, elements, NORMS, "row")
    single = x.sequence_parallel or not x.fp8_transposes
    if keep and not single:
        write_quantized(s, x, norm, elements, NORMS, "column")
    if x.fp8 != "delayed":
        s.transient(f"{norm}_output", x.hidden, NORMS)
    if x.sequence_parallel:
        write_quantized(s, x, f"{name}_gathered", x.tokens * x.hidden_size, component, "row")
    s.alloc(f"{name}_output", output_bytes, component)
    if x.sequence_parallel:
        free_quantized(s, f"{name}_gathered_row")
    if not (keep and single):
        free_quantized(s, f"{norm}_row")
    if not keep:
        free_statistics(s, norm, model.normalization)


def row_forward(s: Scribe, x: Shapes, name: str, component: str, input_bytes: int, keep: bool, original: bool) -> None:
    """Quantizes the input; a copy stays as ``{name}_input_column`` (or ``_row``) if it is kept and the input itself is
    not (``original``)."""
    elements = input_bytes // x.element_bytes
    write_quantized(s, x, f"{name}_input", elements, component, "row")
    saved = keep and not saves_original(x, original)
    if saved and x.fp8_transposes:
        write_quantized(s, x, f"{name}_input", elements, component, "column")
    if x.sequence_parallel:
        s.alloc(f"{name}_partial", x.gathered_hidden, component)
    s.alloc(f"{name}_output", x.hidden, component)
    if not saved or x.fp8_transposes:
        free_quantized(s, f"{name}_input_row")
    if x.sequence_parallel:
        s.free(f"{name}_partial")


def _usages(x: Shapes) -> tuple[str, ...]:
    return ("row", "column") if x.fp8_transposes else ("row",)


def saves_original(x: Shapes, original: bool) -> bool:
    return original and x.fp8 != "delayed"


def row_backward_input(
    s: Scribe,
    x: Shapes,
    name: str,
    input_bytes: int,
    weight_bytes: int,
    fused_wgrad: bool,
    incoming: str | None,
    original: bool,
) -> None:
    grad = f"{name}_grad"
    usages = _usages(x)
    if x.sequence_parallel:
        write_quantized(s, x, grad, x.hidden_tokens * x.hidden_size, ACTIVATION_GRADIENTS, "row")
        for usage in usages:
            write_quantized(s, x, f"{grad}_gathered", x.tokens * x.hidden_size, ACTIVATION_GRADIENTS, usage)
        free_quantized(s, f"{grad}_row")
        copies = [f"{grad}_gathered_{usage}" for usage in usages]
    else:
        for usage in usages:
            write_quantized(s, x, grad, x.hidden_tokens * x.hidden_size, ACTIVATION_GRADIENTS, usage)
        copies = [f"{grad}_{usage}" for usage in usages]
    again = []
    if saves_original(x, original):
        for usage in ("column",) if x.fp8 == "blockwise" else usages:
            write_quantized(s, x, f"{name}_again", input_bytes // x.element_bytes, ACTIVATION_GRADIENTS, usage)
            again.append(f"{name}_again_{usage}")
    s.alloc(f"{name}_input_grad", input_bytes, ACTIVATION_GRADIENTS)
    if not fused_wgrad:
        s.alloc(f"{name}_wgrad", weight_bytes, WEIGHT_GRADIENTS)
    if not again:
        free_quantized(s, f"{name}_input_{usages[-1]}")
    free_quantized(s, *copies, *again)
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
    gamma_bytes: int,
) -> None:
    norm = f"{name}_norm"
    elements = s.live[output_grad].num_bytes // x.element_bytes
    gathered = x.tokens * x.hidden_size
    usages = _usages(x)
    for usage in usages:
        write_quantized(s, x, output_grad, elements, ACTIVATION_GRADIENTS, usage)
    if x.sequence_parallel:
        write_quantized(s, x, f"{name}_gathered", gathered, NORMS, "row")
    s.alloc(f"{norm}_grad", x.gathered_hidden, ACTIVATION_GRADIENTS)
    if x.sequence_parallel:
        s.alloc(f"{name}_scattered", x.hidden, ACTIVATION_GRADIENTS)
        if x.fp8_transposes:
            write_quantized(s, x, f"{name}_gathered", gathered, NORMS, "column")
    if not fused_wgrad:
        s.alloc(f"{name}_wgrad", weight_bytes, WEIGHT_GRADIENTS)
    free_quantized(s, f"{norm}_row" if x.sequence_parallel else f"{norm}_{usages[-1]}")
    if x.sequence_parallel:
        free_quantized(s, *(f"{name}_gathered_{usage}" for usage in usages))
    s.alloc(f"{name}_input_grad", x.hidden, ACTIVATION_GRADIENTS)
    s.alloc(f"{name}_gamma_grad", gamma_bytes, WEIGHT_GRADIENTS)
    s.transient(f"{norm}_workspace", backward_workspace(x.hidden_size, model.normalization), NORMS)
    if x.sequence_parallel:
        s.free(f"{name}_scattered")
    free_statistics(s, norm, model.normalization)
    free_quantized(s, *(f"{output_grad}_{usage}" for usage in usages))
    s.free(f"{norm}_grad", output_grad, *([saved_input] if saved_input else []))
