"""Which jobs the memory model does not cover yet, as one table: a row goes when its kind of job is modelled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from estimator.errors import FieldProblem
from estimator.job.settings import DEEPEP_RECEIVED_TOKENS
from estimator.layout.layout_string import parse_layout

Values = Mapping[str, Any]
Row = tuple[str, Callable[[Any, Values], bool], str]

MODELLED_MODEL_CLASSES = frozenset(
    {
        "megatron.bridge.models.gpt_provider.GPTModelProvider",
        "megatron.bridge.models.mistral.mistral_provider.MistralModelProvider",
        "megatron.bridge.models.mla_provider.MLAModelProvider",
    }
)
"""Text-only providers that build a plain GPTModel of the default Transformer Engine layers."""

MODELLED_DATASET_CLASSES = frozenset({"GPTDatasetConfig", "MockGPTDatasetConfig", "GPTFIMDatasetConfig"})
"""Datasets whose batches are exactly [micro_batch_size, seq_length] and whose mask is the causal one."""

PACKED_DATASET_CLASS = "GPTSFTDatasetConfig"
MODELLED_LAYER_SPECS = frozenset({"default_layer_spec", "transformer_engine_layer_spec", None})
MODELLED_BLOCK_SPECS = frozenset(
    {"get_gpt_decoder_block_spec", "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec"}
)
"""Layer specifications that follow ``moe_layer_freq``; the default ones build experts in every layer."""
MODELLED_FP8_RECIPES = frozenset({"delayed", "tensorwise", "blockwise"})
MODELLED_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def _is_set(value: Any, _: Values) -> bool:
    return bool(value)


def _over_one(value: Any, _: Values) -> bool:
    return isinstance(value, (int, float)) and value > 1


def _given(value: Any, _: Values) -> bool:
    return value is not None


def _fsdp(values: Values) -> bool:
    return bool(values["dist"].get("use_megatron_fsdp") or values["ddp"].get("use_megatron_fsdp"))


def _wrong_strategy(value: Any, values: Values) -> bool:
    return _fsdp(values) and value not in MODELLED_STRATEGIES


def _instances_reduce_copies(value: Any, values: Values) -> bool:
    """Each bucket's shard is copied to this type for the all-reduce between instances
    (param_and_grad_buffer.py:4156-4171)."""
    ddp = values["ddp"]
    instances = ddp.get("num_distributed_optimizer_instances") or 1
    grads = ddp.get("megatron_fsdp_main_grads_dtype") or values["model"].get("params_dtype")
    return _fsdp(values) and instances > 1 and value not in (None, grads)


def _not_full(value: Any, values: Values) -> bool:
    return value not in (None, "full", "selective")


def _unknown_recompute(value: Any, values: Values) -> bool:
    modelled = {"core_attn", "layernorm", "mlp"}
    if values["model"].get("num_moe_experts"):
        modelled |= {"moe", "moe_act", "shared_experts"}
    if values["model"].get("multi_latent_attention"):
        modelled |= {"mla_up_proj"}
    selective = values["model"].get("recompute_granularity") == "selective"
    return selective and bool(set(value or ()) - modelled)


def _odd_window(value: Any, _: Values) -> bool:
    return value is not None and not (
        isinstance(value, list) and len(value) == 2 and all(isinstance(edge, int) for edge in value)
    )


def _vocabulary_unknown(value: Any, values: Values) -> bool:
    return not value and not (values.get("tokenizer") or {}).get("vocab_size")


def _unknown_batches(value: Any, values: Values) -> bool:
    name = str(value).rpartition(".")[2]
    return name not in MODELLED_DATASET_CLASSES and not (name == PACKED_DATASET_CLASS and _packed_to_the_full(values))


def _packed_to_the_full(values: Values) -> bool:
    """Sequences packed offline and padded to the model's length: batches of [1, seq_length] whose attention keeps to
    single sequences (megatron-bridge 0.6.2 data/datasets/gpt_sft.py GPTSFTPackedDataset.collate_fn). Attention and
    fused rotary embedding then have the tensors that they have for one sequence of that length, to which the unfused
    one, which goes sequence by sequence, comes near (megatron-core 0.19.2 rope_utils.py:189-262). Keys and values of
    latents would be padded, and context parallelism would cut each sequence."""
    dataset, model, train = values["dataset"], values["model"], values["train"]
    specs, options = dataset.get("offline_packing_specs") or {}, dataset.get("dataset_kwargs") or {}
    length = model.get("seq_length")
    return bool(
        dataset.get("enable_offline_packing")
        and options.get("pad_to_max_length")
        and specs.get("packed_sequence_size") == dataset.get("seq_length") == length
        and train.get("micro_batch_size") == 1
        and (model.get("context_parallel_size") or 1) == 1
        and not model.get("multi_latent_attention")
    )


def _with_fp8(predicate: Callable[[Any, Values], bool]) -> Callable[[Any, Values], bool]:
    return lambda value, values: bool(values["model"].get("fp8")) and predicate(value, values)


def _unmodelled_primary_weights(value: Any, values: Values) -> bool:
    return bool(value) and (_fsdp(values) or not values["ddp"].get("use_distributed_optimizer"))


def _blockwise_gather(value: Any, values: Values) -> bool:
    model = values["model"]
    split = (model.get("tensor_model_parallel_size") or 1) > 1
    return bool(value) and split and model.get("fp8_recipe") == "blockwise"


def _with_experts(predicate: Callable[[Any, Values], bool]) -> Callable[[Any, Values], bool]:
    return lambda value, values: bool(values["model"].get("num_moe_experts")) and predicate(value, values)


def _unknown_backend(value: Any, values: Values) -> bool:
    """DeepEP has settings for these numbers of ranks alone (deep_ep/buffers/legacy.py:233-290)."""
    model = values["model"]
    if model.get("moe_token_dispatcher_type") != "flex":
        return False
    ranks = (model.get("expert_model_parallel_size") or 1) * (model.get("expert_tensor_parallel_size") or 1)
    return value not in ("deepep", "hybridep") or (value == "deepep" and ranks not in DEEPEP_RECEIVED_TOKENS)


def _with_prediction(predicate: Callable[[Any, Values], bool]) -> Callable[[Any, Values], bool]:
    return lambda value, values: bool(values["model"].get("mtp_num_layers")) and predicate(value, values)


def _prediction_beside(value: Any, values: Values) -> bool:
    model = values["model"]
    tied = model.get("share_embeddings_and_output_weights")
    return bool(value) and bool(tied or model.get("fp8") or _fsdp(values))


def _prediction_apart(value: Any, values: Values) -> bool:
    if value is None:
        return False
    try:
        stages = parse_layout(value)
    except (TypeError, ValueError):
        return False
    return bool(stages[-1].count("m") != values["model"]["mtp_num_layers"])


def _with_latents(predicate: Callable[[Any, Values], bool]) -> Callable[[Any, Values], bool]:
    return lambda value, values: bool(values["model"].get("multi_latent_attention")) and predicate(value, values)


def _kind_without_fp8(value: Any, values: Values) -> bool:
    model = values["model"]
    return bool(value) and bool(model.get("num_moe_experts") or model.get("multi_latent_attention"))


def _unknown_spec(value: Any, values: Values) -> bool:
    model = values["model"]
    if model.get("multi_latent_attention"):
        return value not in MODELLED_BLOCK_SPECS
    return value not in MODELLED_LAYER_SPECS | MODELLED_BLOCK_SPECS


def _odd_balancing(value: Any, _: Values) -> bool:
    kinds = value if isinstance(value, list) else [value]
    return not set(kinds) <= {"aux_loss", "seq_aux_loss", "global_aux_loss", "none", "noaux_tc"}


NOT_MODELLED: tuple[Row, ...] = (
    # path, predicate(value, whole document), what the field says
    ("model._target_", lambda v, _: v not in MODELLED_MODEL_CLASSES, "this model class"),
    ("model.mtp_num_layers", _prediction_beside, "multi-token prediction with tied embeddings, Megatron FSDP or FP8"),
    ("model.mtp_use_repeated_layer", _with_prediction(_is_set), "one layer for all depths of prediction"),
    ("model.mtp_detach_heads", _with_prediction(_is_set), "detached prediction heads"),
    (
        "model.pipeline_model_parallel_layout",
        _with_prediction(_prediction_apart),
        "prediction layers on another stage than the loss",
    ),
    ("model.fp8", _kind_without_fp8, "experts or latent attention in FP8"),
    ("model.context_parallel_size", _with_latents(_over_one), "latent attention under context parallelism"),
    ("model.mla_down_proj_fusion", _with_latents(_is_set), "one product for both latents"),
    ("model.rope_type", _with_latents(lambda v, _: v not in ("rope", "yarn")), "this rotary embedding of latents"),
    ("model.moe_grouped_gemm", _with_experts(lambda v, _: not v), "experts one after another"),
    (
        "model.moe_token_dispatcher_type",
        _with_experts(lambda v, _: v not in ("alltoall", "flex")),
        "this token dispatcher",
    ),
    ("model.moe_flex_dispatcher_backend", _with_experts(_unknown_backend), "this backend of the flexible dispatcher"),
    ("model.moe_expert_rank_capacity_factor", _with_experts(_given), "a capacity of each rank"),
    ("model.moe_hybridep_pad_uneven_dispatch_inputs", _with_experts(_is_set), "padded inputs of HybridEP"),
    ("model.moe_apply_probs_on_input", _with_experts(_is_set), "probabilities applied before the experts"),
    ("model.moe_router_padding_for_quantization", _with_experts(_is_set), "routing padded for quantization"),
    ("model.moe_router_load_balancing_type", _with_experts(_odd_balancing), "this load balancing"),
    ("model.moe_z_loss_coeff", _with_experts(_given), "a z-loss of the router"),
    ("model.moe_input_jitter_eps", _with_experts(_given), "jitter of the router's input"),
    ("model.moe_expert_capacity_factor", _with_experts(_given), "a capacity of each expert"),
    ("model.moe_router_dtype", _with_experts(lambda v, _: v == "fp64"), "routing in FP64"),
    ("model.moe_mlp_glu_interleave_size", _with_experts(_given), "interleaved gates of experts"),
    ("model.moe_paged_stash", _with_experts(_is_set), "paged stashes of experts"),
    ("model.moe_single_grouped_weight", _with_experts(_is_set), "one weight for all experts"),
    ("model.moe_router_force_biased", _with_experts(_given), "a forced bias of the router"),
    ("model.add_bias_linear", _with_experts(_is_set), "experts with biases"),
    ("model.activation_func_fp8_input_store", _with_experts(_is_set), "activations of experts stored in FP8"),
    ("model.use_te_activation_func", _with_experts(_is_set), "Transformer Engine's activations"),
    (
        "model.overlap_dispatch_backward_with_experts_wgrad",
        _with_experts(_is_set),
        "delayed weight gradients of experts",
    ),
    ("model.dense_grouped_gemm", _is_set, "grouped products in dense layers"),
    ("model.use_grouped_gemm_for_shared_expert", _with_experts(_is_set), "a grouped product for shared experts"),
    (
        "ddp.fsdp_double_buffer",
        _with_experts(lambda v, values: bool(v) and _fsdp(values)),
        "double buffers with experts",
    ),
    ("model.overlap_p2p_comm_warmup_flush", _is_set, "overlapped pipeline communication in warm-up and flush"),
    ("model.is_hybrid_model", _is_set, "hybrid (Mamba) layers"),
    ("model.experimental_attention_variant", _given, "an experimental attention variant"),
    ("model.heterogeneous_block_specs", _is_set, "layers of different shapes"),
    ("model.vocab_size", _vocabulary_unknown, "a vocabulary whose size only the tokenizer knows"),
    ("model.fp8_recipe", _with_fp8(lambda v, _: v not in MODELLED_FP8_RECIPES), "this FP8 recipe"),
    (
        "model.fp8_param",
        _with_fp8(_unmodelled_primary_weights),
        "FP8 weights without the distributed optimizer",
    ),
    ("model.fp8_dot_product_attention", _with_fp8(_is_set), "attention in FP8"),
    ("model.fp8_multi_head_attention", _with_fp8(_is_set), "attention in FP8"),
    ("model.fp8_wgrad", _with_fp8(lambda v, _: not v), "weight gradients outside of FP8"),
    ("model.disable_parameter_transpose_cache", _with_fp8(_is_set), "FP8 weights quantized anew in each microbatch"),
    ("model.sequence_parallel", _with_fp8(_blockwise_gather), "block-wise FP8 under sequence parallelism"),
    ("model.fp4", _is_set, "FP4"),
    ("model.bf16", lambda v, _: not v, "training in anything but BF16"),
    ("model.fp16", _is_set, "FP16"),
    ("model.params_dtype", lambda v, _: v != "bfloat16", "parameters in anything but BF16"),
    ("model.fp32_residual_connection", _is_set, "a residual stream in FP32"),
    ("model.transformer_impl", lambda v, _: v != "transformer_engine", "layers other than Transformer Engine's"),
    ("model.transformer_layer_spec", _unknown_spec, "a layer specification of its own"),
    ("model.use_transformer_engine_full_layer_spec", _is_set, "Transformer Engine's whole-layer module"),
    ("model.use_transformer_engine_op_fuser", _is_set, "Transformer Engine's operation fuser"),
    ("model.attention_backend", lambda v, _: v in ("local", "unfused"), "unfused attention"),
    ("model.softmax_type", lambda v, _: v not in (None, "vanilla"), "attention sinks"),
    ("model.window_size", _odd_window, "this attention window"),
    ("model.cpu_offloading", _is_set, "offloading of activations or weights"),
    ("model.fine_grained_activation_offloading", _is_set, "fine-grained offloading of activations"),
    ("model.cuda_graph_impl", lambda v, _: v not in (None, "none"), "CUDA graphs"),
    ("model.recompute_granularity", _not_full, "this recompute granularity"),
    ("model.recompute_modules", _unknown_recompute, "recomputing these modules"),
    ("model.tp_comm_overlap", _is_set, "overlap of tensor-parallel communication (user buffers)"),
    ("model.overlap_moe_expert_parallel_comm", _is_set, "overlap of expert-parallel communication"),
    ("model.delay_wgrad_compute", _is_set, "delayed weight gradients"),
    ("model.defer_embedding_wgrad_compute", _is_set, "deferred embedding weight gradients"),
    ("model.gtp_weight_remat_size", _over_one, "weight shards beyond tensor parallelism"),
    ("model.hybrid_context_parallel", _is_set, "hybrid context parallelism"),
    ("model.hierarchical_context_parallel_sizes", _given, "hierarchical context parallelism"),
    ("model.quant_recipe", _given, "a quantization recipe"),
    ("model.restore_modelopt_state", _is_set, "ModelOpt"),
    ("model.fp16_lm_cross_entropy", _is_set, "cross entropy in FP16"),
    ("model.variable_seq_lengths", _is_set, "sequences of varying length"),
    ("ddp.data_parallel_sharding_strategy", _wrong_strategy, "this sharding strategy"),
    ("ddp.megatron_fsdp_grad_comm_dtype", _instances_reduce_copies, "gradients reduced between instances in this type"),
    ("ddp.num_buckets", _given, "a number of buckets"),
    ("ddp.nccl_ub", _is_set, "NCCL user buffers"),
    ("ddp.reduce_scatter_with_fp32_accumulation", _is_set, "reduce-scatter with FP32 accumulation"),
    ("ddp.param_name_patterns_for_fp32_local_accumulation", _is_set, "local FP32 accumulation by parameter name"),
    ("ddp.megatron_fsdp_max_pool_double_buffer", _is_set, "the max-pool double buffer"),
    ("dist.use_torch_fsdp2", _is_set, "torch FSDP2"),
    ("optimizer.optimizer", lambda v, _: v not in ("adam", "sgd"), "this optimizer"),
    ("optimizer.optimizer_cpu_offload", _is_set, "optimizer states on the host"),
    ("optimizer.use_layer_wise_distributed_optimizer", _is_set, "the layer-wise distributed optimizer"),
    ("optimizer.overlap_param_gather_with_optimizer_step", _is_set, "parameter gather during the optimizer step"),
    ("peft", _given, "PEFT"),
    ("dataset._target_", _unknown_batches, "batches of this dataset"),
    ("train.rampup_batch_size", _given, "a batch size that ramps up"),
)


def fields_in_the_way(values: Values) -> tuple[FieldProblem, ...]:
    """Every field of an effective document that no part of the estimate covers yet."""
    found: list[FieldProblem] = []
    for path, predicate, what in NOT_MODELLED:
        section, _, name = path.partition(".")
        owner = values.get(section)
        if name and not (isinstance(owner, dict) and name in owner):
            continue
        value = owner[name] if name and isinstance(owner, dict) else owner
        if predicate(value, values):
            found.append(FieldProblem(f"job.config.{path}", f"not modelled yet: {what} ({_short(value)})"))
    return tuple(found)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("_target_", "a mapping")).rpartition(".")[2]
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
