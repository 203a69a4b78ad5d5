"""Mixture of experts: router and grouped experts of one layer, around a dispatcher.

Read in megatron-core 0.19.2, transformer/moe: moe_layer.py:586-665 (what the frame of ``custom_forward`` holds until it
returns: the permuted and the received tokens), router.py:700-860 and moe_utils.py:1294-1395 (router),
experts.py:118-880 (TEGroupedMLP); transformer_engine 2.12.0 pytorch/module/grouped_linear.py:60-530, router.py. Not
measured alone; whole steps are held against real runs (tests/estimator/test_real_expert_runs.py).

Letters: T rows of the hidden states on this rank, E experts, k experts a token, e experts of this rank, R rows that the
experts of this rank receive (k T times EP / EP, times ETP, times the load imbalance), f FFN of an expert / ETP.
"""

from __future__ import annotations

from estimator.components import ACTIVATION_GRADIENTS, EXPERTS, ROUTER, WEIGHT_GRADIENTS
from estimator.job.settings import DTYPE_BYTES, ModelSettings
from estimator.model.dispatchers import DISPATCHERS, FP32, INDEX, free_live
from estimator.model.products import Norm, Product
from estimator.model.program import GradReady, NeedsMainGrad, Step
from estimator.model.residual import write_add_forward, write_dropout_backward
from estimator.model.shapes import Shapes
from estimator.model.shared_experts import SharedExperts
from estimator.timeline import Scribe


class ExpertLayer:
    """Writes the blocks of one layer's experts, from ``residual`` to ``output``."""

    def __init__(self, model: ModelSettings, shapes: Shapes, modules: tuple[str, ...]) -> None:
        assert model.moe is not None
        self.model, self.x, self.moe = model, shapes, model.moe
        self.recompute_all = "moe" in modules
        self.recompute_activation = "moe_act" in modules
        self.recompute_norm = "layernorm" in modules
        self.norm = Norm("pre_mlp", "pre_mlp_norm_weight")
        moe, x, e = model.moe, shapes, shapes.element_bytes
        self.local = moe.num_experts // x.expert_parallel
        self.rows = x.hidden_tokens * moe.topk
        """Rows that this rank sends: k T."""
        self.received = x.expert_rows
        self.width = moe.latent_size or x.hidden_size
        self.inner = moe.ffn_hidden_size // x.expert_tensor_parallel
        gates = 2 if model.gated_linear_unit else 1
        self.split_gate = model.gated_linear_unit and not model.bias_activation_fusion
        self.received_bytes = self.received * self.width * e
        self.fc1_bytes = self.received * self.inner * gates * e
        self.act_bytes = self.received * self.inner * e
        self.fc1_weight = self.width * self.inner * gates * e
        self.fc2_weight = self.width * self.inner * e
        self.dispatcher = DISPATCHERS[moe.dispatcher](model, shapes)
        self.probability = self.dispatcher.probability
        self.table = x.hidden_tokens * moe.num_experts
        """Elements of a [T, E] table."""
        recompute_shared = "shared_experts" in modules and not moe.shared_overlap
        self.shared = SharedExperts(model, shapes, recompute_shared) if moe.shared_size else None
        hidden, latent = x.hidden_size, moe.latent_size or 0
        self.latent_down = Product("latent_down", "fc1_latent_proj", hidden, latent, "duplicated", EXPERTS)
        self.latent_up = Product("latent_up", "fc2_latent_proj", latent, hidden, "duplicated", EXPERTS)

    # -- forward --------------------------------------------------------------------------------------------------
    def forward(self, s: Scribe, keep: bool) -> None:
        x, m = self.x, self.model
        self.norm.forward(s, x, m)
        self._inner_forward(s, keep and not self.recompute_all)
        if not keep or self.recompute_norm:
            self.norm.discard(s, m)
        write_add_forward(s, x, m, "moe_output", "output", "mlp_dropout_mask", keep)
        if not keep:
            s.free("residual")

    def _inner_forward(self, s: Scribe, keep: bool) -> None:
        moe, x, shared = self.moe, self.x, self.shared
        overlap = moe.shared_overlap
        if shared and not overlap:
            shared.forward(s, keep and not shared.recompute)
        self._route(s, keep)
        if moe.latent_size:
            self.latent_down.forward(s, x, self.model, keep)
        if shared and overlap:
            shared.gather(s)
        self.dispatcher.forward(s)
        if shared and overlap:
            shared.first_half(s, keep)
        self._experts_forward(s, keep)
        self.dispatcher.combine(s)
        if moe.latent_size:
            s.rename("combined", "latent_up_input")
            self.latent_up.forward(s, x, self.model, keep)
            if not keep:
                s.free("latent_up_input")
            s.rename("latent_up_output", "combined")
        if shared and overlap:
            shared.second_half(s, keep)
            s.free("shared_output")
            s.rename("combined", "moe_output")
        elif shared:
            s.alloc("moe_output", x.hidden, EXPERTS)
            s.free("combined", "shared_output")
        else:
            s.rename("combined", "moe_output")
        free_live(s, *self.dispatcher.held)
        if not keep:
            self._drop_tables(s)

    def _drop_tables(self, s: Scribe) -> None:
        self.dispatcher.drop(s)
        free_live(s, "latent_down_output")

    # -- router ---------------------------------------------------------------------------------------------------
    def _route(self, s: Scribe, keep: bool) -> None:
        """Logits, probabilities [T, E] and a map [T, E] of one byte. What backward reads of it stays."""
        moe, n, wide = self.moe, self.table, self.table * DTYPE_BYTES[self.moe.router_dtype]
        s.alloc("logits", wide, ROUTER)
        if moe.force_load_balancing:
            s.alloc("random_logits", wide, ROUTER)
            s.free("logits")
            s.rename("random_logits", "logits")
        if moe.router_fusion:
            s.alloc("probs", wide, ROUTER)
            s.alloc("routing_map", n, ROUTER)
            s.alloc("scores", n * FP32, ROUTER)
        else:
            self._unfused_topk(s, wide)
        if moe.aux_losses and keep:
            s.alloc("aux_scores", n * FP32, ROUTER)
            s.transient("aux_map", n, ROUTER)
            if moe.router_fusion:
                s.alloc("aux_intermediate", n * FP32, ROUTER)
        s.free("logits")
        if not keep:
            s.free("scores")

    def _unfused_topk(self, s: Scribe, wide: int) -> None:
        """Scores in FP32, top-k values and indices, then two scatters into zeros (moe_utils.py:840-895)."""
        n, rows = self.table, self.rows
        s.alloc("scores", n * FP32, ROUTER)
        s.alloc("top_values", rows * FP32, ROUTER)
        s.alloc("top_indices", rows * INDEX, ROUTER)
        s.alloc("zeros", wide, ROUTER)
        s.alloc("probs", wide, ROUTER)
        s.free("zeros")
        s.alloc("zeros", n * 4, ROUTER)
        s.alloc("counts", n * 4, ROUTER)
        s.alloc("routing_map", n, ROUTER)
        s.free("zeros", "counts", "top_values", "top_indices")

    # -- experts --------------------------------------------------------------------------------------------------
    def _experts_forward(self, s: Scribe, keep: bool) -> None:
        s.alloc("expert_fc1_output", self.fc1_bytes, EXPERTS)
        self._activation(s, keep and not self.recompute_activation)
        s.alloc("expert_output", self.received_bytes, EXPERTS)
        if not keep or self.recompute_activation:
            s.free("expert_activation")
        if not keep:
            s.free("expert_fc1_output", "expert_input", "expert_probs")

    def _activation(self, s: Scribe, keep: bool) -> None:
        """Activation times probability. Fused it is one kernel; else its factors are kept, and FP32 probabilities make
        an FP32 product for a moment (experts.py:770-840)."""
        if not self.split_gate and self.model.gated_linear_unit:
            s.alloc("expert_activation", self.act_bytes, EXPERTS)
            return
        wide = self.act_bytes // self.x.element_bytes * self.probability
        s.alloc("expert_gate", self.act_bytes, EXPERTS)
        if self.split_gate:
            s.alloc("expert_linear", self.act_bytes, EXPERTS)
            s.alloc("expert_product", self.act_bytes, EXPERTS)
        if self.probability > self.x.element_bytes:
            s.alloc("weighted", wide, EXPERTS)
            s.alloc("expert_activation", self.act_bytes, EXPERTS)
            s.free("weighted")
        else:
            s.alloc("expert_activation", self.act_bytes, EXPERTS)
        if not keep:
            self._drop_factors(s)

    def _drop_factors(self, s: Scribe) -> None:
        free_live(s, "expert_gate", "expert_linear", "expert_product")

    # -- backward -------------------------------------------------------------------------------------------------
    def backward(self, s: Scribe, fused_wgrad: bool, out_of_place: bool, keep_grad: bool = False) -> list[Step]:
        """From ``^grad`` (gradient of this layer's output) to the gradient of the residual stream before the experts.

        ``out_of_place`` and ``keep_grad``: as for the dense MLP.
        """
        x, m = self.x, self.model
        steps: list[Step] = []
        if self.recompute_norm:
            self.norm.forward(s, x, m)
        dropped = write_dropout_backward(s, x, m, "mlp_dropout_mask")
        if self.recompute_all:
            self._inner_forward(s, keep=True)
        steps.append(s.cut("moe.before"))
        if self.moe.latent_size:
            steps += self.latent_up.backward(s, x, m, fused_wgrad, None, "latent_up_input")
            s.rename("latent_up_input_grad", "combined_grad")
        steps += self._experts_backward(s, fused_wgrad)
        if self.moe.latent_size:
            steps += self.latent_down.backward(s, x, m, fused_wgrad, "tokens_grad", "latent_down_output")
            s.rename("latent_down_input_grad", "tokens_grad")
        steps += self._router_backward(s)
        if self.shared:
            steps += self.shared.backward(s, fused_wgrad)
        if dropped:
            s.free(dropped)
        self.norm.backward(s, x, m, "tokens_grad")
        s.free(self.norm.output, "residual")
        self._add_skip(s, out_of_place, keep_grad)
        if self.recompute_all:
            s.free("moe_output")
        steps += self.norm.ready(s)
        steps.append(s.cut("moe.end"))
        return steps

    def _add_skip(self, s: Scribe, out_of_place: bool, keep_grad: bool) -> None:
        if not out_of_place:
            s.free("pre_mlp_input_grad")
            return
        s.alloc("^grad_sum", self.x.hidden, ACTIVATION_GRADIENTS)
        if keep_grad:
            s.rename("^grad", "^kept_output_grad")
            s.free("pre_mlp_input_grad")
        else:
            s.free("^grad", "pre_mlp_input_grad")
        s.rename("^grad_sum", "^grad")

    def _experts_backward(self, s: Scribe, fused_wgrad: bool) -> list[Step]:
        steps: list[Step] = []
        self.dispatcher.backward_combine(s)
        if self.recompute_activation:
            self._activation(s, keep=True)
        steps += self._grouped(s, fused_wgrad, "expert_fc2", "activation_grad", self.act_bytes, self.fc2_weight)
        s.free("rows_grad", "expert_activation")
        self._activation_backward(s)
        steps += self._grouped(s, fused_wgrad, "expert_fc1", "rows_grad", self.received_bytes, self.fc1_weight)
        s.free("fc1_grad", "expert_input", "expert_probs")
        self.dispatcher.backward_dispatch(s)
        return steps

    def _grouped(
        self, s: Scribe, fused_wgrad: bool, name: str, result: str, num_bytes: int, weight_bytes: int
    ) -> list[Step]:
        """A grouped product's backward: gradient of its input, and of each expert's weight."""
        steps: list[Step] = []
        if fused_wgrad:
            steps += [s.cut(f"{name}.before"), *(NeedsMainGrad(f"{name}_{i}") for i in range(self.local))]
        s.alloc(result, num_bytes, ACTIVATION_GRADIENTS)
        if not fused_wgrad:
            for i in range(self.local):
                s.alloc(f"{name}_wgrad{i}", weight_bytes, WEIGHT_GRADIENTS)
        steps.append(s.cut(f"{name}.backward"))
        for i in range(self.local):
            steps.append(GradReady(f"{name}_{i}", None if fused_wgrad else f"{name}_wgrad{i}"))
            if not fused_wgrad:
                s.free(f"{name}_wgrad{i}")
        return steps

    def _activation_backward(self, s: Scribe) -> None:
        s.alloc("fc1_grad", self.fc1_bytes, ACTIVATION_GRADIENTS)
        s.alloc("probs_rows_grad", self.received * self.probability, ROUTER)
        if self.split_gate or not self.model.gated_linear_unit:
            if self.probability > self.x.element_bytes:
                s.transient("weighted_grad", 2 * self.act_bytes, ACTIVATION_GRADIENTS)
            for name in ("a", "b"):
                s.alloc(name, self.act_bytes, ACTIVATION_GRADIENTS)
            s.free("a", "b")
            self._drop_factors(s)
        s.free("activation_grad", "expert_fc1_output")

    def _router_backward(self, s: Scribe) -> list[Step]:
        """Through top-k to the logits, then the gate: with an FP32 router the hidden states are cast for the weight's
        gradient, and their gradient is cast back (moe_utils.py:1346-1370)."""
        x, moe = self.x, self.moe
        size = DTYPE_BYTES[moe.router_dtype]
        s.alloc("logits_grad", self.table * size, ROUTER)
        s.free("probs_grad", "scores")
        self._drop_tables(s)
        free_live(s, "aux_scores", "aux_intermediate")
        elements = x.hidden_tokens * x.hidden_size
        weight = moe.num_experts * x.hidden_size
        if size != x.element_bytes:
            s.alloc("gate_input_wide", elements * size, ROUTER)
            s.alloc("tokens_wide", elements * size, ROUTER)
            s.alloc("weight_wide", weight * size, ROUTER)
            s.free("tokens_wide")
            s.alloc("gate_input_grad", x.hidden, ACTIVATION_GRADIENTS)
            s.free("gate_input_wide")
            s.alloc("router_grad", weight * x.element_bytes, WEIGHT_GRADIENTS)
            s.free("weight_wide")
        else:
            s.alloc("gate_input_grad", x.hidden, ACTIVATION_GRADIENTS)
            s.alloc("router_grad", weight * x.element_bytes, WEIGHT_GRADIENTS)
        s.free("logits_grad", "gate_input_grad")
        steps: list[Step] = [s.cut("moe.router"), GradReady("router", "router_grad")]
        s.free("router_grad")
        return steps
