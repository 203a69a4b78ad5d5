"""Rules of Megatron FSDP: what validate() asserts (A), and what only the model build refuses or gets wrong (B).

Paths in ``source``: B/ = megatron/bridge/ of megatron-bridge 0.6.2; C/ = megatron/core/, T/ = megatron/training/ of
megatron-core 0.19.2; F/ = C/distributed/fsdp/src/megatron_fsdp/.
"""

from __future__ import annotations

from estimator.rules.facts import FSDP_STRATEGIES
from estimator.rules.rule import Rule

FSDP_RULES: tuple[Rule, ...] = (
    Rule(
        "A1",
        "error",
        ("dist.use_megatron_fsdp", "dist.use_torch_fsdp2"),
        lambda f: f.fsdp2,
        "Megatron FSDP and torch FSDP2 are both switched on; Bridge accepts one of them.",
        "Set dist.use_torch_fsdp2 = False.",
        "B/training/config.py:1342",
    ),
    Rule(
        "A7",
        "error",
        ("checkpoint.ckpt_format", "checkpoint.save", "checkpoint.load"),
        lambda f: f.saves_or_loads and f.checkpoint.get("ckpt_format") != "fsdp_dtensor",
        "Megatron FSDP saves and loads fsdp_dtensor checkpoints only; ckpt_format is {f.checkpoint[ckpt_format]}.",
        'Set checkpoint.ckpt_format = "fsdp_dtensor" and a new folder for save and load.',
        "B/training/config.py:1097-1101",
    ),
    Rule(
        "A8",
        "error",
        ("env_vars.CUDA_DEVICE_MAX_CONNECTIONS",),
        lambda f: f.max_connections == "1",
        "CUDA_DEVICE_MAX_CONNECTIONS is 1; Megatron FSDP needs it unset or larger than 1.",
        'Set env_vars["CUDA_DEVICE_MAX_CONNECTIONS"] = 32, and export 32 or unset it: an exported value wins.',
        "B/training/config.py:1102-1104,1832-1850",
    ),
    Rule(
        "A9",
        "error",
        ("ddp.fsdp_manual_registration", "ddp.nccl_ub"),
        lambda f: f.ddp.get("fsdp_manual_registration") and not f.ddp.get("nccl_ub"),
        "fsdp_manual_registration registers NCCL user buffers, but nccl_ub is off.",
        "Set ddp.fsdp_manual_registration = False, or ddp.nccl_ub = True.",
        "B/training/config.py:1105-1110",
    ),
    Rule(
        "A10",
        "error",
        ("train.check_weight_hash_across_dp_replicas_interval", "ddp.data_parallel_sharding_strategy"),
        lambda f: (
            f.strategy == "optim_grads_params"
            and f.train.get("check_weight_hash_across_dp_replicas_interval") is not None
        ),
        "Weights are sharded, so there are no replicas whose hashes could be compared.",
        "Set train.check_weight_hash_across_dp_replicas_interval = None.",
        "B/training/config.py:1111-1115",
    ),
    Rule(
        "A11",
        "error",
        ("dist.use_tp_pp_dp_mapping",),
        lambda f: f.dist.get("use_tp_pp_dp_mapping"),
        "The tp-pp-dp rank order is not supported with Megatron FSDP.",
        "Set dist.use_tp_pp_dp_mapping = False.",
        "B/training/config.py:1116",
    ),
    Rule(
        "B1",
        "error",
        ("model.pipeline_model_parallel_size",),
        lambda f: f.pp > 1,
        "Megatron FSDP arranges its ranks as DP x CP x TP, so pipeline_model_parallel_size {f.pp} fails when the model "
        "is built, although validate() passes it.",
        "Set model.pipeline_model_parallel_size = 1, or keep the pipeline and use the distributed optimizer.",
        "C/distributed/fsdp/mcore_fsdp_adapter.py:486-496,555-567 (run on 4 and 8 ranks: EinopsError)",
    ),
    Rule(
        "B2",
        "error",
        ("ddp.data_parallel_sharding_strategy",),
        lambda f: f.strategy not in FSDP_STRATEGIES,
        "{f.strategy!r} is no sharding strategy; validate() does not check the name, the model build does.",
        "Use no_shard, optim, optim_grads or optim_grads_params.",
        "F/param_and_grad_buffer.py:2323-2342",
    ),
    Rule(
        "B3",
        "error",
        ("ddp.outer_dp_sharding_strategy",),
        lambda f: f.ddp.get("outer_dp_sharding_strategy", "no_shard") not in ("no_shard", "optim"),
        "The outer strategy {f.ddp[outer_dp_sharding_strategy]!r} does not exist.",
        "Use no_shard or optim.",
        "F/param_and_grad_buffer.py:2491-2506",
    ),
    Rule(
        "B3",
        "error",
        ("ddp.outer_dp_sharding_strategy", "ddp.num_distributed_optimizer_instances"),
        lambda f: f.ddp.get("outer_dp_sharding_strategy") == "optim" and f.instances <= 1,
        "The outer strategy optim needs more than one optimizer instance; with one its helper buffer does not exist.",
        "Set ddp.num_distributed_optimizer_instances > 1, or ddp.outer_dp_sharding_strategy = 'no_shard'.",
        "F/param_and_grad_buffer.py:2491-2506",
    ),
    Rule(
        "B3",
        "error",
        ("ddp.outer_dp_sharding_strategy", "ddp.data_parallel_sharding_strategy"),
        lambda f: f.ddp.get("outer_dp_sharding_strategy") == "optim" and f.strategy != "optim_grads_params",
        "The outer strategy optim is implemented for optim_grads_params only, not for {f.strategy}.",
        "Set ddp.data_parallel_sharding_strategy = 'optim_grads_params'.",
        "F/param_and_grad_buffer.py:4665-4679",
    ),
    Rule(
        "B5",
        "warning",
        ("ddp.fsdp_double_buffer", "ddp.nccl_ub"),
        lambda f: f.strategy != "optim_grads_params" and (f.ddp.get("fsdp_double_buffer") or f.ddp.get("nccl_ub")),
        "Only FSDP units are double-buffered, and {f.strategy} has none: the setting does nothing.",
        "Set both to False, or use optim_grads_params.",
        "F/param_and_grad_buffer.py:2517; C/distributed/fsdp/mcore_fsdp_adapter.py:158-164",
        fixed_in="0.20.0",
    ),
    Rule(
        "B6",
        "error",
        ("model.overlap_moe_expert_parallel_comm", "ddp.fsdp_double_buffer", "model.cuda_graph_impl"),
        lambda f: (
            f.model.get("overlap_moe_expert_parallel_comm")
            and (
                f.ddp.get("fsdp_double_buffer")
                or (f.model.get("cuda_graph_impl") or "none") not in ("none", "full_iteration")
            )
        ),
        "Overlapping expert communication with FSDP excludes double buffers and per-layer CUDA graphs.",
        "Set ddp.fsdp_double_buffer = False and model.cuda_graph_impl = 'none', or switch the overlap off.",
        "C/distributed/fsdp/mcore_fsdp_adapter.py:168-192",
    ),
    Rule(
        "B7",
        "error",
        ("model.init_model_with_meta_device", "ddp.data_parallel_sharding_strategy"),
        lambda f: f.strategy == "no_shard" and f.model.get("init_model_with_meta_device"),
        "no_shard has no weight buffer that would materialise parameters built on the meta device.",
        "Set model.init_model_with_meta_device = False.",
        "C/transformer/transformer_config.py:405-409; B/models/model_provider.py:647-709",
    ),
    Rule(
        "B8",
        "error",
        ("optimizer.optimizer",),
        lambda f: f.optimizer.get("optimizer", "adam") not in ("adam", "sgd"),
        "The optimizer {f.optimizer[optimizer]!r} does not work on sharded parameters.",
        "Use adam or sgd, or the distributed optimizer instead of Megatron FSDP.",
        "T/training/arguments.py:1127,1684-1685 (Megatron-LM's parser; Bridge passes it)",
    ),
    Rule(
        "B9",
        "error",
        ("model.cuda_graph_impl",),
        lambda f: f.model.get("cuda_graph_impl") in ("transformer_engine", "local"),
        "Per-layer CUDA graphs ({f.model[cuda_graph_impl]}) do not work with FSDP's module hooks.",
        "Set model.cuda_graph_impl = 'none'.",
        "B/recipes/nemotronh/gb200/nemotron_3_nano.py:186-191",
    ),
    Rule(
        "B9",
        "warning",
        ("model.cuda_graph_impl", "ddp.fsdp_all_gather_in_start_param_sync"),
        lambda f: f.model.get("cuda_graph_impl") == "full_iteration",
        "A full-iteration CUDA graph with Megatron FSDP is used by one of NVIDIA's recipes only.",
        "Set model.cuda_graph_impl = 'none', or at least ddp.fsdp_all_gather_in_start_param_sync = False.",
        "C/distributed/distributed_data_parallel_config.py:152-160",
    ),
    Rule(
        "B10",
        "error",
        ("model.gradient_accumulation_fusion",),
        lambda f: f.model.get("gradient_accumulation_fusion") and f.before("transformer_engine", "2.10"),
        "Gradient accumulation fusion with Megatron FSDP needs Transformer Engine 2.10 or newer.",
        "Set model.gradient_accumulation_fusion = False, or use a newer Transformer Engine.",
        "C/distributed/fsdp/mcore_fsdp_adapter.py:147-151",
    ),
    Rule(
        "B10",
        "error",
        ("model.gradient_accumulation_fusion", "ddp.data_parallel_sharding_strategy"),
        lambda f: f.strategy == "optim" and f.micro != 1 and f.model.get("gradient_accumulation_fusion"),
        "Under the strategy optim the fused kernel overwrites the gradient instead of adding to it, so all but the "
        "last of {f.micro} microbatches are lost: it trains wrongly without an error.",
        "Set model.gradient_accumulation_fusion = False.",
        "F/megatron_fsdp.py:507-511; fixed by Megatron-LM 342faa43cd (#6357), which is in no release before 0.20.0",
        fixed_in="0.20.0",
    ),
    Rule(
        "B11",
        "error",
        ("model.moe_single_grouped_weight", "model.moe_single_grouped_bias"),
        lambda f: f.model.get("moe_single_grouped_weight") or f.model.get("moe_single_grouped_bias"),
        "One grouped tensor for all experts cannot be sharded by Megatron FSDP.",
        "Set model.moe_single_grouped_weight and moe_single_grouped_bias to False.",
        "T/training/arguments.py:1115-1125 (Megatron-LM's parser; Bridge passes it)",
    ),
    Rule(
        "B12",
        "error",
        ("model.hybrid_context_parallel",),
        lambda f: f.model.get("hybrid_context_parallel"),
        "Hybrid context parallelism is not supported with Megatron FSDP.",
        "Set model.hybrid_context_parallel = False.",
        "T/training/arguments.py:1407 (Megatron-LM's parser; Bridge passes it)",
    ),
    Rule(
        "B13",
        "warning",
        ("optimizer.optimizer_cpu_offload",),
        lambda f: f.optimizer.get("optimizer_cpu_offload"),
        "The CPU-offloading optimizer has no code for DTensor shards, and nothing tests it with Megatron FSDP.",
        "Set optimizer.optimizer_cpu_offload = False.",
        "C/optimizer/cpu_offloading/hybrid_optimizer.py",
    ),
    Rule(
        "B14",
        "warning",
        ("model.tensor_model_parallel_size", "model.context_parallel_size"),
        lambda f: f.before_blackwell and (f.tp > 1 or f.cp > 1),
        "Before Blackwell, tensor and context parallelism overlap best with CUDA_DEVICE_MAX_CONNECTIONS=1, which "
        "Megatron FSDP forbids: it works, slower.",
        "Prefer data parallelism alone (TP = CP = 1) with Megatron FSDP on this GPU, if it fits.",
        "T/training/arguments.py:1413-1425",
    ),
    Rule(
        "B15",
        "warning",
        ("checkpoint.pretrained_checkpoint",),
        lambda f: f.checkpoint.get("pretrained_checkpoint") is not None,
        "pretrained_checkpoint must be in fsdp_dtensor format; a torch_dist one does not load.",
        "Convert it first, and point pretrained_checkpoint at the converted folder.",
        "B/training/checkpointing.py:239-270,2856",
    ),
    Rule(
        "B16",
        "error",
        ("comm_overlap.defer_embedding_wgrad_compute",),
        lambda f: f.model.get("defer_embedding_wgrad_compute"),
        "Deferring the embedding's weight gradient cannot work with Megatron FSDP.",
        "Set comm_overlap.defer_embedding_wgrad_compute = False.",
        "Megatron-Bridge scripts/performance/utils/overrides.py:110-113",
    ),
    Rule(
        "B17",
        "error",
        ("ddp.nccl_ub", "ddp.megatron_fsdp_max_pool_double_buffer", "ddp.fsdp_db_use_persist_buf_on_alloc_fail"),
        lambda f: (
            f.ddp.get("nccl_ub")
            and (f.model.get("num_moe_experts") or f.model.get("is_hybrid_model"))
            and not f.ddp.get("megatron_fsdp_max_pool_double_buffer")
            and not f.ddp.get("fsdp_db_use_persist_buf_on_alloc_fail")
        ),
        "NCCL user buffers hang when the FSDP units differ in size, as in this model.",
        "Set ddp.megatron_fsdp_max_pool_double_buffer = True.",
        "F/param_and_grad_buffer.py:646-725,883-955",
    ),
    Rule(
        "B18",
        "error",
        ("ddp.overlap_grad_reduce", "ddp.data_parallel_sharding_strategy"),
        lambda f: f.strategy in ("optim", "no_shard") and not f.ddp.get("overlap_grad_reduce", True),
        "Without overlap_grad_reduce, {f.strategy} can reduce gradients twice: wrong gradients without an error.",
        "Set ddp.overlap_grad_reduce = True (comm_overlap.overlap_grad_reduce where comm_overlap is set).",
        "F/megatron_fsdp.py:755-773,1316-1340; fixed by Megatron-LM 342faa43cd",
        fixed_in="0.20.0",
    ),
    Rule(
        "B20",
        "warning",
        ("ddp.megatron_fsdp_main_grads_dtype", "mixed_precision.grad_reduce_in_fp32"),
        lambda f: f.ddp.get("grad_reduce_in_fp32") and f.main_grads_dtype != "float32",
        "Megatron FSDP does not read grad_reduce_in_fp32: gradients accumulate in {f.main_grads_dtype}.",
        "Set ddp.megatron_fsdp_main_grads_dtype = torch.float32 to accumulate in FP32.",
        "C/distributed/fsdp/mcore_fsdp_adapter.py:134-138",
    ),
)
