"""From the effective document to the ``Settings`` that the estimate is a function of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from estimator.errors import FieldProblem, JobError, NotModelled
from estimator.job.not_modelled import fields_in_the_way
from estimator.job.settings import (
    BatchSettings,
    Fp8Settings,
    MlaSettings,
    ModelSettings,
    MoeSettings,
    OptimizerSettings,
    ParallelSettings,
    RecomputeSettings,
    RuntimeSettings,
    Settings,
    ShardingSettings,
    Stack,
)

MIN_BUCKET_SIZE = 40_000_000
BUCKET_SIZE_PER_RANK = 1_000_000
"""Elements: a bucket size left open becomes max(40e6, 1e6 * DP * CP). Source: megatron-core 0.19.2,
megatron/training/models/dist_utils.py:290-295."""

DETERMINISTIC_WORKSPACES = ":4096:8"
"""What deterministic training sets, because cuBLAS refuses to work without. Source: megatron-core 0.19.2,
megatron/training/determinism.py:30,57-62; megatron-bridge 0.6.2, recipes/utils/determinism_utils.py:40."""

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The first that is set is read. Source: torch 2.13, c10/cuda/CUDAAllocatorConfig.h:133-152."""


def read_settings(effective: Mapping[str, Any], world_size: int, stack: Stack | None = None) -> Settings:
    """Settings of an effective document (``effective_document(...).values``).

    Raises NotModelled with every field that stands in the way.
    """
    in_the_way = fields_in_the_way(effective)
    if in_the_way:
        raise NotModelled(in_the_way)
    parallel = _parallel(effective["model"], world_size)
    return Settings(
        model=_model(effective),
        parallel=parallel,
        sharding=_sharding(effective, parallel),
        optimizer=_optimizer(effective["optimizer"]),
        recompute=_recompute(effective["model"]),
        batch=BatchSettings(effective["train"]["micro_batch_size"], effective["train"]["global_batch_size"]),
        runtime=_runtime(effective),
        stack=stack or Stack(),
    )


def vocab_size(values: Mapping[str, Any]) -> tuple[int, str]:
    """(rows of the embedding table over all tensor-parallel ranks, where the number comes from).

    Bridge takes the tokenizer's vocabulary, padded to ``make_vocab_size_divisible_by * TP``, where the model names none
    or ``tokenizer.use_tokenizer_vocab_size`` is set (as in every library pretraining recipe, whose null tokenizer has
    32000 entries); else the model's own, unpadded. A real tokenizer's size is not in the configuration: the model's is
    used. Source: megatron-bridge 0.6.2, training/setup.py:291-299,681-721; models/gpt_provider.py:246-253.
    """
    model, tokenizer = values["model"], values.get("tokenizer") or {}
    null = str(tokenizer.get("tokenizer_type")).startswith("Null")
    own, of_tokenizer = model.get("vocab_size"), tokenizer.get("vocab_size")
    if not (tokenizer.get("use_tokenizer_vocab_size") or own is None):
        return own, "model.vocab_size"
    if of_tokenizer and (null or own is None):
        size, source = of_tokenizer, "tokenizer.vocab_size"
    else:
        size, source = (
            own or of_tokenizer or 0,
            "model.vocab_size, for the tokenizer's that is only known when it is loaded",
        )
    multiple = (model.get("make_vocab_size_divisible_by") or 1) * (model.get("tensor_model_parallel_size") or 1)
    return -(-size // multiple) * multiple, source


def _model(values: Mapping[str, Any]) -> ModelSettings:
    model = values["model"]
    same = [
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "seq_length",
        "normalization",
        "gated_linear_unit",
        "add_bias_linear",
        "add_qkv_bias",
        "qk_layernorm",
        "share_embeddings_and_output_weights",
        "position_embedding_type",
        "rotary_percent",
        "attention_output_gate",
        "attention_dropout",
        "hidden_dropout",
        "transformer_impl",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "cross_entropy_loss_fusion",
        "cross_entropy_fusion_impl",
        "gradient_accumulation_fusion",
        "calculate_per_token_loss",
        "init_model_with_meta_device",
        "use_cpu_initialization",
    ]
    rope = model.get("position_embedding_type") == "rope"
    window = model.get("window_size")
    return ModelSettings(
        **{name: model[name] for name in same if name in model},
        vocab_size=vocab_size(values)[0],
        activation_func=str(model.get("activation_func", "gelu")),
        window_size=(int(window[0]), int(window[1])) if window else None,
        attention_backend=str(model.get("attention_backend") or "auto"),
        apply_rope_fusion=bool(model.get("apply_rope_fusion")) and rope,  # gpt_provider.py:216-217
        bias_activation_fusion=bool(model.get("bias_activation_fusion")),
        model_class=str(model["_target_"]).rpartition(".")[2],
        fp8=_fp8(model),
        mla=_mla(model),
        moe=_moe(values),
        mtp_num_layers=model.get("mtp_num_layers") or 0,
    )


def _mla(model: Mapping[str, Any]) -> MlaSettings | None:
    if not model.get("multi_latent_attention"):
        return None
    names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    return MlaSettings(**{name: model[name] for name in names})


def _moe(values: Mapping[str, Any]) -> MoeSettings | None:
    model = values["model"]
    experts = model.get("num_moe_experts")
    if not experts:
        return None
    balancing = model.get("moe_router_load_balancing_type")
    kinds = balancing if isinstance(balancing, list) else [balancing]
    coefficients = model.get("moe_aux_loss_coeff")
    weights = coefficients if isinstance(coefficients, list) else [coefficients] * len(kinds)
    dispatcher = model.get("moe_token_dispatcher_type")
    flexible = str(model.get("moe_flex_dispatcher_backend"))
    return MoeSettings(
        num_experts=experts,
        ffn_hidden_size=model["moe_ffn_hidden_size"],
        topk=model["moe_router_topk"],
        pattern=_pattern(model),
        dispatcher=flexible if dispatcher == "flex" else str(dispatcher),
        permute_fusion=bool(model.get("moe_permute_fusion")),
        router_dtype="float32" if model.get("moe_router_dtype") == "fp32" else str(model["params_dtype"]),
        router_fusion=bool(model.get("moe_router_fusion")),
        score_function=str(model.get("moe_router_score_function")),
        aux_losses=sum(
            1 for kind, weight in zip(kinds, weights, strict=False) if str(kind).endswith("aux_loss") and weight
        ),
        expert_bias=bool(model.get("moe_router_enable_expert_bias")),
        force_load_balancing=bool(model.get("moe_router_force_load_balancing")),
        shared_size=model.get("moe_shared_expert_intermediate_size") or 0,
        shared_overlap=bool(model.get("moe_shared_expert_overlap")),
        shared_gate=bool(model.get("moe_shared_expert_gate")),
        latent_size=model.get("moe_latent_size"),
        num_groups=model.get("moe_router_num_groups") or 0,
        group_topk=model.get("moe_router_group_topk") or 0,
        dispatcher_sms=model.get("moe_flex_dispatcher_num_sms") or 20,
        nvlink_ranks=_nvlink_ranks(values.get("env_vars") or {}),
    )


def _nvlink_ranks(env: Mapping[str, Any]) -> int:
    """Ranks of one NVLink domain; HybridEP detects them unless told, 8 are taken then."""
    given = str(env.get("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", ""))
    return int(given) if given.isdigit() and 0 < int(given) <= 1024 else 8


def _pattern(model: Mapping[str, Any]) -> tuple[int, ...]:
    """1 for layers with experts. Only the block specification follows ``moe_layer_freq``: every layer of the default
    one has experts (megatron-bridge 0.6.2 models/gpt_provider.py:51-66, megatron-core 0.19.2
    models/gpt/gpt_layer_specs.py:640-672)."""
    layers: int = model["num_layers"]
    frequency = model.get("moe_layer_freq", 1)
    if "block_spec" not in str(model.get("transformer_layer_spec")):
        return (1,) * layers
    if isinstance(frequency, int):
        return tuple(int(i % frequency == 0) for i in range(layers))
    if not isinstance(frequency, list) or len(frequency) != layers or not set(frequency) <= {0, 1}:
        message = f"must be a whole number or a list of {layers} zeros and ones"
        raise JobError([FieldProblem("job.config.model.moe_layer_freq", message)])
    return tuple(frequency)


def _fp8(model: Mapping[str, Any]) -> Fp8Settings | None:
    if not model.get("fp8"):
        return None
    ends = bool(model.get("first_last_layers_bf16"))
    return Fp8Settings(
        str(model["fp8_recipe"]),
        bool(model.get("fp8_param")),
        model.get("num_layers_at_start_in_bf16") or 0 if ends else 0,
        model.get("num_layers_at_end_in_bf16") or 0 if ends else 0,
    )


def _parallel(model: Mapping[str, Any], world_size: int) -> ParallelSettings:
    same = [
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "sequence_parallel",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "virtual_pipeline_model_parallel_size",
        "expert_model_parallel_size",
    ]
    layout = model.get("pipeline_model_parallel_layout")
    interleaved = (model.get("virtual_pipeline_model_parallel_size") or 1) > 1
    group = model.get("microbatch_group_size_per_vp_stage") if interleaved else None
    return ParallelSettings(
        world_size=world_size,
        expert_tensor_parallel_size=(model.get("expert_tensor_parallel_size") or 1)
        if model.get("num_moe_experts")
        else 1,
        overlap_p2p_comm=interleaved and bool(model.get("overlap_p2p_comm")),
        microbatch_group_size_per_vp_stage=None if group == model.get("pipeline_model_parallel_size") else group,
        pipeline_model_parallel_layout=layout if isinstance(layout, str) else _stages(layout),
        **{name: model[name] for name in same if name in model},
    )


def _stages(layout: list[list[str]] | None) -> tuple[tuple[str, ...], ...] | None:
    return None if layout is None else tuple(tuple(str(name) for name in stage) for stage in layout)


def _sharding(values: Mapping[str, Any], parallel: ParallelSettings) -> ShardingSettings:
    ddp, optimizer = values["ddp"], values["optimizer"]
    if values["dist"].get("use_megatron_fsdp"):
        strategy = ddp["data_parallel_sharding_strategy"]
    else:
        strategy = "distopt" if ddp.get("use_distributed_optimizer") else "ddp"
    bucket_size = ddp.get("bucket_size")
    if bucket_size is None:
        bucket_size = max(MIN_BUCKET_SIZE, BUCKET_SIZE_PER_RANK * parallel.data_context_parallel_size)
    if not ddp.get("overlap_grad_reduce"):
        bucket_size = None
    sharded_grads = strategy in ("optim_grads", "optim_grads_params")  # O5: forced on when the model is wrapped
    return ShardingSettings(
        strategy=strategy,
        overlap_grad_reduce=bool(ddp.get("overlap_grad_reduce")) or sharded_grads,
        overlap_param_gather=bool(ddp.get("overlap_param_gather")) or strategy == "optim_grads_params",
        bucket_size=bucket_size,
        grad_reduce_in_fp32=bool(ddp.get("grad_reduce_in_fp32")),
        average_in_collective=bool(ddp.get("average_in_collective")),
        check_for_nan_in_grad=bool(ddp.get("check_for_nan_in_grad")),
        num_distributed_optimizer_instances=ddp.get("num_distributed_optimizer_instances", 1),
        suggested_communication_unit_size=ddp.get("suggested_communication_unit_size"),
        outer_dp_sharding_strategy=ddp.get("outer_dp_sharding_strategy") or "no_shard",
        fsdp_double_buffer=bool(ddp.get("fsdp_double_buffer")),
        main_params_dtype=ddp.get("megatron_fsdp_main_params_dtype"),
        main_grads_dtype=ddp.get("megatron_fsdp_main_grads_dtype"),
        grad_comm_dtype=ddp.get("megatron_fsdp_grad_comm_dtype"),
        use_decoupled_grad=bool(
            ddp.get("megatron_fsdp_use_decoupled_grad") or optimizer.get("use_precision_aware_optimizer")
        ),
    )


def _optimizer(optimizer: Mapping[str, Any]) -> OptimizerSettings:
    names = [
        "optimizer",
        "use_precision_aware_optimizer",
        "main_params_dtype",
        "main_grads_dtype",
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
        "store_param_remainders",
        "clip_grad",
    ]
    return OptimizerSettings(**{name: optimizer[name] for name in names if name in optimizer})


def _recompute(model: Mapping[str, Any]) -> RecomputeSettings:
    granularity = model.get("recompute_granularity")
    full = granularity == "full"
    return RecomputeSettings(
        recompute_granularity=granularity,
        recompute_method=model.get("recompute_method") if full else None,
        recompute_num_layers=model.get("recompute_num_layers") if full else None,
        recompute_modules=tuple(model.get("recompute_modules") or ()) if granularity == "selective" else (),
        distribute_saved_activations=bool(model.get("distribute_saved_activations")),
    )


def _runtime(values: Mapping[str, Any]) -> RuntimeSettings:
    expandable, source = allocator_setting(values.get("env_vars") or {})
    connections = (values.get("env_vars") or {}).get("CUDA_DEVICE_MAX_CONNECTIONS")
    workspaces = (values.get("env_vars") or {}).get("CUBLAS_WORKSPACE_CONFIG")
    if workspaces is None and values["model"].get("deterministic_mode"):
        workspaces = DETERMINISTIC_WORKSPACES
    return RuntimeSettings(
        params_dtype=values["model"].get("params_dtype", "bfloat16"),
        expandable_segments=expandable,
        allocator_source=source,
        empty_unused_memory_level=values["train"].get("empty_unused_memory_level") or 0,
        cuda_device_max_connections=None if connections is None else str(connections),
        checkpoint_save=values["checkpoint"].get("save") is not None,
        cublas_workspace_config=None if workspaces is None else str(workspaces),
        check_for_nan_in_loss=bool((values.get("rerun_state_machine") or {}).get("check_for_nan_in_loss")),
    )


def allocator_setting(env: Mapping[str, Any]) -> tuple[bool, str]:
    """(whether the caching allocator uses expandable segments, which variable says so)."""
    for name in ALLOCATOR_VARIABLES:
        if env.get(name) is not None:
            options = [part.strip() for part in str(env[name]).split(",")]
            chosen = [
                o.partition(":")[2].strip() for o in options if o.partition(":")[0].strip() == "expandable_segments"
            ]
            return bool(chosen) and chosen[-1] == "True", f"{name}={env[name]}"
    return False, "PyTorch's default"
