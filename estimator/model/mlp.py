"""Dense MLP on Transformer Engine: gated or plain, activation fused with its bias or not.

Source: megatron-core 0.19.2 transformer/mlp.py:300-340 and fusions/fused_bias_{swiglu,geglu,gelu}.py; sequence as
torch's
memory history shows it on an H200.
"""

from __future__ import annotations

from estimator.components import ACTIVATION_GRADIENTS, MLP
from estimator.job.settings import ModelSettings
from estimator.model.linear import column_backward, norm_and_column_forward, row_backward_input, row_forward
from estimator.model.program import GradReady, NeedsMainGrad, Step
from estimator.model.residual import write_add_forward, write_dropout_backward
from estimator.model.shapes import Shapes
from estimator.timeline import Scribe


class Mlp:
    """Writes the blocks of one layer's MLP, from ``residual`` to ``output``."""

    def __init__(self, model: ModelSettings, shapes: Shapes, modules: tuple[str, ...] = ()) -> None:
        self.model, self.x = model, shapes
        self.recompute = "mlp" in modules
        self.fc1_bytes = shapes.ffn * (2 if model.gated_linear_unit else 1)
        self.split_gate = model.gated_linear_unit and not model.bias_activation_fusion

    def inner_forward(self, s: Scribe, keep: bool) -> None:
        """Norm, fc1, activation, fc2: everything but the add; leaves ``fc2_output`` and, if kept, what backward
        needs."""
        x = self.x
        norm_and_column_forward(s, x, self.model, "fc1", self.fc1_bytes, MLP, keep)
        if self.split_gate:
            s.alloc("gate_activated", x.ffn, MLP)
            s.alloc("linear_half", x.ffn, MLP)
        s.alloc("activation", x.ffn, MLP)
        if not keep:
            if self.split_gate:
                s.free("gate_activated", "linear_half")
            s.free("fc1_output")
        row_forward(s, x, "fc2", MLP, x.ffn, keep)
        if not keep or x.fp8:
            s.free("activation")

    def forward(self, s: Scribe, keep: bool) -> None:
        self.inner_forward(s, keep and not self.recompute)
        write_add_forward(s, self.x, self.model, "fc2_output", "output", "mlp_dropout_mask", keep)
        if not keep:
            s.free("residual")

    def backward(self, s: Scribe, fused_wgrad: bool, out_of_place: bool, keep_grad: bool = False) -> list[Step]:
        """From ``^grad`` (gradient of this layer's output) to the gradient of the residual stream before the MLP.

        ``out_of_place``: the sum with the skip connection's gradient takes a tensor of its own (the topmost layer, and
        every FSDP unit, whose hooks still hold the incoming gradient). ``keep_grad`` then leaves the incoming one.
        """
        x, m = self.x, self.model
        steps: list[Step] = []
        if self.recompute:
            self.inner_forward(s, keep=True)
        dropped = write_dropout_backward(s, x, m, "mlp_dropout_mask")
        if fused_wgrad:
            steps += [s.cut("mlp.dropout"), NeedsMainGrad("linear_fc2")]
        weight = x.hidden_size * x.ffn_size * x.element_bytes
        row_backward_input(s, x, "fc2", x.ffn, weight, fused_wgrad, dropped)
        if not x.fp8:
            s.free("activation")
        steps.append(s.cut("mlp.fc2"))
        steps.append(GradReady("linear_fc2", None if fused_wgrad else "fc2_wgrad"))
        if not fused_wgrad:
            s.free("fc2_wgrad")
        self._activation_backward(s)
        if fused_wgrad:
            steps += [s.cut("mlp.activation"), NeedsMainGrad("linear_fc1")]
        fc1_weight = weight * (2 if m.gated_linear_unit else 1)
        column_backward(s, x, m, "fc1", fc1_weight, fused_wgrad, "fc1_grad", "residual")
        if out_of_place:
            s.alloc("^grad_sum", x.hidden, ACTIVATION_GRADIENTS)
            if keep_grad:
                s.rename("^grad", "^kept_output_grad")
                s.free("fc1_input_grad")
            else:
                s.free("^grad", "fc1_input_grad")
            s.rename("^grad_sum", "^grad")
        else:
            s.free("fc1_input_grad")
        steps.append(s.cut("mlp.fc1"))
        steps.append(GradReady("fc1_norm_weight", None))
        steps.append(GradReady("linear_fc1", None if fused_wgrad else "fc1_wgrad"))
        s.free("fc1_gamma_grad")
        if not fused_wgrad:
            s.free("fc1_wgrad")
        if self.recompute:
            s.free("fc2_output")
        steps.append(s.cut("mlp.end"))
        return steps

    def _activation_backward(self, s: Scribe) -> None:
        x, size = self.x, self.x.ffn
        if self.split_gate:
            s.alloc("a", size, ACTIVATION_GRADIENTS)
            s.alloc("b", size, ACTIVATION_GRADIENTS)
            s.free("fc2_input_grad", "linear_half", "gate_activated")
            s.alloc("c", size, ACTIVATION_GRADIENTS)
            s.free("a", "fc1_output")
            s.alloc("fc1_grad", self.fc1_bytes, ACTIVATION_GRADIENTS)
            s.free("b", "c")
            return
        s.alloc("fc1_grad", self.fc1_bytes, ACTIVATION_GRADIENTS)
        if self.model.add_bias_linear and not self.model.gated_linear_unit and x.ffn_size & (x.ffn_size - 1):
            # Reduction of the bias gradient over tokens, 38/32 of an FP32 copy: seen with f 7168, not with 8192 or
            # 16384 (H200, torch 2.11 inductor); taken for every width that is no power of two.
            s.transient("bias_reduction", x.tokens * x.ffn_size * 4 * 38 // 32, ACTIVATION_GRADIENTS)
        s.free("fc2_input_grad", "fc1_output")
