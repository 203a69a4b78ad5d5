"""A rough expectation of a run's memory, for deciding how many runs share a card; no estimate of the product's kind.

Written independently of the estimator, so that which runs are measured never depends on what it predicts.
"""

from __future__ import annotations

from estimator.job.settings import DTYPE_BYTES, Settings
from estimator.profiling.job import GIB, ProfileJob

_MARGIN = 1.15
_CONSTANT = 1 * GIB
"""CUDA context, workspaces, and what the allocator keeps in pieces."""


def layer_parameters(settings: Settings) -> int:
    """Parameters of one dense layer on one tensor-parallel rank, norms left out."""
    model, t = settings.model, settings.parallel.tensor_model_parallel_size
    h, f = model.hidden_size, model.ffn_hidden_size
    qkv = model.kv_channels * (2 * model.num_attention_heads + 2 * model.num_query_groups)
    return h * (qkv + f * (3 if model.gated_linear_unit else 2)) // t


def parameters(settings: Settings, stage: int) -> tuple[int, int]:
    """Parameters in the layers and outside them on a rank of pipeline stage ``stage``."""
    model, parallel = settings.model, settings.parallel
    p = parallel.pipeline_model_parallel_size
    table = model.vocab_size * model.hidden_size // parallel.tensor_model_parallel_size
    tables = (stage == 0) + (stage == p - 1 and (p > 1 or not model.share_embeddings_and_output_weights))
    return -(-model.num_layers // p) * layer_parameters(settings), tables * table


def pipeline_stage(settings: Settings, rank: int) -> int:
    """Stage of a rank in Megatron's default order tp-cp-ep-dp-pp: the last of it to vary."""
    return rank * settings.parallel.pipeline_model_parallel_size // settings.parallel.world_size


def state_bytes(settings: Settings, stage: int) -> float:
    """Weights, gradients, optimizer states and the buffers around communication."""
    sharding = settings.sharding
    inside, outside = parameters(settings, stage)
    count = inside + outside
    n = settings.parallel.data_context_parallel_size / max(1, sharding.num_distributed_optimizer_instances)
    if sharding.is_megatron_fsdp:
        grads = DTYPE_BYTES[sharding.main_grads_dtype or "bfloat16"]
    else:
        grads = 4 if sharding.grad_reduce_in_fp32 else 2
    states = 12 + (0 if grads == 4 else 4)
    bucket = min(count, sharding.bucket_size or count)
    by_strategy = {
        "ddp": count * (2 + grads + states),
        "distopt": count * (2 + grads + states / n),
        "no_shard": count * (2 + grads + states),
        "optim": count * (2 + grads + states / n),
        "optim_grads": count * (2 + (grads + states) / n) + min(count, 1.0e9 + 2 * bucket) * grads,
    }
    sharded = (
        count * (2 + grads + states) / n + 2 * outside + min(count, 0.7e9) * 2 + min(count, 1.2e9) * grads
    )  # optim_grads_params, torch_fsdp2
    built = count * (4 + (grads if sharding.strategy in ("distopt", "ddp") else 2))
    return max(by_strategy.get(sharding.strategy, sharded), built)


def activation_bytes(settings: Settings, stage: int) -> float:
    """Saved activations at the height of the step, and the logits on the last stage."""
    model, parallel, batch = settings.model, settings.parallel, settings.batch
    t, p = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    tokens = model.seq_length * batch.micro_batch_size / parallel.context_parallel_size
    split = t if parallel.sequence_parallel else 1
    hidden = model.hidden_size * (2 * 6 + (2 if model.hidden_dropout else 0)) / split
    heads = model.kv_channels * (3 * model.num_attention_heads + 4 * model.num_query_groups) * 2 / t
    ffn = model.ffn_hidden_size * 2 * (3 if model.gated_linear_unit else 2) / t
    per_layer = tokens * (hidden + heads + ffn)
    if model.transformer_impl == "local":
        scores = model.num_attention_heads * model.seq_length**2 * batch.micro_batch_size / t
        per_layer += scores * 7
    layers = -(-model.num_layers // p)
    in_flight = min(settings.num_microbatches, p - stage)
    granularity = settings.recompute.recompute_granularity
    if granularity == "full":
        held = layers * tokens * model.hidden_size * 2 / split * in_flight + per_layer
    else:
        held = layers * per_layer * in_flight
    logits = 0.0
    if stage == p - 1:
        logits = tokens * model.vocab_size / t * (8 if model.cross_entropy_fusion_impl == "te" else 14)
    return held + logits


def extra_bytes(job: ProfileJob) -> float:
    """What fields beyond Settings add: experts with their states and tokens, prediction layers, graph pools."""
    extra, settings = job.extra_transformer_config, job.settings
    model, parallel = settings.model, settings.parallel
    h, t = model.hidden_size, parallel.tensor_model_parallel_size
    layers = -(-model.num_layers // parallel.pipeline_model_parallel_size)
    tokens = model.seq_length * settings.batch.micro_batch_size / parallel.context_parallel_size / t
    total = 0.0
    if experts := extra.get("num_moe_experts"):
        ep, ffn, topk = (
            extra.get("expert_model_parallel_size", 1),
            extra["moe_ffn_hidden_size"],
            extra["moe_router_topk"],
        )
        total += layers * 3 * h * ffn * experts / ep * 18
        total += layers * tokens * topk * (8 * h + 8 * ffn)
    if extra.get("mtp_num_layers"):
        total += 20 * layer_parameters(settings) + 14 * tokens * model.vocab_size
    if extra.get("cuda_graph_impl", "none") != "none":
        total += activation_bytes(settings, pipeline_stage(settings, job.rank)) * 0.5
    if chunks := extra.get("virtual_pipeline_model_parallel_size"):
        total += activation_bytes(settings, pipeline_stage(settings, job.rank)) * (1 + 1 / chunks)
    return total


def expected_bytes(job: ProfileJob) -> int:
    """What to keep free on the card for a run: its cap if it has one, else a generous guess of its peak."""
    if job.memory_cap_bytes is not None:
        return job.memory_cap_bytes + _CONSTANT
    stage = pipeline_stage(job.settings, job.rank)
    parts = state_bytes(job.settings, stage), activation_bytes(job.settings, stage), extra_bytes(job)
    return int(sum(parts) * _MARGIN) + _CONSTANT
