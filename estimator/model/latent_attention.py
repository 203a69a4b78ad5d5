"""Multi-latent attention on Transformer Engine: queries and keys through narrow latents, heads of two parts.

Read in megatron-core 0.19.2: transformer/multi_latent_attention.py:620-720 (down projections), :846-990 (up
projections, rotary embedding, three contiguous tensors), :300-470 (core attention, projection),
transformer/mla_qk_norm_config.py (with ``qk_layernorm`` the latents' norms are part of the up projections, or of the
query projection where there is no query latent), fusions/fused_mla_yarn_rope_apply.py:205-300 and 581-730 (fused:
queries in place, new keys and values; only tables are saved), tensor_parallel/random.py:678-880 (recompute of
``mla_up_proj``). Not measured
alone; whole steps are held against real runs (tests/estimator/test_real_expert_runs.py).

Letters: a heads of this rank, d the query head's width (both parts), v the value head's, r rotary part, s/c b tokens.
"""

from __future__ import annotations

from estimator.components import ACTIVATION_GRADIENTS, ATTENTION
from estimator.job.settings import ModelSettings
from estimator.model.attention import softmax_statistics
from estimator.model.products import Norm, Product
from estimator.model.program import Step
from estimator.model.residual import write_add_forward, write_dropout_backward
from estimator.model.shapes import Shapes
from estimator.timeline import Scribe


class LatentAttention:
    """Writes the blocks of one layer's latent attention, from ``prev/output`` to ``residual``."""

    def __init__(self, model: ModelSettings, shapes: Shapes, modules: tuple[str, ...]) -> None:
        assert model.mla is not None
        self.model, self.x, self.mla = model, shapes, model.mla
        self.recompute_core = "core_attn" in modules
        self.recompute_up = "mla_up_proj" in modules
        self.recompute_norm = "layernorm" in modules
        self.norm = Norm("input", "input_norm_weight")
        heads, m, h, normed = shapes.num_heads, model.mla, shapes.hidden_size, model.qk_layernorm
        query_width = heads * m.query_head_dim
        self.q_down: Product | None = None
        if m.q_lora_rank is None:
            self.q_up = Product("q_up", "linear_q_proj", h, query_width, "column", ATTENTION, normed)
        else:
            self.q_down = Product("q_down", "linear_q_down_proj", h, m.q_lora_rank, "duplicated", ATTENTION)
            self.q_up = Product("q_up", "linear_q_up_proj", m.q_lora_rank, query_width, "column", ATTENTION, normed)
        latent = m.kv_lora_rank + m.qk_pos_emb_head_dim
        self.kv_down = Product("kv_down", "linear_kv_down_proj", h, latent, "duplicated", ATTENTION)
        kv_width = heads * (m.qk_head_dim + m.v_head_dim)
        self.kv_up = Product("kv_up", "linear_kv_up_proj", m.kv_lora_rank, kv_width, "column", ATTENTION, normed)
        self.proj = Product("proj", "linear_proj", heads * m.v_head_dim, h, "row", ATTENTION)
        row = shapes.tokens * shapes.element_bytes
        self.query = row * query_width
        self.value = row * heads * m.v_head_dim
        self.rotary_part = row * heads * m.qk_pos_emb_head_dim
        self.key_rotary_part = row * m.qk_pos_emb_head_dim

    # -- forward --------------------------------------------------------------------------------------------------
    def forward(self, s: Scribe, keep: bool) -> None:
        x, m = self.x, self.model
        self.norm.forward(s, x, m)
        if self.q_down:
            self.q_down.forward(s, x, m, keep)
        self.kv_down.forward(s, x, m, keep)
        if x.sequence_parallel:
            s.alloc("key_rotary_gathered", self.key_rotary_part, ATTENTION)
        self._up_forward(s, keep and not self.recompute_up)
        s.alloc("attention_output", self.value, ATTENTION)
        s.alloc("softmax_statistics", softmax_statistics(x), ATTENTION)
        if not keep or self.recompute_core:
            s.free("softmax_statistics")
        if not keep or self.recompute_up:
            s.free("query", "key", "value")
        self.proj.forward(s, x, m, keep)
        if not keep:
            s.free("attention_output", "kv_down_output", *(["q_down_output"] if self.q_down else []))
            if x.sequence_parallel:
                s.free("key_rotary_gathered")
        if not keep or self.recompute_norm:
            self.norm.discard(s, m)
        write_add_forward(s, x, m, "proj_output", "residual", "attention_dropout_mask", keep)

    def _up_forward(self, s: Scribe, keep: bool) -> None:
        """Leaves query, key and value; the outputs of the products go when this returns."""
        x, m = self.x, self.model
        self.q_up.forward(s, x, m, keep)
        self.kv_up.forward(s, x, m, keep)
        if m.apply_rope_fusion:
            s.rename("q_up_output", "query")
            s.alloc("key", self.query, ATTENTION)
            s.alloc("value", self.value, ATTENTION)
            s.free("kv_up_output")
            return
        self._rotate(s, "query", self.rotary_part)
        self._rotate(s, "key", self.key_rotary_part)
        s.alloc("query", self.query, ATTENTION)
        s.free("query_rotated")
        s.alloc("key", self.query, ATTENTION)
        s.free("key_rotated")
        s.alloc("value", self.value, ATTENTION)
        s.free("q_up_output", "kv_up_output")
        if not keep:
            s.free("query_cos", "query_sin", "key_cos", "key_sin")

    def _rotate(self, s: Scribe, name: str, size: int) -> None:
        """Pairs are taken apart into a copy, then as in the plain rotary embedding (rope_utils.py:92-137); cos and sin
        stay."""
        table = self.x.sequence * self.mla.qk_pos_emb_head_dim * self.x.element_bytes
        s.alloc("paired", size, ATTENTION)
        for function in ("cos", "sin"):
            s.alloc(f"{function}_a", 2 * table, ATTENTION)
            s.alloc(f"{function}_b", 2 * table, ATTENTION)
            s.free(f"{function}_a")
            s.alloc(f"{name}_{function}", table, ATTENTION)
            s.free(f"{function}_b")
        s.alloc("t1", size, ATTENTION)
        s.alloc("half", size // 2, ATTENTION)
        s.alloc("turned", size, ATTENTION)
        s.free("half")
        s.alloc("t2", size, ATTENTION)
        s.free("turned")
        s.alloc("t3", size, ATTENTION)
        s.free("t1", "t2", "paired")
        s.alloc(f"{name}_rotated", size, ATTENTION)
        s.free("t3")

    # -- backward -------------------------------------------------------------------------------------------------
    def backward(self, s: Scribe, fused_wgrad: bool, keep_input: bool = False) -> list[Step]:
        """From the gradient of the residual stream to the gradient of this layer's input, added to it in place."""
        x, m = self.x, self.model
        if self.recompute_norm:
            self.norm.forward(s, x, m)
        dropped = write_dropout_backward(s, x, m, "attention_dropout_mask")
        steps = self.proj.backward(s, x, m, fused_wgrad, dropped, None)
        self._core_backward(s)
        self._rotary_backward(s)
        steps.append(s.cut("attention.core"))
        steps += self.kv_up.backward(s, x, m, fused_wgrad, "kv_up_grad", None)
        saved_query = "q_down_output" if self.q_down else None
        steps += self.q_up.backward(s, x, m, fused_wgrad, "query_grad", saved_query)
        steps += self._down_backward(s, fused_wgrad)
        self.norm.backward(s, x, m, "norm_output_grad")
        s.free(self.norm.output, "input_input_grad")
        if keep_input:
            s.rename("prev/output", "^kept_input")
        else:
            s.free("prev/output")
        steps += self.norm.ready(s)
        steps.append(s.cut("attention.end"))
        return steps

    def _core_backward(self, s: Scribe) -> None:
        x = self.x
        if self.recompute_up:
            self._up_forward(s, keep=True)
        if self.recompute_core:
            s.free("attention_output")
            s.alloc("attention_output", self.value, ATTENTION)
            s.alloc("softmax_statistics", softmax_statistics(x), ATTENTION)
        s.alloc("query_grad", self.query, ACTIVATION_GRADIENTS)
        s.alloc("key_grad", self.query, ACTIVATION_GRADIENTS)
        s.alloc("value_grad", self.value, ACTIVATION_GRADIENTS)
        accumulators = self.query // x.element_bytes * 4 + softmax_statistics(x)
        s.transient("attention_workspace", accumulators, ATTENTION)
        s.free("proj_input_grad", "query", "key", "value", "attention_output", "softmax_statistics")

    def _rotary_backward(self, s: Scribe) -> None:
        """Leaves ``kv_up_grad``, ``query_grad`` and the gradient of the keys' shared rotary part."""
        kv_up = self.kv_up.output_bytes(self.x)
        if self.model.apply_rope_fusion:
            s.alloc("kv_up_grad", kv_up, ACTIVATION_GRADIENTS)
            s.alloc("key_rotary_grad", self.key_rotary_part, ACTIVATION_GRADIENTS)
            s.free("key_grad", "value_grad")
            return
        s.alloc("key_rotary_grad", self.key_rotary_part, ACTIVATION_GRADIENTS)
        for name in ("a", "b"):
            s.alloc(name, self.rotary_part, ACTIVATION_GRADIENTS)
        s.alloc("half", self.rotary_part // 2, ACTIVATION_GRADIENTS)
        s.free("query_sin", "key_sin", "half", "a")
        s.alloc("c", self.rotary_part, ACTIVATION_GRADIENTS)
        s.free("query_cos", "key_cos", "b")
        s.alloc("kv_up_grad", kv_up, ACTIVATION_GRADIENTS)
        s.free("key_grad", "value_grad")
        s.alloc("query_joined_grad", self.query, ACTIVATION_GRADIENTS)
        s.free("query_grad", "c")
        s.rename("query_joined_grad", "query_grad")

    def _down_backward(self, s: Scribe, fused_wgrad: bool) -> list[Step]:
        """Both latents' gradients to that of the input norm's output, ``norm_output_grad``; summed in place."""
        x, m = self.x, self.model
        s.alloc("kv_down_grad", self.kv_down.output_bytes(x), ACTIVATION_GRADIENTS)
        s.free("kv_up_input_grad", "key_rotary_grad")
        if x.sequence_parallel:
            s.free("key_rotary_gathered")
        s.free("kv_down_output")
        steps = self.kv_down.backward(s, x, m, fused_wgrad, "kv_down_grad", None)
        s.rename("kv_down_input_grad", "norm_output_grad")
        if self.q_down:
            steps += self.q_down.backward(s, x, m, fused_wgrad, "q_up_input_grad", None)
            s.free("q_down_input_grad")
        else:
            s.free("q_up_input_grad")
        return steps
