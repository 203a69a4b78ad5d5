"""From the frames of a traceback: in which phase of a step it failed, and what the innermost code was doing.

Both are tables over "file function" texts.
The phase is the first row of :data:`PHASES` that any frame matches (rows are
ordered from what decides, such as a checkpoint being loaded, to what is always there, such as a forward). The sites are
the rows of :data:`SITES` that the frames match, innermost first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

FRAME = re.compile(r"File \"?([^\"\n,]{1,300})\"?, line (\d{1,9})(?:, in ([^\s,]{1,120}))?")
"""A frame of a Python or TorchScript traceback."""

PHASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "checkpoint_load",
        (
            "load_checkpoint",
            "_load_base_checkpoint",
            "load_state_dict",
            "dist_checkpointing/strategies/torch.py load",
            "checkpointing.py load",
            "load_hf_weights",
            "load_weights_hf_to_megatron",
            "from_pretrained",
        ),
    ),
    (
        "checkpoint_save",
        (
            "save_checkpoint",
            "_save_checkpoint",
            "async_save",
            "checkpointing.py save",
            "full_state_dict",
            "_gather_state_dict",
            "state_dict_utils",
            "save_pretrained",
            "save_model",
            "sharded_state_dict",
        ),
    ),
    ("evaluation", ("evaluate", "evaluation_loop", "validation_step", "evaluate_and_print_results", "eval.py")),
    (
        "optimizer_build",
        (
            "get_megatron_optimizer",
            "setup_optimizer",
            "_build_model_and_main_param_groups",
            "build_model_param_gbuf_range_map",
            "setup_model_and_optimizer get_megatron",
            "configure_optimizers",
            "distrib_optimizer.py __init__",
            "optimizer.py __init__",
        ),
    ),
    (
        "optimizer_step",
        (
            "optimizer.py step",
            "optimizer.py step_with_ready_grads",
            "adam.py",
            "adamw.py",
            "fused_adam",
            "_init_group",
            "optim/optimizer.py",
            "clip_grad",
            "step_with_ready_grads",
            "_copy_main_params_to_model_params",
            "multi_tensor",
            "initialize_state",
            "_foreach",
        ),
    ),
    (
        "gradient_reduction",
        (
            "start_grad_sync",
            "finish_grad_sync",
            "finalize_model_grads",
            "grad_reduce",
            "reduce_gradients",
            "reduce_scatter",
            "post_backward",
            "_post_backward",
            "allreduce_gradients",
        ),
    ),
    (
        "backward",
        (
            "torch/autograd/graph.py _engine_run_backward",
            "autograd/__init__.py backward",
            "backward_step",
            "_tensor.py backward",
            "run_backward",
            " backward",
            "custom_backward",
        ),
    ),
    ("forward", ("forward_step", "train_step", "training_step", "forward_backward", "_call_impl", " forward")),
    (
        "model_build",
        (
            "provide_distributed_model",
            "get_model",
            "build_model",
            "model_provider",
            "wrap_with_ddp",
            "_ddp_wrap",
            "ParamAndGradBuffer",
            "param_and_grad_buffer.py __init__",
            "fully_shard",
            " __init__",
            "initialize_megatron",
            " cuda",
            "_apply",
            "init_method",
            "_init_with_meta",
        ),
    ),
)
"""Phase -> parts of "file function" texts. Names of functions:
megatron-core 0.19.2, megatron-bridge 0.6.2, torch 2.11."""

SITES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("cuda_graph", ("cuda_graph", "CUDAGraph", "capture_begin", "graphs.py")),
    ("fp8", ("fp8_utils", "Float8Tensor", "float8_tensor", "MXFP8", "mxfp8", "quantize_", "transpose_cache")),
    (
        "logits",
        (
            "cross_entropy",
            "compute_language_model_loss",
            "output_layer",
            "lm_head",
            "loss_func",
            "logits",
            "_VocabParallel",
            "CrossEntropyLoss",
            "loss.py",
            "loss_utils",
            "CausalLMLoss",
            "log_softmax",
        ),
    ),
    ("optimizer_states", ("exp_avg", "_init_group", "initialize_state", "_initialize_optimizer_state", "init_state")),
    (
        "optimizer_temporaries",
        (
            "_foreach",
            "multi_tensor_apply",
            "clip_grad",
            "adam.py",
            "adamw.py",
            "_copy_model_grads_to_main_grads",
            "optimizer.py step",
            "fused_adam",
            "_multi_tensor_adam",
            "step_with_ready_grads",
        ),
    ),
    (
        "moe",
        ("moe_layer", "experts.py", "token_dispatcher", "moe_utils", "router.py", "grouped_gemm", "shared_experts"),
    ),
    (
        "unfused_attention",
        (
            "core/transformer/dot_product_attention.py",
            "fused_softmax.py",
            "eager_attention",
            "UnfusedDotProductAttention",
            "_softmax",
            "baddbmm",
            "attention_scores",
            "modeling_llama.py eager",
        ),
    ),
    ("attention", ("attention.py", "flash_attn", "self_attention", "core_attn", "scaled_dot_product")),
    (
        "fsdp_gather",
        (
            "all_gather",
            "unshard",
            "all_gather_params",
            "_pre_forward",
            "wait_for_unshard",
            "gather_and_prefetch",
            "fetch_bucket",
            "pre_forward",
            "allocate_bucket",
            "allgather",
        ),
    ),
    (
        "gradient_buckets",
        (
            "reduce_scatter",
            "start_grad_sync",
            "grad_reduce",
            "post_backward",
            "get_main_grad",
            "main_grad",
            "reduce_gradients",
            "allreduce",
        ),
    ),
    ("recompute", ("random.py", "checkpoint.py", "recompute", "CheckpointFunction")),
    ("mlp", ("mlp.py", "fused_bias_swiglu", "feed_forward", "linear_fc", "swiglu")),
    ("data", ("dataloader", "dataset.py", "data_samplers", "collate", "pin_memory", "get_batch")),
    ("embedding", ("embedding", "word_embeddings")),
    ("layers", ("transformer_layer", "transformer_block", "layernorm_linear", "linear.py")),
)
"""Site -> parts of "file function" texts, most telling first within one frame."""

SITE_PHASE = {
    **dict.fromkeys(("logits", "moe", "unfused_attention", "attention", "mlp", "embedding", "layers"), "forward"),
    **dict.fromkeys(("optimizer_states", "optimizer_temporaries"), "optimizer_step"),
    "gradient_buckets": "gradient_reduction",
}
"""The phase that a site belongs to when the frames name no phase of their own (a traceback that is cut off)."""


def phase_of(frames: Sequence[str]) -> str | None:
    """The phase that these frames ("path function", outermost first) belong to; None if they tell nothing."""
    for phase, parts in PHASES:
        if any(part in frame for frame in frames for part in parts):
            return phase
    return next((SITE_PHASE[site] for site in sites_of(frames) if site in SITE_PHASE), None)


def sites_of(frames: Sequence[str]) -> tuple[str, ...]:
    """What the frames were doing, innermost first, each once; at most five."""
    found: dict[str, None] = {}
    for frame in reversed(frames):
        for site, parts in SITES:
            if any(part in frame for part in parts):
                found.setdefault(site)
                break
        if len(found) == 5:
            break
    return tuple(found)


PHASE_LINES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "checkpoint_load",
        ("loading checkpoint from", "loading distributed checkpoint", "Loading checkpoint", "Loading pretrained"),
    ),
    (
        "training",
        (
            "successfully loaded checkpoint",
            "[before the start of training step]",
            "Starting training loop",
            "training ...",
        ),
    ),
    ("checkpoint_save", ("saving checkpoint at iteration", "saving checkpoint", "Saving checkpoint", "Saving model")),
    ("training", ("successfully saved checkpoint",)),
    (
        "evaluation",
        ("Evaluating on", "Evaluating iter", "***** Running Evaluation", "Start evaluation", "evaluating on"),
    ),
    ("training", ("validation loss at iteration", "validation at iteration")),
    ("model_build", ("building GPT model", "building model", "> building", "Building model")),
)
"""What Megatron, Bridge and others print when a phase begins: the phase of a failure that has no traceback."""
