"""Rules of the model's own configuration: recomputation, offloading, expert overlap (A26 to A31); paths as above."""

from __future__ import annotations

from estimator.rules.rule import Rule

RECOMPUTE_MODULES = frozenset(
    {"core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out"}
)
OFFLOAD_MODULES = frozenset(
    {"core_attn", "attn_proj", "expert_fc1", "fused_group_mlp", "moe_act", "attn_norm", "mlp_norm", "qkv_linear"}
)
INSIDE_MOE = frozenset({"moe_act", "expert_fc1", "fused_group_mlp"})

RECOMPUTE_RULES: tuple[Rule, ...] = (
    Rule(
        "A28",
        "error",
        ("model.recompute_granularity",),
        lambda f: f.granularity not in ("full", "selective"),
        "recompute_granularity {f.granularity!r} does not exist.",
        "Use 'full', 'selective' or None.",
        "C/transformer/transformer_config.py:1724-1729",
    ),
    Rule(
        "A28",
        "error",
        ("model.recompute_method", "model.recompute_num_layers"),
        lambda f: (
            f.granularity == "full"
            and (f.model.get("recompute_method") not in ("block", "uniform") or not f.model.get("recompute_num_layers"))
        ),
        "Full recomputation needs recompute_method (block or uniform) and recompute_num_layers.",
        "Set model.recompute_method = 'uniform' and model.recompute_num_layers = 1.",
        "C/transformer/transformer_config.py:1731-1749",
    ),
    Rule(
        "A28",
        "error",
        ("model.recompute_num_layers", "model.recompute_method"),
        lambda f: f.granularity == "selective" and f.model.get("recompute_num_layers") is not None,
        "Selective recomputation works on modules, so recompute_num_layers must be None.",
        "Set model.recompute_num_layers = None.",
        "C/transformer/transformer_config.py:1750-1756",
    ),
    Rule(
        "A28",
        "error",
        ("model.recompute_modules",),
        lambda f: not RECOMPUTE_MODULES.issuperset(f.recompute),
        "recompute_modules {f.recompute} names a module that cannot be recomputed.",
        "Choose from core_attn, moe_act, layernorm, mla_up_proj, mlp, moe, shared_experts, gdn_norm_out.",
        "C/transformer/transformer_config.py:1769-1785",
    ),
    Rule(
        "A28",
        "error",
        ("model.recompute_modules", "model.moe_grouped_gemm"),
        lambda f: "moe_act" in f.recompute and not f.model.get("moe_grouped_gemm"),
        "Recomputing moe_act needs grouped GEMM.",
        "Set model.moe_grouped_gemm = True, or take moe_act out.",
        "C/transformer/transformer_config.py:1787-1790",
    ),
    Rule(
        "A28",
        "error",
        ("model.recompute_modules", "model.multi_latent_attention"),
        lambda f: "mla_up_proj" in f.recompute and not f.model.get("multi_latent_attention"),
        "mla_up_proj exists in multi-latent attention only.",
        "Take mla_up_proj out of model.recompute_modules.",
        "C/transformer/transformer_config.py:1792-1796",
    ),
    Rule(
        "A28",
        "error",
        ("model.recompute_modules", "model.moe_shared_expert_overlap"),
        lambda f: (
            "shared_experts" in f.recompute
            and f.model.get("moe_shared_expert_intermediate_size") is not None
            and f.model.get("moe_shared_expert_overlap")
        ),
        "Overlapped shared experts cannot be recomputed.",
        "Set model.moe_shared_expert_overlap = False, or take shared_experts out.",
        "C/transformer/transformer_config.py:1816-1823",
    ),
    Rule(
        "A28",
        "error",
        ("model.recompute_modules", "mixed_precision.fp8_recipe"),
        lambda f: (
            f.model.get("fp8")
            and f.model.get("fp8_recipe") == "delayed"
            and ("moe_act" in f.recompute or "layernorm" in f.recompute)
        ),
        "Delayed FP8 scaling does not support recomputing moe_act or layernorm.",
        "Take them out of model.recompute_modules, or use another FP8 recipe.",
        "C/transformer/transformer_config.py:1825-1831",
    ),
    Rule(
        "A28",
        "error",
        ("model.distribute_saved_activations", "model.sequence_parallel"),
        lambda f: f.model.get("distribute_saved_activations") and f.model.get("sequence_parallel"),
        "Saved activations are already split by sequence parallelism.",
        "Set model.distribute_saved_activations = False.",
        "C/transformer/transformer_config.py:1758-1763",
    ),
)

CPU_OFFLOAD_RULES: tuple[Rule, ...] = (
    Rule(
        "A26",
        "error",
        ("model.cpu_offloading_num_layers", "model.num_layers"),
        lambda f: not 0 <= (f.model.get("cpu_offloading_num_layers") or 0) < (f.model.get("num_layers") or 0),
        "{f.model[cpu_offloading_num_layers]} layers cannot be offloaded of {f.model[num_layers]}; one must stay.",
        "Set model.cpu_offloading_num_layers below model.num_layers.",
        "C/transformer/transformer_config.py:1707-1712",
    ),
    Rule(
        "A26",
        "error",
        ("model.cpu_offloading", "model.pipeline_model_parallel_size"),
        lambda f: f.pp > 1,
        "Activation offloading to the CPU works without pipeline parallelism only.",
        "Set model.cpu_offloading = False.",
        "C/transformer/transformer_config.py:1714-1717",
    ),
    Rule(
        "A26",
        "error",
        ("model.cpu_offloading", "model.recompute_granularity"),
        lambda f: f.granularity is not None,
        "Activation offloading to the CPU excludes any recomputation, selective too.",
        "Set model.recompute_granularity = None, or model.cpu_offloading = False.",
        "C/transformer/transformer_config.py:1719-1722",
    ),
    Rule(
        "A26",
        "error",
        ("model.cpu_offloading", "model.fine_grained_activation_offloading", "model.moe_paged_stash"),
        lambda f: f.model.get("fine_grained_activation_offloading") or f.model.get("moe_paged_stash"),
        "Two kinds of activation offloading are switched on.",
        "Keep one of cpu_offloading, fine_grained_activation_offloading and moe_paged_stash.",
        "C/transformer/transformer_config.py:1848-1851,1904-1906",
    ),
)

FINE_GRAINED_OFFLOAD_RULES: tuple[Rule, ...] = (
    Rule(
        "A27",
        "error",
        ("model.offload_modules",),
        lambda f: not f.offload or not OFFLOAD_MODULES.issuperset(f.offload),
        "offload_modules {f.offload} is empty or names a module that cannot be offloaded.",
        "Choose from core_attn, attn_proj, expert_fc1, fused_group_mlp, moe_act, attn_norm, mlp_norm, qkv_linear.",
        "C/transformer/transformer_config.py:1852-1867",
    ),
    Rule(
        "A27",
        "error",
        ("model.offload_modules",),
        lambda f: "attn_proj" in f.offload and "core_attn" not in f.offload,
        "The input of attn_proj is the output of core_attn, so they are offloaded together.",
        "Add core_attn to model.offload_modules.",
        "C/transformer/transformer_config.py:1868-1873",
    ),
    Rule(
        "A27",
        "error",
        ("model.offload_modules", "model.recompute_modules"),
        lambda f: "moe" in f.recompute and not INSIDE_MOE.isdisjoint(f.offload),
        "Parts of the MoE layer are offloaded while the whole layer is recomputed.",
        "Take moe out of model.recompute_modules, or those parts out of model.offload_modules.",
        "C/transformer/transformer_config.py:1874-1885",
    ),
    Rule(
        "A27",
        "error",
        ("model.fine_grained_activation_offloading", "model.transformer_impl"),
        lambda f: f.model.get("transformer_impl", "transformer_engine") != "transformer_engine",
        "Fine-grained offloading is implemented for Transformer Engine only.",
        "Set model.transformer_impl = 'transformer_engine'.",
        "B/training/config.py:2043-2048",
    ),
    Rule(
        "A27",
        "error",
        ("env_vars.NVTE_CPU_OFFLOAD_V1",),
        lambda f: (
            not f.before("transformer_engine", "2.10.0") and str(f.env_vars.get("NVTE_CPU_OFFLOAD_V1", "0")) != "1"
        ),
        "Transformer Engine 2.10 and newer would offload the weights too without NVTE_CPU_OFFLOAD_V1=1.",
        'Set env_vars["NVTE_CPU_OFFLOAD_V1"] = 1.',
        "B/training/config.py:2050-2057",
    ),
)

EXPERT_OVERLAP_RULES: tuple[Rule, ...] = (
    Rule(
        "A29",
        "error",
        ("comm_overlap.overlap_moe_expert_parallel_comm",),
        lambda f: (
            f.ep <= 1
            or f.model.get("moe_token_dispatcher_type") not in ("alltoall", "flex")
            or not (f.model.get("bf16") or f.model.get("fp16"))
            or (f.pp > 1 and f.model.get("virtual_pipeline_model_parallel_size") is None)
            or f.model.get("moe_shared_expert_overlap")
            or f.model.get("mtp_num_layers") not in (None, 0, 1)
        ),
        "Overlapping expert communication needs EP > 1, the dispatcher alltoall or flex, BF16 or FP16, virtual "
        "pipeline stages where there is a pipeline, no overlapped shared experts and at most one MTP layer.",
        "Set comm_overlap.overlap_moe_expert_parallel_comm = False.",
        "B/training/comm_overlap.py:478-518",
    ),
    Rule(
        "A29",
        "error",
        ("comm_overlap.overlap_moe_expert_parallel_comm", "model.recompute_granularity", "model.recompute_modules"),
        lambda f: (
            f.granularity == "full"
            or f.model.get("recompute_method") is not None
            or f.model.get("recompute_num_layers") is not None
            or "moe" in (f.model.get("recompute_modules") or ())
        ),
        "Overlapping expert communication excludes full recomputation and recomputing the MoE layer.",
        "Switch the overlap off, or recompute other modules.",
        "B/training/comm_overlap.py:501-514",
    ),
)
