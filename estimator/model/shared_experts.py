"""Shared experts: a dense MLP beside the routed ones, before the router or overlapped with the dispatcher.

Read in megatron-core 0.19.2 transformer/moe/shared_experts.py:40-330, moe_layer.py:440-470. Overlapped, the layer
gathers a sequence-parallel input itself and the first product saves what was gathered. Not measured.
"""

from __future__ import annotations

from estimator.components import ACTIVATION_GRADIENTS, EXPERTS, WEIGHT_GRADIENTS
from estimator.job.settings import ModelSettings
from estimator.model.products import Product
from estimator.model.program import GradReady, Step
from estimator.model.shapes import Shapes
from estimator.timeline import SIDE, Scribe


class SharedExperts:
    """Leaves ``shared_output`` [T, h]."""

    def __init__(self, model: ModelSettings, x: Shapes, recompute: bool) -> None:
        assert model.moe is not None
        self.model, self.x, self.moe, self.recompute = model, x, model.moe, recompute
        size = model.moe.shared_size // x.tensor_parallel
        gates = 2 if model.gated_linear_unit else 1
        self.act_bytes = x.tokens * size * x.element_bytes
        self.split_gate = model.gated_linear_unit and not model.bias_activation_fusion
        mode = "gathered" if model.moe.shared_overlap else "column"
        self.fc1 = Product("shared_fc1", "shared_fc1", x.hidden_size, size * gates, mode, EXPERTS)
        self.fc2 = Product("shared_fc2", "shared_fc2", size, x.hidden_size, "row", EXPERTS)

    def forward(self, s: Scribe, keep: bool) -> None:
        """All of it, before the router."""
        self.fc1.forward(s, self.x, self.model, keep)
        self._activation(s, keep)
        self.second_half(s, keep)

    def gather(self, s: Scribe) -> None:
        """Overlapped: before tokens are sent."""
        if self.x.sequence_parallel:
            s.alloc("shared_gathered", self.x.gathered_hidden, EXPERTS, SIDE)

    def first_half(self, s: Scribe, keep: bool) -> None:
        """Overlapped: while tokens are on their way."""
        s.alloc("shared_fc1_output", self.fc1.output_bytes(self.x), EXPERTS, SIDE)
        self._activation(s, keep)
        if not keep and self.x.sequence_parallel:
            s.free("shared_gathered")

    def second_half(self, s: Scribe, keep: bool) -> None:
        self.fc2.forward(s, self.x, self.model, keep)
        if not keep:
            s.free("shared_activation")
        if not self.moe.shared_gate:
            s.rename("shared_fc2_output", "shared_output")
            return
        s.alloc("shared_score", self.x.hidden_tokens * self.x.element_bytes, EXPERTS)
        s.alloc("shared_output", self.x.hidden, EXPERTS)
        if not keep:
            s.free("shared_fc2_output", "shared_score")

    def _activation(self, s: Scribe, keep: bool) -> None:
        if self.split_gate:
            s.alloc("shared_gate_part", self.act_bytes, EXPERTS)
            s.alloc("shared_linear_part", self.act_bytes, EXPERTS)
        s.alloc("shared_activation", self.act_bytes, EXPERTS)
        if not keep:
            s.free("shared_fc1_output")
            self._drop_factors(s)

    def _drop_factors(self, s: Scribe) -> None:
        if self.split_gate:
            s.free("shared_gate_part", "shared_linear_part")

    def backward(self, s: Scribe, fused_wgrad: bool) -> list[Step]:
        """From the stream's gradient; its own is added to that of the tokens in place."""
        x, m, moe = self.x, self.model, self.moe
        steps: list[Step] = []
        if self.recompute:
            self.forward(s, keep=True)
        grad = None
        if moe.shared_gate:
            s.alloc("shared_fc2_grad", x.hidden, ACTIVATION_GRADIENTS)
            s.alloc("score_grad", x.hidden, ACTIVATION_GRADIENTS)
            s.free("shared_fc2_output", "shared_score", "score_grad")
            grad = "shared_fc2_grad"
        steps += self.fc2.backward(s, x, m, fused_wgrad, grad, "shared_activation")
        s.alloc("shared_fc1_grad", self.fc1.output_bytes(x), ACTIVATION_GRADIENTS)
        s.free("shared_fc2_input_grad", "shared_fc1_output")
        self._drop_factors(s)
        saved = "shared_gathered" if "shared_gathered" in s.live else None
        steps += self.fc1.backward(s, x, m, fused_wgrad, "shared_fc1_grad", saved)
        if saved:
            s.transient("shared_scattered_grad", x.hidden, ACTIVATION_GRADIENTS)
        s.free("shared_fc1_input_grad")
        if moe.shared_gate:
            s.alloc("gate_grad", x.hidden_size * x.element_bytes, WEIGHT_GRADIENTS)
            steps += [s.cut("moe.shared_gate"), GradReady("shared_gate", "gate_grad")]
            s.free("gate_grad")
        if self.recompute:
            s.free("shared_output")
        return steps
