"""What finalizing the model configuration fills in or overwrites.

Source: megatron-bridge 0.6.2, models/transformer_config.py:169-195, utils/cuda_graph.py:142-165; megatron-core 0.19.2,
transformer/transformer_config.py:1294-2560, model_parallel_config.py (``__post_init__``),
transformer/cuda_graph_config.py. Initialisation functions (``init_method`` and its kin) are left alone: they hold no
memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from estimator.catalog import fields as catalog

if TYPE_CHECKING:
    from estimator.job.effective import Draft

RULE = "model.finalize"
QWEN_VL = ("Qwen3VL", "Qwen35VL")
"""Providers that switch to per-token loss under context parallelism (qwen_vl/qwen3_vl_provider.py:137, qwen35:206)."""

GRAPH_SCOPES = {
    "full_iteration": ("cuda_graph_impl", "full_iteration"),
    "full_iteration_inference": ("inference_cuda_graph_scope", "block"),
}
"""Deprecated capture scopes and what they are migrated to (cuda_graph_config.py)."""


def finalize(draft: Draft) -> None:
    """Apply it to the section ``model``, in Bridge's order."""
    model = draft.values.get("model")
    if not isinstance(model, dict) or "num_layers" not in model or "tensor_model_parallel_size" not in model:
        return  # not a transformer configuration: GPTModelConfig and MegatronMIMO keep theirs inside

    def get(name: str) -> Any:
        return draft.get("model", name)

    def put(name: str, value: Any, rule: str = RULE) -> None:
        draft.set("model", name, value, rule)

    _hybrid_pattern(draft)
    _hybridep_padding(draft)
    if get("cuda_graph_impl") == "none":
        _clear_graph_modules(draft)
    short = str(get("_target_")).rpartition(".")[2]
    if short.startswith(QWEN_VL) and (get("context_parallel_size") or 1) > 1:
        put("calculate_per_token_loss", True)
    if (get("pipeline_model_parallel_size") or 1) > 1 and get("pipeline_dtype") is None:
        put("pipeline_dtype", get("params_dtype"))
    if get("sequence_parallel") and (get("tensor_model_parallel_size") or 1) <= 1:
        put("sequence_parallel", False, "A31")
    if get("expert_tensor_parallel_size") is None:
        etp = 1 if (get("expert_model_parallel_size") or 1) > 1 else get("tensor_model_parallel_size")
        put("expert_tensor_parallel_size", etp)
    _weight_shards(draft)
    if get("autocast_dtype") is None:
        put("autocast_dtype", get("params_dtype"))
    if get("microbatch_group_size_per_vp_stage") is None:
        put("microbatch_group_size_per_vp_stage", get("pipeline_model_parallel_size"))
    if get("fp32_residual_connection") and get("pipeline_dtype") is not None:
        put("pipeline_dtype", "float32")
    _dimensions(draft)
    _moe(draft)
    _recompute(draft)
    _pipeline_layout(draft)
    if draft.has("model", "embedding_init_method_std") and get("embedding_init_method_std") is None:
        put("embedding_init_method_std", get("init_method_std"))
    _cuda_graphs(draft)
    if draft.get("dataset", "enable_in_batch_packing") and (get("pipeline_model_parallel_size") or 1) > 1:
        put("variable_seq_lengths", True)


def _hybrid_pattern(draft: Draft) -> None:
    """One pattern for decoder and MTP layers, and the number of layers from it (hybrid_provider.py:170-254)."""
    old = draft.get("model", "hybrid_override_pattern")
    if old is not None:
        draft.set("model", "hybrid_layer_pattern", old, RULE)
        draft.set("model", "hybrid_override_pattern", None, RULE)
    pattern = draft.get("model", "hybrid_layer_pattern")
    if not isinstance(pattern, str):
        return
    mtp = draft.get("model", "mtp_hybrid_override_pattern")
    if mtp:
        copies = draft.get("model", "mtp_num_layers") or 0
        if draft.get("model", "mtp_use_repeated_layer"):
            copies = max(1, copies)
        pattern = "/".join([pattern.partition("/")[0], *([mtp] * min(copies, 1000))])
        draft.set("model", "hybrid_layer_pattern", pattern if copies else pattern + "/", RULE)
    layers = sum(1 for char in pattern.partition("/")[0] if char not in "|[]")
    draft.set("model", "num_layers", layers, RULE)


def _weight_shards(draft: Draft) -> None:
    for shards, size, remat in (
        ("tensor_parallel_num_weight_shards", "tensor_model_parallel_size", "gtp_weight_remat_size"),
        ("expert_tensor_parallel_num_weight_shards", "expert_tensor_parallel_size", "expert_gtp_weight_remat_size"),
    ):
        count, ranks = draft.get("model", shards), draft.get("model", size)
        if count and ranks:
            draft.set("model", remat, max(1, count // ranks), RULE)


def _dimensions(draft: Draft) -> None:
    def get(name: str) -> Any:
        return draft.get("model", name)

    heads = get("num_attention_heads") or 0
    if get("ffn_hidden_size") is None:
        draft.set("model", "ffn_hidden_size", 4 * (get("hidden_size") or 0), RULE)
    if get("kv_channels") is None and heads:
        draft.set("model", "kv_channels", (get("hidden_size") or 0) // heads, RULE)
    if get("num_query_groups") is None:
        draft.set("model", "num_query_groups", heads, RULE)
    if get("apply_query_key_layer_scaling"):
        draft.set("model", "attention_softmax_in_fp32", True, RULE)


def _moe(draft: Draft) -> None:
    def get(name: str) -> Any:
        return draft.get("model", name)

    if get("num_moe_experts") is not None and get("moe_ffn_hidden_size") is None:
        draft.set("model", "moe_ffn_hidden_size", get("ffn_hidden_size"), RULE)
    frequency = get("moe_layer_freq")
    mixed = (isinstance(frequency, list) and 0 in frequency) or (isinstance(frequency, int) and frequency > 1)
    if get("num_moe_experts") is None and get("moe_ffn_hidden_size") is not None and mixed:
        draft.set("model", "moe_ffn_hidden_size", None, RULE)
    if get("moe_enable_deepep"):
        draft.set("model", "moe_flex_dispatcher_backend", "deepep", RULE)
    deprecated = {v for v in (get("moe_deepep_num_sms"), get("moe_hybridep_num_sms")) if v is not None}
    if len(deprecated) == 1 and get("moe_flex_dispatcher_num_sms") is None:
        draft.set("model", "moe_flex_dispatcher_num_sms", deprecated.pop(), RULE)
    capacity = get("moe_expert_capacity_factor")
    if isinstance(capacity, (int, float)) and capacity < 0:
        draft.set("model", "moe_expert_capacity_factor", None, RULE)
    if get("moe_router_padding_for_fp8"):
        draft.set("model", "moe_router_padding_for_quantization", True, RULE)
    if not get("moe_router_group_topk") and get("moe_router_topk_limited_devices"):
        draft.set("model", "moe_router_group_topk", get("moe_router_topk_limited_devices"), RULE)
        draft.set("model", "moe_router_num_groups", get("expert_model_parallel_size"), RULE)


def _recompute(draft: Draft) -> None:
    modules = draft.get("model", "recompute_modules")
    if modules is None:
        modules = ["core_attn"]
        draft.set("model", "recompute_modules", modules, RULE)
    if draft.get("model", "moe_layer_recompute"):
        draft.set("model", "recompute_granularity", "selective", RULE)
        if "moe" not in modules:
            draft.set("model", "recompute_modules", [*modules, "moe"], RULE)


def _pipeline_layout(draft: Draft) -> None:
    """A layout of more stages than ranks means interleaving (transformer_config.py:1953-1981)."""
    layout = draft.get("model", "pipeline_model_parallel_layout")
    ranks = draft.get("model", "pipeline_model_parallel_size") or 1
    if isinstance(layout, str):
        stages = layout.count("|") + 1 if "*" not in layout and "(" not in layout else count_layout_stages(layout)
    elif isinstance(layout, list):
        stages = len(layout)
    else:
        return
    if draft.get("model", "virtual_pipeline_model_parallel_size") is None and stages // ranks > 1:
        draft.set("model", "virtual_pipeline_model_parallel_size", stages // ranks, RULE)


def count_layout_stages(layout: str) -> int:
    """Stages of a layout text such as ``Et*3|(tt|)*29,m|L``: bars between them, ``(...)*n`` repeats n times."""
    bars, index = 0, 0
    stack: list[int] = []
    while index < len(layout):
        char = layout[index]
        if char == "(":
            stack.append(bars)
        elif char == "|":
            bars += 1
        elif char == ")" and stack:
            start = stack.pop()
            digits = ""
            if layout[index + 1 : index + 2] == "*":
                rest = layout[index + 2 : index + 8]
                digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
            bars = start + (bars - start) * min(int(digits), 100_000) if digits else bars
        index += 1
    return bars + 1


def _clear_graph_modules(draft: Draft) -> None:
    draft.set("model", "cuda_graph_modules", [], RULE)
    if draft.has("model", "cuda_graph_scope"):
        draft.set("model", "cuda_graph_scope", None, RULE)


def _cuda_graphs(draft: Draft) -> None:
    if not draft.has("model", "cuda_graph_impl"):
        return
    if draft.get("model", "enable_cuda_graph"):
        draft.set("model", "cuda_graph_impl", "local", RULE)
    if draft.get("model", "external_cuda_graph"):
        draft.set("model", "cuda_graph_impl", "transformer_engine", RULE)
    scope = draft.get("model", "cuda_graph_scope")
    modules = draft.get("model", "cuda_graph_modules") if scope is None else scope
    if isinstance(modules, str):
        modules = modules.split(",") if modules else []
    modules = list(modules or [])
    kept = []
    for module in modules:
        if module in GRAPH_SCOPES:
            field, value = GRAPH_SCOPES[module]
            if not (module == "full_iteration_inference" and draft.get("model", "cuda_graph_impl") == "none"):
                draft.set("model", field, value, RULE)
        elif module != "full":
            kept.append(module)
    draft.set("model", "cuda_graph_modules", kept, RULE)
    draft.set("model", "cuda_graph_scope", None, RULE)
    if draft.get("model", "inference_cuda_graph_scope") is None and draft.has("model", "inference_cuda_graph_scope"):
        value = "layer" if draft.get("model", "cuda_graph_impl") == "local" else "none"
        draft.set("model", "inference_cuda_graph_scope", value, RULE)


def _hybridep_padding(draft: Draft) -> None:
    """Uneven-input padding of HybridEP where the dataset packs sequences (transformer_config.py:80-130)."""
    packed = draft.get("dataset", "enable_offline_packing") or draft.get("dataset", "enable_in_batch_packing")
    flex = draft.get("model", "moe_token_dispatcher_type") == "flex"
    hybrid = draft.get("model", "moe_flex_dispatcher_backend") == "hybridep"
    graphs = draft.get("model", "cuda_graph_impl") not in (None, "none")
    if packed and flex and hybrid and not graphs:
        for name in ("moe_hybridep_pad_uneven_dispatch_inputs", "moe_hybridep_pad_variable_tokens"):
            if draft.has("model", name):
                draft.set("model", name, True, RULE)


def is_transformer(target: str) -> bool:
    """Whether a model class is a transformer configuration with a language model in it."""
    return catalog.is_known_class(target) and "num_layers" in catalog.class_fields(target)
