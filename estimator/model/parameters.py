"""The parameters a rank holds, in the order of ``module.named_parameters()``: buckets and FSDP units follow it.

Sizes are elements after tensor-parallel sharding. Source: megatron-core 0.19.2, transformer/attention.py (linear_proj
is
built before linear_qkv), transformer/mlp.py, models/gpt/gpt_model.py.
"""

from __future__ import annotations

from dataclasses import dataclass
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


def _matrix(name: str, rows: int, columns: int, layer: int | None = None) -> Parameter:
    return Parameter(name, rows * columns, columns, layer, fused_gradient=True)


def _vector(name: str, size: int, layer: int | None = None) -> Parameter:
    return Parameter(name, size, 1, layer)


def _norm(name: str, size: int, normalization: str, layer: int | None) -> list[Parameter]:
    parameters = [_vector(f"{name}_weight", size, layer)]
    if normalization == "LayerNorm":
        parameters.append(_vector(f"{name}_bias", size, layer))
    return parameters


def layer_parameters(model: ModelSettings, tensor_parallel: int, layer: int) -> list[Parameter]:
    """Parameters of one dense decoder layer: attention projection, QKV with its norm, fc1 with its norm, fc2."""
    h, d, t = model.hidden_size, model.kv_channels, tensor_parallel
    heads = model.num_attention_heads // t
    groups = max(1, model.num_query_groups // t)
    query = heads * d
    qkv_rows = query * (2 if model.attention_output_gate else 1) + 2 * groups * d
    ffn = model.ffn_hidden_size // t
    fc1_rows = ffn * (2 if model.gated_linear_unit else 1)
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
    parameters += _norm("fc1_norm", h, model.normalization, layer)
    parameters.append(_matrix("linear_fc1", fc1_rows, h, layer))
    if model.add_bias_linear:
        parameters.append(_vector("linear_fc1_bias", fc1_rows, layer))
    parameters.append(_matrix("linear_fc2", h, ffn, layer))
    if model.add_bias_linear:
        parameters.append(_vector("linear_fc2_bias", h, layer))
    if model.post_layer_norms:
        parameters += _norm("post_mlp_norm", h, model.normalization, layer)
    return parameters


@lru_cache(maxsize=512)
def stage_parameters(
    model: ModelSettings, tensor_parallel: int, num_layers: int, pre_process: bool, post_process: bool
) -> tuple[Parameter, ...]:
    """Parameters of one pipeline stage that holds ``num_layers`` decoder layers.

    With tied embeddings the last stage of a pipeline holds its own copy of the embedding table; without a pipeline the
    table exists once.
    """
    t = tensor_parallel
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
    for layer in range(num_layers):
        parameters += layer_parameters(model, t, layer)
    if post_process:
        parameters += _norm("final_norm", model.hidden_size, model.normalization, None)
        if not (tied and pre_process):
            output = _matrix("output_layer", vocab, model.hidden_size)
            parameters.append(
                Parameter(output.name, output.num_elements, output.row_size, fused_gradient=True, shared_embedding=tied)
            )
    return tuple(parameters)
