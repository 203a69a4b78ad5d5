"""Self-attention with grouped queries on Transformer Engine: fused attention, rotary embedding fused or not.

Sequence of allocations as torch's memory history shows it on an H200 (megatron-core 0.19.2, Transformer Engine 2.12.0,
torch 2.11), explained by transformer/attention.py, models/common/embeddings/rope_utils.py and
transformer_engine/pytorch/{module/layernorm_linear,module/linear,attention}: the QKV projection's output is copied
into a
contiguous query, rotary embedding makes new queries and keys, values are copied contiguous; the projection's output,
the
copied query and QKV are freed when forward of attention returns.
"""

from __future__ import annotations

from estimator.components import ACTIVATION_GRADIENTS, ATTENTION, NORMS
from estimator.job.settings import ModelSettings
from estimator.model.linear import column_backward, norm_and_column_forward, row_backward_input, row_forward
from estimator.model.norms import backward_workspace
from estimator.model.program import GradReady, NeedsMainGrad, Step
from estimator.model.residual import write_add_forward, write_dropout_backward
from estimator.model.shapes import Shapes
from estimator.timeline import Scribe


def softmax_statistics(x: Shapes) -> int:
    """FP32 log-sum-exp of cuDNN's fused attention, [b, a/t, s/c]."""
    return x.tokens * x.num_heads * 4


def fused_backward_workspace(x: Shapes) -> int:
    """Workspace of cuDNN's fused attention backward.

    FP32 dQ [b, a, s, d] and the row sums [b, a, s]; with grouped queries also dK and dV for every query head in the
    compute dtype. Measured on an H200 with 8 of 16 and 8 of 32 groups, head sizes 128 and 256.
    """
    elements = x.tokens * x.num_heads * x.head_dim
    grouped = 2 * elements * x.element_bytes if x.num_query_groups < x.num_heads else 0
    return elements * 4 + x.tokens * x.num_heads * 4 + grouped


class Attention:
    """Writes the blocks of one layer's self-attention, from ``prev/output`` to ``residual``."""

    def __init__(self, model: ModelSettings, shapes: Shapes, modules: tuple[str, ...] = ()) -> None:
        self.model, self.x = model, shapes
        self.recompute_core = "core_attn" in modules
        self.rotary = model.position_embedding_type in ("rope", "yarn")
        self.ring = shapes.context_parallel > 1
        self.values = "kv" if self.ring else "value"
        self.qkv_bytes = shapes.query * (2 if model.attention_output_gate else 1) + 2 * shapes.key

    def forward(self, s: Scribe, keep: bool) -> None:
        """``keep``: save for backward (False: under activation checkpointing, where nothing is saved)."""
        x, m, recompute_core = self.x, self.model, self.recompute_core
        norm_and_column_forward(s, x, m, "qkv", self.qkv_bytes, ATTENTION, keep)
        s.alloc("query_copy", x.query, ATTENTION)
        query, key = "query_copy", None
        if m.qk_layernorm:
            s.alloc("query_rstd", x.tokens * x.num_heads * 4, NORMS)
            s.alloc("query_normed", x.query, ATTENTION)
            s.alloc("key_copy", x.key, ATTENTION)
            s.alloc("key_rstd", x.tokens * x.num_query_groups * 4, NORMS)
            s.alloc("key_normed", x.key, ATTENTION)
            query, key = "query_normed", "key_normed"
        if self.rotary:
            if m.apply_rope_fusion:
                s.alloc("query_rotated", x.query, ATTENTION)
                s.alloc("key_rotated", x.key, ATTENTION)
            else:
                self._unfused_rotary_forward(s, "query", x.query)
                self._unfused_rotary_forward(s, "key", x.key)
        elif key is None:
            s.alloc("key_rotated", x.key, ATTENTION)
        s.alloc("value", x.key, ATTENTION)
        self._core_forward(s)
        if recompute_core or not keep:
            s.free("softmax_statistics", self.values)
        row_forward(s, x, "proj", ATTENTION, x.query, keep, original=True)
        if keep and recompute_core and x.fp8 == "delayed":
            s.free("attention_output")  # the projection keeps an FP8 copy, the core is computed again
        if m.qk_layernorm:
            if keep:
                s.free("key_normed", "query_normed")
            else:
                s.free("key_normed", "query_normed", "key_copy", "key_rstd", "query_rstd", "query_copy")
        elif self.rotary or not keep:
            s.free(query)
        if self.ring and "key_rotated" in s.live:
            s.free("key_rotated")
        if not recompute_core or not keep:
            s.free("qkv_output")
        if not keep:
            self._free_unkept(s)
        write_add_forward(s, x, m, "proj_output", "residual", "attention_dropout_mask", keep)

    def _core_forward(self, s: Scribe) -> None:
        """Fused attention; with context parallelism its ring, as cp rank 0 sees it: keys and values received and sent
        on, one output a step (the own block whole, the others half), then their sum."""
        x = self.x
        if self.ring:
            s.alloc("kv_received", 2 * x.key, ATTENTION)
            s.alloc("kv", 2 * x.key, ATTENTION)
            for i in range(x.context_parallel):
                s.alloc(f"step_output{i}", x.query if i == 0 else x.query // 2, ATTENTION)
                s.alloc(f"step_statistics{i}", softmax_statistics(x) // (1 if i == 0 else 2), ATTENTION)
        s.alloc("attention_output", x.query, ATTENTION)
        s.alloc("softmax_statistics", softmax_statistics(x), ATTENTION)
        if self.ring:
            for i in range(x.context_parallel):
                s.free(f"step_output{i}", f"step_statistics{i}")
            s.free("kv_received", "value")

    def _free_unkept(self, s: Scribe) -> None:
        for name in (
            "query_rotated",
            "key_rotated",
            "query_cos",
            "query_sin",
            "key_cos",
            "key_sin",
            "kv",
            "attention_output",
        ):
            if name in s.live:
                s.free(name)

    def _unfused_rotary_forward(self, s: Scribe, name: str, size: int) -> None:
        """cos and sin in the compute dtype are saved; products and the rotated half are temporaries."""
        table = self.x.sequence * self.x.rotary_dim * self.x.element_bytes
        for function in ("cos", "sin"):
            s.alloc(f"{name}_{function}_a", 2 * table, ATTENTION)
            s.alloc(f"{name}_{function}_b", 2 * table, ATTENTION)
            s.free(f"{name}_{function}_a")
            s.alloc(f"{name}_{function}", table, ATTENTION)
            s.free(f"{name}_{function}_b")
        s.alloc(f"{name}_t1", size, ATTENTION)
        s.alloc(f"{name}_half", size // 2, ATTENTION)
        s.alloc(f"{name}_turned", size, ATTENTION)
        s.free(f"{name}_half")
        s.alloc(f"{name}_t2", size, ATTENTION)
        s.free(f"{name}_turned")
        s.alloc(f"{name}_t3", size, ATTENTION)
        s.free(f"{name}_t2", f"{name}_t1")
        s.alloc(f"{name}_rotated", size, ATTENTION)
        s.free(f"{name}_t3")

    def _recompute_core(self, s: Scribe) -> None:
        s.alloc(self.values, (2 if self.ring else 1) * self.x.key, ATTENTION)
        s.alloc("attention_output_again", self.x.query, ATTENTION)
        s.alloc("softmax_statistics", softmax_statistics(self.x), ATTENTION)

    def backward(self, s: Scribe, fused_wgrad: bool, keep_input: bool = False) -> list[Step]:
        """From the gradient of the residual stream to the gradient of this layer's input, added to it in place."""
        x, m, recompute_core = self.x, self.model, self.recompute_core
        steps: list[Step] = []
        dropped = write_dropout_backward(s, x, m, "attention_dropout_mask")
        if fused_wgrad:
            steps += [s.cut("attention.dropout"), NeedsMainGrad("linear_proj")]
        row_backward_input(s, x, "proj", x.query, self._proj_weight, fused_wgrad, dropped, original=True)
        steps.append(s.cut("attention.proj"))
        steps.append(GradReady("linear_proj", None if fused_wgrad else "proj_wgrad"))
        if not fused_wgrad:
            s.free("proj_wgrad")
        attention_output = "attention_output"
        if recompute_core:
            if x.fp8 != "delayed":
                s.free("attention_output")
            self._recompute_core(s)
            attention_output = "attention_output_again"
        self._core_backward(s, attention_output)
        if self.rotary:
            self._rotary_backward(s)
        if m.qk_layernorm:
            self._qk_norm_backward(s)
            steps += [
                s.cut("attention.qk"),
                GradReady("q_layernorm_weight", None),
                GradReady("k_layernorm_weight", None),
            ]
        s.alloc("qkv_grad", self.qkv_bytes, ACTIVATION_GRADIENTS)
        for name in ("query", "key", "value"):
            self._free_grad(s, name)
        if recompute_core:
            s.free("qkv_output")
        if fused_wgrad:
            steps += [s.cut("attention.core"), NeedsMainGrad("linear_qkv")]
        column_backward(
            s, x, m, "qkv", self._qkv_weight, fused_wgrad, "qkv_grad", None if keep_input else "prev/output"
        )
        if keep_input:
            s.rename("prev/output", "^kept_input")
        s.free("qkv_input_grad")
        steps.append(s.cut("attention.qkv"))
        steps.append(GradReady("qkv_norm_weight", None))
        steps.append(GradReady("linear_qkv", None if fused_wgrad else "qkv_wgrad"))
        s.free("qkv_gamma_grad")
        if not fused_wgrad:
            s.free("qkv_wgrad")
        steps.append(s.cut("attention.end"))
        return steps

    @property
    def _proj_weight(self) -> int:
        return self.x.hidden_size * self.x.num_heads * self.x.head_dim * self.x.element_bytes

    @property
    def _qkv_weight(self) -> int:
        return self.qkv_bytes // (self.x.tokens or 1) * self.x.hidden_size

    def _core_backward(self, s: Scribe, attention_output: str) -> None:
        x = self.x
        s.alloc("query_grad", x.query, ACTIVATION_GRADIENTS)
        if self.ring:
            s.alloc("half_statistics", softmax_statistics(x) // 2, ACTIVATION_GRADIENTS)
            s.alloc("value_grad", 4 * x.key, ACTIVATION_GRADIENTS)
            s.alloc("kv_grad_received", 4 * x.key, ACTIVATION_GRADIENTS)
            s.alloc("step_grad", x.query + 2 * x.key, ACTIVATION_GRADIENTS)
        else:
            s.alloc("key_grad", x.key, ACTIVATION_GRADIENTS)
            s.alloc("value_grad", x.key, ACTIVATION_GRADIENTS)
        s.transient("attention_workspace", fused_backward_workspace(x), ATTENTION)
        if self.ring:
            s.free("step_grad", "half_statistics", "kv_grad_received")
        s.free("proj_input_grad")
        if self.rotary:
            s.free("query_rotated")
        elif not self.model.qk_layernorm:
            s.free("query_copy")
        if not self.ring and (self.rotary or not self.model.qk_layernorm):
            s.free("key_rotated")
        s.free(self.values, attention_output, "softmax_statistics")

    def _rotary_backward(self, s: Scribe) -> None:
        for name, size in (("key", self.x.key), ("query", self.x.query)):
            if self.model.apply_rope_fusion:
                s.alloc(f"{name}_unrotated_grad", size, ACTIVATION_GRADIENTS)
                self._free_grad(s, name)
            else:
                s.alloc("a", size, ACTIVATION_GRADIENTS)
                s.free(f"{name}_sin")
                s.alloc("half", size // 2, ACTIVATION_GRADIENTS)
                s.alloc("b", size, ACTIVATION_GRADIENTS)
                s.free("a", "half")
                s.alloc("c", size, ACTIVATION_GRADIENTS)
                s.free(f"{name}_cos", "b")
                s.alloc(f"{name}_unrotated_grad", size, ACTIVATION_GRADIENTS)
                s.free("c")
                self._free_grad(s, name)
        for name in ("key", "query"):
            s.rename(f"{name}_unrotated_grad", f"{name}_grad")

    @staticmethod
    def _free_grad(s: Scribe, name: str) -> None:
        """With the ring, the gradient of the keys lies in one buffer with that of the values."""
        if f"{name}_grad" in s.live:
            s.free(f"{name}_grad")

    def _qk_norm_backward(self, s: Scribe) -> None:
        x = self.x
        workspace = backward_workspace(x.head_dim, self.model.normalization)
        for name, size in (("key", x.key), ("query", x.query)):
            s.alloc(f"{name}_norm_grad", size, ACTIVATION_GRADIENTS)
            s.transient(f"{name}_norm_workspace", workspace, NORMS)
            s.free(f"{name}_rstd")
            self._free_grad(s, name)
            s.free(f"{name}_copy")
            s.rename(f"{name}_norm_grad", f"{name}_grad")
