"""Which component an allocation belongs to, by the stack that made it: a table over frames, innermost first."""

from __future__ import annotations

from collections.abc import Sequence

from estimator import components

STACKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        components.LOGITS,
        (
            "cross_entropy",
            "compute_language_model_loss",
            "output_layer",
            "lm_head",
            "loss_func",
            "log_softmax",
            "CrossEntropy",
            "parallel_cross_entropy",
        ),
    ),
    (
        components.OPTIMIZER_STATES,
        (
            "initialize_state",
            "_initialize_state",
            "init_state",
            "_init_group",
            "set_scaled_state",
            "init_state_fn",
            "init_optimizer_state",
        ),
    ),
    (
        components.MAIN_PARAMETERS,
        (
            "_build_model_and_main_param_groups",
            "main_weight_buffer",
            "shard_main_param",
            "_build_optimizer_group",
            "copy_model_params_to_main_params",
        ),
    ),
    (
        components.GATHERED_PARAMETERS,
        (
            "all_gather_params",
            "async_bucket_gather",
            "AllGatherPipeline",
            "unshard",
            "all_gather_and_wait",
            "param_and_grad_buffer.py:fetch_bucket",
            "_all_gather",
        ),
    ),
    (
        components.GRADIENT_BUCKETS,
        (
            "GradReducePipeline",
            "reduce_gradients",
            "reduce_scatter",
            "start_grad_sync",
            "get_main_grad",
            "_bucket_group_gradient_reduce",
            "allocate_bucket",
            "grad_acc",
            "_grad_acc",
        ),
    ),
    (
        components.OPTIMIZER_TEMPORARIES,
        (
            "optimizer.py:step",
            "fused_adam.py:step",
            "adam.py",
            "adamw.py",
            "clip_grads.py",
            "multi_tensor_apply",
            "_copy_model_grads_to_main_grads",
            "get_grad_norm",
            "prepare_grads",
            "step_with_ready_grads",
            "update_optimizer",
        ),
    ),
    (
        components.MAIN_GRADIENTS,
        ("grad_data", "main_grad_buffer", "param_and_grad_buffer.py:__init__", "_init_distributed_params"),
    ),
    (
        components.ATTENTION,
        ("attention.py", "flash_attn", "dot_product_attention", "core_attn", "fused_attn", "rope", "rotary", "qkv"),
    ),
    (
        components.MLP,
        ("mlp.py", "swiglu", "fused_bias", "experts.py", "token_dispatcher", "moe_layer", "router.py", "feed_forward"),
    ),
    (components.NORMS, ("layer_norm", "layernorm.py", "rmsnorm", "rms_norm", "norm.py")),
    (
        components.WORKSPACES,
        ("get_workspace", "cublas", "get_multi_stream_cublas_workspace", "_rotary_pos_emb_cache", "workspace"),
    ),
    (components.BATCH, ("get_batch", "dataloader", "data_iterator", "collate", "get_batch_on_this_cp_rank")),
    (
        components.RESIDUAL,
        ("transformer_layer.py", "bias_dropout", "transformer_block.py", "word_embeddings", "embedding"),
    ),
    (
        components.PARAMETERS,
        (
            "reset_parameters",
            "init_weight",
            "_initialize_affine_weight",
            "model_provider",
            "get_model",
            "build_model",
            "module.py:cuda",
            "module.py:_apply",
            "provide_distributed_model",
            "__init__",
        ),
    ),
    (components.ACTIVATION_GRADIENTS, ("_engine_run_backward", "backward")),
)
"""Component -> parts of "file:function" texts. Within a frame the first row counts; rows are ordered from what is told
by one function to what is told by a module. Names: megatron-core 0.19.2, transformer-engine 2.12, torch
2.11."""

UNKNOWN = "unknown"
MAX_FRAMES = 64


def component_of(frames: Sequence[str]) -> str:
    """The component of a stack ("path:function", innermost first), "unknown" if no row matches.

    The innermost frame that tells decides, so that a temporary of attention in a recomputed layer is attention's; what
    has no frame of Python (autograd's own threads) is unknown.
    """
    for frame in frames[:MAX_FRAMES]:
        for component, parts in STACKS:
            if any(part in frame for part in parts):
                return component
    return UNKNOWN
