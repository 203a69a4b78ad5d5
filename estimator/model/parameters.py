"""The parameters a rank holds, in the order of ``module.named_parameters()``: buckets and FSDP units follow it.

Sizes are elements after tensor-parallel sharding. Source: megatron-core 0.19.2, transformer/attention.py (linear_proj
is
built before linear_qkv), transformer/mlp.py, models/gpt/gpt_model.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from estimator.job.settings import ModelSettings


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of this rank. ``row_size`` is the number of elements of one row (all dimensions but the first)."""

    name: str
    num_elements: int
    row_size: int
    layer: int | None = None
    """Index within this stage's decoder layers; None outside of them."""
    fused_gradient: bool = False
    """A GEMM weight whose gradient Transformer Engine can add to main_grad directly (gradient accumulation fusion)."""
    shared_embedding: bool = False
    expert: bool = False
    """An expert's weight of an expert-parallel layer: its replicas are the expert data-parallel ranks alone
    (megatron-core 0.19.2, extensions/transformer_engine.py:85-120)."""

    @property
    def is_routed(self) -> bool:
        """A weight of a routed expert, split over ranks or not."""
        return "expert_fc" in self.name


Split = tuple[int, int, int]
"""Over how many ranks weights are split: TP, EP, ETP."""


def _matrix(name: str, rows: int, columns: int, layer: int | None = None) -> Parameter:
    return Parameter(name, rows * columns, columns, layer, fused_gradient=True)


def _vector(name: str, size: int, layer: int | None = None) -> Parameter:
    return Parameter(name, size, 1, layer)


def _norm(name: str, size: int, normalization: str, layer: int | None) -> list[Parameter]:
    parameters = [_vector(f"{name}_weight", size, layer)]
    if normalization == "LayerNorm":
        parameters.append(_vector(f"{name}_bias", size, layer))
    return parameters


def layer_parameters(model: ModelSettings, split: Split, layer: int, experts: bool = False) -> list[Parameter]:
    """Parameters of one decoder layer: attention with its norm, then the dense MLP with its norm, or the experts."""
    t = split[0]
    attention = _latent_attention(model, t, layer) if model.mla else _attention(model, t, layer)
    return attention + (_experts(model, split, layer) if experts else _mlp(model, t, layer))


def _attention(model: ModelSettings, t: int, layer: int) -> list[Parameter]:
    """Projection, QKV with its norm, norms of queries and keys."""
    h, d = model.hidden_size, model.kv_channels
    heads = model.num_attention_heads // t
    groups = max(1, model.num_query_groups // t)
    query = heads * d
    qkv_rows = query * (2 if model.attention_output_gate else 1) + 2 * groups * d
    parameters = [_matrix("linear_proj", h, query, layer)]
    if model.add_bias_linear:
        parameters.append(_vector("linear_proj_bias", h, layer))
    parameters += _norm("qkv_norm", h, model.normalization, layer)
    parameters.append(_matrix("linear_qkv", qkv_rows, h, layer))
    if model.add_bias_linear or model.add_qkv_bias:
        parameters.append(_vector("linear_qkv_bias", qkv_rows, layer))
    if model.qk_layernorm:
        parameters += _norm("q_layernorm", d, model.normalization, layer)
        parameters += _norm("k_layernorm", d, model.normalization, layer)
    if model.post_layer_norms:
        parameters += _norm("post_attention_norm", h, model.normalization, layer)
    return parameters


def _mlp(model: ModelSettings, t: int, layer: int) -> list[Parameter]:
    h, ffn = model.hidden_size, model.ffn_hidden_size // t
    fc1_rows = ffn * (2 if model.gated_linear_unit else 1)
    parameters = _norm("fc1_norm", h, model.normalization, layer)
    parameters.append(_matrix("linear_fc1", fc1_rows, h, layer))
    if model.add_bias_linear:
        parameters.append(_vector("linear_fc1_bias", fc1_rows, layer))
    parameters.append(_matrix("linear_fc2", h, ffn, layer))
    if model.add_bias_linear:
        parameters.append(_vector("linear_fc2_bias", h, layer))
    if model.post_layer_norms:
        parameters += _norm("post_mlp_norm", h, model.normalization, layer)
    return parameters


def _latent_attention(model: ModelSettings, t: int, layer: int) -> list[Parameter]:
    """Norm of its own, projection, then the latents' projections, the upper ones with the latents' norms
    (transformer/multi_latent_attention.py:470-615)."""
    assert model.mla is not None
    h, m, heads = model.hidden_size, model.mla, model.num_attention_heads // t
    parameters = _norm("input_norm", h, model.normalization, layer)
    parameters.append(_matrix("linear_proj", h, heads * m.v_head_dim, layer))
    if model.add_bias_linear:
        parameters.append(_vector("linear_proj_bias", h, layer))
    latents = [("linear_kv_down_proj", h, m.kv_lora_rank + m.qk_pos_emb_head_dim, False)]
    latents.append(("linear_kv_up_proj", m.kv_lora_rank, heads * (m.qk_head_dim + m.v_head_dim), True))
    query = heads * m.query_head_dim
    if m.q_lora_rank is None:
        latents.insert(0, ("linear_q_proj", h, query, True))
    else:
        latents[:0] = [
            ("linear_q_down_proj", h, m.q_lora_rank, False),
            ("linear_q_up_proj", m.q_lora_rank, query, True),
        ]
    for name, columns, rows, may_have_norm in latents:
        if may_have_norm and model.qk_layernorm:
            parameters += _norm(f"{name}_norm", columns, model.normalization, layer)
        parameters.append(_matrix(name, rows, columns, layer))
    return parameters


def _experts(model: ModelSettings, split: Split, layer: int) -> list[Parameter]:
    """Norm, router, latent projections, each expert's fc1 and fc2, shared experts (moe_layer.py:208-330)."""
    assert model.moe is not None
    moe, h = model.moe, model.hidden_size
    t, ep, etp = split
    gates = 2 if model.gated_linear_unit else 1
    width, ffn = moe.latent_size or h, moe.ffn_hidden_size // etp
    parameters = _norm("pre_mlp_norm", h, model.normalization, layer)
    parameters.append(Parameter("router", moe.num_experts * h, h, layer))
    if moe.latent_size:
        parameters.append(_matrix("fc1_latent_proj", moe.latent_size, h, layer))
        parameters.append(_matrix("fc2_latent_proj", h, moe.latent_size, layer))
    local = moe.num_experts // ep
    for name, rows, columns in (("expert_fc1", ffn * gates, width), ("expert_fc2", width, ffn)):
        for i in range(local):
            parameters.append(
                Parameter(f"{name}_{i}", rows * columns, columns, layer, fused_gradient=True, expert=ep > 1 or etp != t)
            )
    if moe.shared_size:
        shared = moe.shared_size // t
        parameters.append(_matrix("shared_fc1", shared * gates, h, layer))
        parameters.append(_matrix("shared_fc2", h, shared, layer))
        if moe.shared_gate:
            parameters.append(Parameter("shared_gate", h, h, layer))
    return parameters


def _prediction(model: ModelSettings, split: Split, depth: int) -> list[Parameter]:
    """One depth of multi-token prediction: two norms, the projection of both, a layer like the decoder's last, a norm
    (transformer/multi_token_prediction.py:1085-1150). On a pipeline its stage has a copy of the embedding table."""
    h, t = model.hidden_size, split[0]
    parameters = _norm("enorm", h, model.normalization, None) + _norm("hnorm", h, model.normalization, None)
    parameters.append(_matrix("eh_proj", h // t, 2 * h))
    layer = layer_parameters(model, split, 0, model.has_experts(model.num_layers - 1))
    parameters += [replace(p, layer=None) for p in layer]
    parameters += _norm("final_norm", h, model.normalization, None)
    return [replace(p, name=f"mtp{depth}/{p.name}") for p in parameters]


@lru_cache(maxsize=512)
def stage_parameters(
    model: ModelSettings, split: Split, num_layers: int, pre_process: bool, post_process: bool, first_layer: int = 0
) -> tuple[Parameter, ...]:
    """Parameters of one pipeline stage that holds ``num_layers`` decoder layers from ``first_layer`` of the model on.

    With tied embeddings the last stage of a pipeline holds its own copy of the embedding table; without a pipeline the
    table exists once.
    """
    t = split[0]
    tied = model.share_embeddings_and_output_weights
    vocab = model.vocab_size // t
    parameters: list[Parameter] = []
    if pre_process:
        word = _matrix("word_embeddings", vocab, model.hidden_size)
        parameters.append(
            Parameter(
                word.name,
                word.num_elements,
                word.row_size,
                shared_embedding=tied,
                fused_gradient=tied and post_process,
            )
        )
        if model.position_embedding_type == "learned_absolute":
            parameters.append(Parameter("position_embeddings", model.seq_length * model.hidden_size, model.hidden_size))
    elif post_process and model.mtp_num_layers:
        parameters.append(Parameter("word_embeddings", vocab * model.hidden_size, model.hidden_size))
    for layer in range(num_layers):
        parameters += layer_parameters(model, split, layer, model.has_experts(first_layer + layer))
    if post_process:
        parameters += _norm("final_norm", model.hidden_size, model.normalization, None)
        for depth in range(model.mtp_num_layers):
            parameters += _prediction(model, split, depth)
        if not (tied and pre_process):
            output = _matrix("output_layer", vocab, model.hidden_size)
            parameters.append(
                Parameter(output.name, output.num_elements, output.row_size, fused_gradient=True, shared_embedding=tied)
            )
    return tuple(parameters)
