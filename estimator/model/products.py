"""Linear layers of Transformer Engine between any two widths, in the compute dtype: the latent projections, the shared
experts.

As :mod:`estimator.model.linear`, which knows the widths of a dense layer and FP8. Source: transformer_engine 2.12.0
pytorch/module/linear.py, layernorm_linear.py; megatron-core 0.19.2 extensions/transformer_engine.py (parallel modes).
"""

from __future__ import annotations

from dataclasses import dataclass

from estimator.components import ACTIVATION_GRADIENTS, NORMS, WEIGHT_GRADIENTS
from estimator.job.settings import ModelSettings
from estimator.model.norms import backward_workspace, free_statistics, write_statistics
from estimator.model.program import GradReady, NeedsMainGrad, Step
from estimator.model.shapes import Shapes
from estimator.timeline import Scribe


@dataclass(frozen=True, slots=True)
class Product:
    """One linear layer: ``{name}_input`` (the caller's) to ``{name}_output``; widths are this rank's."""

    name: str
    parameter: str
    in_width: int
    out_width: int
    mode: str
    """column (gathers a sequence-parallel input), row (reduces its output), gathered (its input is already), duplicated
    (works on this rank's part of the sequence)."""
    component: str
    normed: bool = False
    """Whether a norm of the input is part of it; its output is then saved instead of the input."""

    def rows_in(self, x: Shapes) -> int:
        return x.tokens if self.mode in ("row", "gathered") else x.hidden_tokens

    def rows_out(self, x: Shapes) -> int:
        return x.tokens if self.mode in ("column", "gathered") else x.hidden_tokens

    def input_bytes(self, x: Shapes) -> int:
        return self.rows_in(x) * self.in_width * x.element_bytes

    def output_bytes(self, x: Shapes) -> int:
        return self.rows_out(x) * self.out_width * x.element_bytes

    def weight_bytes(self, x: Shapes) -> int:
        return self.in_width * self.out_width * x.element_bytes

    def _gathered_bytes(self, x: Shapes) -> int:
        return x.tokens * self.in_width * x.element_bytes

    def forward(self, s: Scribe, x: Shapes, model: ModelSettings, keep: bool) -> None:
        """Leaves the output and, if kept, the norm's output with its statistics."""
        n = self.name
        if self.normed:
            write_statistics(s, f"{n}_norm", self.rows_in(x), model.normalization)
            s.alloc(f"{n}_norm_output", self.input_bytes(x), NORMS)
        if self.mode == "row" and x.sequence_parallel:
            s.alloc(f"{n}_partial", x.tokens * self.out_width * x.element_bytes, self.component)
            s.alloc(f"{n}_output", self.output_bytes(x), self.component)
            s.free(f"{n}_partial")
        else:
            gathers = self.mode == "column" and x.sequence_parallel
            if gathers:
                s.alloc(f"{n}_gathered", self._gathered_bytes(x), self.component)
            s.alloc(f"{n}_output", self.output_bytes(x), self.component)
            if gathers:
                s.free(f"{n}_gathered")
        if self.normed and not keep:
            free_statistics(s, f"{n}_norm", model.normalization)
            s.free(f"{n}_norm_output")

    def backward(
        self, s: Scribe, x: Shapes, model: ModelSettings, fused_wgrad: bool, grad: str | None, saved: str | None
    ) -> list[Step]:
        """From the gradient of the output to ``{name}_input_grad``; frees ``grad``, the ``saved`` input.

        With a norm the latter is the norm's input; it is freed as the norm's backward ends.
        """
        n, steps = self.name, list[Step]()
        if fused_wgrad:
            steps += [s.cut(f"{n}.before"), NeedsMainGrad(self.parameter)]
        gathers = self.mode == "column" and x.sequence_parallel
        if gathers:
            s.alloc(f"{n}_gathered", self._gathered_bytes(x), self.component)
        elif self.mode == "row" and x.sequence_parallel:
            s.alloc(f"{n}_gathered", x.tokens * self.out_width * x.element_bytes, ACTIVATION_GRADIENTS)
        dgrad = f"{n}_norm_grad" if self.normed else f"{n}_input_grad"
        if gathers:
            s.alloc(f"{n}_full_grad", self._gathered_bytes(x), ACTIVATION_GRADIENTS)
        s.alloc(dgrad, self.input_bytes(x), ACTIVATION_GRADIENTS)
        if not fused_wgrad:
            s.alloc(f"{n}_wgrad", self.weight_bytes(x), WEIGHT_GRADIENTS)
        if self.normed:
            s.free(f"{n}_norm_output")
        elif saved:
            s.free(saved)
        if x.sequence_parallel and self.mode in ("column", "row"):
            s.free(f"{n}_gathered")
        if gathers:
            s.free(f"{n}_full_grad")
        if self.normed:
            self._norm_backward(s, x, model, saved)
        if grad:
            s.free(grad)
        steps.append(s.cut(f"{n}.backward"))
        if self.normed:
            steps.append(GradReady(f"{self.parameter}_norm_weight", None))
            s.free(f"{n}_gamma_grad")
        steps.append(GradReady(self.parameter, None if fused_wgrad else f"{n}_wgrad"))
        if not fused_wgrad:
            s.free(f"{n}_wgrad")
        return steps

    def _norm_backward(self, s: Scribe, x: Shapes, model: ModelSettings, saved: str | None) -> None:
        write_norm_backward(s, x, model, self.name, self.rows_in(x), self.in_width)
        s.free(f"{self.name}_norm_grad", *([saved] if saved else []))


def write_norm_backward(s: Scribe, x: Shapes, model: ModelSettings, name: str, rows: int, width: int) -> None:
    """The norm's kernel: ``{name}_input_grad`` and ``{name}_gamma_grad``, its workspace; frees its statistics."""
    vectors = 2 if model.normalization == "LayerNorm" else 1
    s.alloc(f"{name}_input_grad", rows * width * x.element_bytes, ACTIVATION_GRADIENTS)
    s.alloc(f"{name}_gamma_grad", width * x.element_bytes * vectors, WEIGHT_GRADIENTS)
    s.transient(f"{name}_norm_workspace", backward_workspace(width, model.normalization), NORMS)
    free_statistics(s, f"{name}_norm", model.normalization)


class Norm:
    """A norm of its own (TENorm) on the hidden states: before latent attention, before experts.

    ``recompute``: selective recompute of ``layernorm`` drops the output when the module behind it has run, and makes it
    again as that module's backward begins (megatron-core 0.19.2 transformer/transformer_layer.py:632-690, 765-980).
    """

    def __init__(self, name: str, parameter: str) -> None:
        self.name, self.parameter = name, parameter

    @property
    def output(self) -> str:
        return f"{self.name}_output"

    def forward(self, s: Scribe, x: Shapes, model: ModelSettings, recompute: bool = False) -> None:
        write_statistics(s, f"{self.name}_norm", x.hidden_tokens, model.normalization)
        s.alloc(self.output, x.hidden, NORMS)
        if recompute:
            free_statistics(s, f"{self.name}_norm", model.normalization)

    def discard(self, s: Scribe, model: ModelSettings) -> None:
        """Output and statistics go: under full recompute, or where nothing behind needs them."""
        free_statistics(s, f"{self.name}_norm", model.normalization)
        s.free(self.output)

    def backward(self, s: Scribe, x: Shapes, model: ModelSettings, grad: str) -> None:
        """From ``grad`` of the output to ``{name}_input_grad``; frees ``grad``."""
        write_norm_backward(s, x, model, self.name, x.hidden_tokens, x.hidden_size)
        s.free(grad)

    def ready(self, s: Scribe) -> list[Step]:
        steps: list[Step] = [s.cut(f"{self.name}.norm"), GradReady(self.parameter, None)]
        s.free(f"{self.name}_gamma_grad")
        return steps
