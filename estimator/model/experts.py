"""Mixture of experts: router, dispatcher, grouped experts and shared experts of one layer.

Read in megatron-core 0.19.2, transformer/moe: moe_layer.py:586-665 (what the frame of ``custom_forward`` holds until it
returns: the permuted and the received tokens), router.py:700-860 and moe_utils.py:1294-1395 (router),
token_dispatcher.py:372-920 (all-to-all) and 1190-1620 (flexible), moe_utils.py:337-615 (permutation without fusion),
experts.py:118-880 (TEGroupedMLP), shared_experts.py; transformer_engine 2.12.0 pytorch/permutation.py:184-470, 701-790
and triton/permutation.py (fused permutation), module/grouped_linear.py:60-530, router.py. Not measured.

Letters: T rows of the hidden states on this rank, E experts, k experts a token, e experts of this rank, R rows that the
experts of this rank receive (k T times EP / EP, times ETP, times the load imbalance), f FFN of an expert / ETP.
"""

from __future__ import annotations

from estimator.components import ACTIVATION_GRADIENTS, EXPERTS, ROUTER, WEIGHT_GRADIENTS
from estimator.job.settings import DTYPE_BYTES, ModelSettings
from estimator.model.products import Norm, Product
from estimator.model.program import GradReady, NeedsMainGrad, Step
from estimator.model.residual import write_add_forward, write_dropout_backward
from estimator.model.shapes import Shapes
from estimator.timeline import SIDE, Scribe

_INDEX = 8
_FP32 = 4


class ExpertLayer:
    """Writes the blocks of one layer's experts, from ``residual`` to ``output``."""

    def __init__(self, model: ModelSettings, shapes: Shapes, modules: tuple[str, ...]) -> None:
        assert model.moe is not None
        self.model, self.x, self.moe = model, shapes, model.moe
        self.recompute_all = "moe" in modules
        self.recompute_activation = "moe_act" in modules
        self.recompute_shared = "shared_experts" in modules and not model.moe.shared_overlap
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
        self.sent_bytes = self.rows * self.width * e
        self.received_bytes = self.received * self.width * e
        self.arrived_bytes = self.received // x.expert_tensor_parallel * self.width * e
        self.fc1_bytes = self.received * self.inner * gates * e
        self.act_bytes = self.received * self.inner * e
        self.fc1_weight = self.width * self.inner * gates * e
        self.fc2_weight = self.width * self.inner * e
        self.probability = DTYPE_BYTES[moe.router_dtype] if moe.dispatcher == "alltoall" else _FP32
        self.table = x.hidden_tokens * moe.num_experts
        """Elements of a [T, E] table."""
        shared = moe.shared_size // x.tensor_parallel
        self.shared_act = x.tokens * shared * e
        gathered = "gathered" if moe.shared_overlap else "column"
        self.shared_fc1 = Product("shared_fc1", "shared_fc1", x.hidden_size, shared * gates, gathered, EXPERTS)
        self.shared_fc2 = Product("shared_fc2", "shared_fc2", shared, x.hidden_size, "row", EXPERTS)
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
        moe, x = self.moe, self.x
        overlap = moe.shared_overlap
        if moe.shared_size and not overlap:
            self._shared_forward(s, keep and not self.recompute_shared)
        self._route(s, keep)
        if moe.latent_size:
            self.latent_down.forward(s, x, self.model, keep)
        if moe.shared_size and overlap:
            self._shared_gather(s)
        self._dispatch(s, keep)
        if moe.shared_size and overlap:
            self._shared_first_half(s, keep)
        self._arrange(s, keep)
        self._experts_forward(s, keep)
        self._combine(s, keep)
        if moe.latent_size:
            s.rename("combined", "latent_up_input")
            self.latent_up.forward(s, x, self.model, keep)
            if not keep:
                s.free("latent_up_input")
            s.rename("latent_up_output", "combined")
        if moe.shared_size and overlap:
            self._shared_second_half(s, keep)
            s.free("shared_output")
            s.rename("combined", "moe_output")
        elif moe.shared_size:
            s.alloc("moe_output", x.hidden, EXPERTS)
            s.free("combined", "shared_output")
        else:
            s.rename("combined", "moe_output")
        s.free(*(name for name in ("sent", "arrived") if name in s.live))
        if not keep:
            self._drop_tables(s)

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
            s.alloc("scores", n * _FP32, ROUTER)
        else:
            self._unfused_topk(s, wide)
        if moe.aux_losses and keep:
            s.alloc("aux_scores", n * _FP32, ROUTER)
            s.transient("aux_map", n, ROUTER)
            if moe.router_fusion:
                s.alloc("aux_intermediate", n * _FP32, ROUTER)
        s.free("logits")
        if not keep:
            s.free("scores")

    def _unfused_topk(self, s: Scribe, wide: int) -> None:
        """Scores in FP32, top-k values and indices, then two scatters into zeros (moe_utils.py:840-895)."""
        n, rows = self.table, self.rows
        s.alloc("scores", n * _FP32, ROUTER)
        s.alloc("top_values", rows * _FP32, ROUTER)
        s.alloc("top_indices", rows * _INDEX, ROUTER)
        s.alloc("zeros", wide, ROUTER)
        s.alloc("probs", wide, ROUTER)
        s.free("zeros")
        s.alloc("zeros", n * 4, ROUTER)
        s.alloc("counts", n * 4, ROUTER)
        s.alloc("routing_map", n, ROUTER)
        s.free("zeros", "counts", "top_values", "top_indices")

    # -- dispatch -------------------------------------------------------------------------------------------------
    def _dispatch(self, s: Scribe, keep: bool) -> None:
        """Leaves ``sent`` (permuted for the other ranks), ``arrived`` where ranks exchange tokens, and the maps.

        ``sent`` and ``arrived`` stay referenced until the layer's forward returns.
        """
        moe, x = self.moe, self.x
        if moe.dispatcher == "alltoall":
            self._permutation_map(s, x.hidden_tokens, moe.num_experts, self.rows)
            s.alloc("sent", self.sent_bytes, EXPERTS)
            s.alloc("sent_probs", self.rows * self.probability, ROUTER)
            if x.expert_parallel > 1:
                s.alloc("arrived", self.arrived_bytes, EXPERTS)
                s.alloc(
                    "arrived_probs", self.arrived_bytes // (self.width * x.element_bytes) * self.probability, ROUTER
                )

    def _permutation_map(self, s: Scribe, tokens: int, experts: int, rows: int) -> None:
        """Fused: int32 [tokens, 2 experts + 1]. Else a sort of the transposed map, whose indices the probabilities'
        backward keeps, and the rows' token numbers."""
        if self.moe.permute_fusion:
            s.alloc("row_map", tokens * (2 * experts + 1) * 4, ROUTER)
            return
        s.alloc("map_transposed", tokens * experts, ROUTER)
        s.alloc("sorted_map", tokens * experts, ROUTER)
        s.alloc("row_map", tokens * experts * _INDEX, ROUTER)
        s.free("sorted_map", "map_transposed")
        s.alloc("row_tokens", rows * _INDEX, ROUTER)

    def _arrange(self, s: Scribe, keep: bool) -> None:
        """Gathers over expert tensor parallelism, sorts by local expert: ``expert_input`` and its probabilities."""
        source = "arrived" if "arrived" in s.live else "sent"
        if self.x.expert_tensor_parallel > 1:
            s.alloc("gathered_rows", self.received_bytes, EXPERTS)
            source = "gathered_rows"
        probs = self.received * self.probability
        if self.local > 1:
            if self.moe.permute_fusion:
                s.alloc("sort_map", self.received * 4, ROUTER)
            s.alloc("expert_input", self.received_bytes, EXPERTS)
            s.alloc("expert_probs", probs, ROUTER)
            if source == "gathered_rows":
                s.free("gathered_rows")
        else:
            s.rename(source, "expert_input")
            s.alloc("expert_probs", probs, ROUTER)
        s.free("sent_probs", *(["arrived_probs"] if "arrived_probs" in s.live else []))

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
        for name in ("expert_gate", "expert_linear", "expert_product"):
            if name in s.live:
                s.free(name)

    def _combine(self, s: Scribe, keep: bool) -> None:
        """Unsorts, reduces over expert tensor parallelism, sends back, unpermutes: ``combined``."""
        x = self.x
        current = "expert_output"
        if self.local > 1:
            if self.moe.permute_fusion:
                s.alloc("unsort_map", self.received * 4, ROUTER)
            s.alloc("unsorted", self.received_bytes, EXPERTS)
            current = "unsorted"
        if x.expert_tensor_parallel > 1:
            s.alloc("reduced", self.arrived_bytes, EXPERTS)
            if current == "unsorted":
                s.free("unsorted")
            current = "reduced"
        if current != "expert_output":
            s.free("expert_output")
        if x.expert_parallel > 1:
            s.alloc("returned", self.sent_bytes, EXPERTS)
            s.free(current)
            current = "returned"
        width = self.width * x.element_bytes
        s.alloc("combined", x.hidden_tokens * width, EXPERTS)
        s.free(current)

    def _drop_tables(self, s: Scribe) -> None:
        for name in ("probs", "routing_map", "row_map", "row_tokens", "sort_map", "unsort_map"):
            if name in s.live:
                s.free(name)
        if "latent_down_output" in s.live:
            s.free("latent_down_output")

    # -- shared experts -------------------------------------------------------------------------------------------
    def _shared_forward(self, s: Scribe, keep: bool) -> None:
        self.shared_fc1.forward(s, self.x, self.model, keep)
        self._shared_activation(s, keep)
        self.shared_fc2.forward(s, self.x, self.model, keep)
        if not keep:
            s.free("shared_activation")
        self._shared_gate(s, keep)

    def _shared_activation(self, s: Scribe, keep: bool) -> None:
        if self.split_gate:
            s.alloc("shared_gate_part", self.shared_act, EXPERTS)
            s.alloc("shared_linear_part", self.shared_act, EXPERTS)
        s.alloc("shared_activation", self.shared_act, EXPERTS)
        if not keep:
            s.free("shared_fc1_output")
            self._drop_shared_factors(s)

    def _drop_shared_factors(self, s: Scribe) -> None:
        if self.split_gate:
            s.free("shared_gate_part", "shared_linear_part")

    def _shared_gate(self, s: Scribe, keep: bool) -> None:
        if not self.moe.shared_gate:
            s.rename("shared_fc2_output", "shared_output")
            return
        s.alloc("shared_score", self.x.hidden_tokens * self.x.element_bytes, EXPERTS)
        s.alloc("shared_output", self.x.hidden, EXPERTS)
        if not keep:
            s.free("shared_fc2_output", "shared_score")

    def _shared_gather(self, s: Scribe) -> None:
        """Overlapped: the gather is the layer's own, and the first product saves its result."""
        if self.x.sequence_parallel:
            s.alloc("shared_gathered", self.x.gathered_hidden, EXPERTS, SIDE)

    def _shared_first_half(self, s: Scribe, keep: bool) -> None:
        s.alloc("shared_fc1_output", self.shared_fc1.output_bytes(self.x), EXPERTS, SIDE)
        self._shared_activation(s, keep)
        if not keep and self.x.sequence_parallel:
            s.free("shared_gathered")

    def _shared_second_half(self, s: Scribe, keep: bool) -> None:
        self.shared_fc2.forward(s, self.x, self.model, keep)
        if not keep:
            s.free("shared_activation")
        self._shared_gate(s, keep)

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
        if self.moe.shared_size:
            steps += self._shared_backward(s, fused_wgrad)
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
        x, steps = self.x, list[Step]()
        s.alloc("rows_grad", self.sent_bytes, ACTIVATION_GRADIENTS)
        if self.moe.latent_size:
            s.free("combined_grad")
        self._move(s, x.expert_parallel > 1, "rows_grad", self.arrived_bytes)
        self._move(s, x.expert_tensor_parallel > 1, "rows_grad", self.received_bytes)
        self._move(s, self.local > 1, "rows_grad", self.received_bytes)
        if self.recompute_activation:
            self._activation(s, keep=True)
        steps += self._grouped(s, fused_wgrad, "expert_fc2", "activation_grad", self.act_bytes, self.fc2_weight)
        s.free("rows_grad", "expert_activation")
        self._activation_backward(s)
        steps += self._grouped(s, fused_wgrad, "expert_fc1", "rows_grad", self.received_bytes, self.fc1_weight)
        s.free("fc1_grad", "expert_input", "expert_probs")
        self._move(s, self.local > 1, "rows_grad", self.received_bytes)
        self._move(s, x.expert_tensor_parallel > 1, "rows_grad", self.arrived_bytes)
        self._move(s, x.expert_parallel > 1, "rows_grad", self.sent_bytes)
        width = self.width * x.element_bytes
        s.alloc("tokens_grad", x.hidden_tokens * width, ACTIVATION_GRADIENTS)
        s.alloc("probs_grad", self.table * DTYPE_BYTES[self.moe.router_dtype], ROUTER)
        s.free("rows_grad", "probs_rows_grad")
        return steps

    @staticmethod
    def _move(s: Scribe, happens: bool, name: str, num_bytes: int) -> None:
        """A copy to other rows or ranks, then the source goes."""
        if happens:
            s.alloc(f"{name}_moved", num_bytes, ACTIVATION_GRADIENTS)
            s.free(name)
            s.rename(f"{name}_moved", name)

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
        for name in ("aux_scores", "aux_intermediate"):
            if name in s.live:
                s.free(name)
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

    def _shared_backward(self, s: Scribe, fused_wgrad: bool) -> list[Step]:
        x, m, moe = self.x, self.model, self.moe
        steps: list[Step] = []
        if self.recompute_shared:
            self._shared_forward(s, keep=True)
        grad = None
        if moe.shared_gate:
            s.alloc("shared_fc2_grad", x.hidden, ACTIVATION_GRADIENTS)
            s.alloc("score_grad", x.hidden, ACTIVATION_GRADIENTS)
            s.free("shared_fc2_output", "shared_score", "score_grad")
            grad = "shared_fc2_grad"
        steps += self.shared_fc2.backward(s, x, m, fused_wgrad, grad, "shared_activation")
        s.alloc("shared_fc1_grad", self.shared_fc1.output_bytes(x), ACTIVATION_GRADIENTS)
        s.free("shared_fc2_input_grad", "shared_fc1_output")
        self._drop_shared_factors(s)
        saved = "shared_gathered" if "shared_gathered" in s.live else None
        steps += self.shared_fc1.backward(s, x, m, fused_wgrad, "shared_fc1_grad", saved)
        if saved:
            s.transient("shared_scattered_grad", x.hidden, ACTIVATION_GRADIENTS)
        s.free("shared_fc1_input_grad")
        if moe.shared_gate:
            s.alloc("gate_grad", x.hidden_size * x.element_bytes, WEIGHT_GRADIENTS)
            steps += [s.cut("moe.shared_gate"), GradReady("shared_gate", "gate_grad")]
            s.free("gate_grad")
        if self.recompute_shared:
            s.free("shared_output")
        return steps
