"""Rules of DDP, the distributed optimizer, torch FSDP2 and checkpoints (A, B4, B7, C, D); paths as in megatron_fsdp."""

from __future__ import annotations

from estimator.rules.rule import Rule

WITHOUT_FSDP_RULES: tuple[Rule, ...] = (
    Rule(
        "A12",
        "error",
        ("checkpoint.ckpt_format", "ddp.use_megatron_fsdp"),
        lambda f: f.saves_or_loads and f.checkpoint.get("ckpt_format") == "fsdp_dtensor",
        "fsdp_dtensor checkpoints need Megatron FSDP, which is off.",
        'Set checkpoint.ckpt_format = "torch_dist", or ddp.use_megatron_fsdp = True.',
        "B/training/config.py:1391-1394",
    ),
    Rule(
        "A17",
        "error",
        ("mixed_precision.reuse_grad_buf_for_mxfp8_param_ag",),
        lambda f: (
            f.mixed.get("fp8_param_gather")
            and f.mixed.get("fp8_recipe") == "mxfp8"
            and not f.mixed.get("reuse_grad_buf_for_mxfp8_param_ag")
        ),
        "Gathering parameters in MXFP8 without Megatron FSDP needs the gradient buffer for it.",
        "Set mixed_precision.reuse_grad_buf_for_mxfp8_param_ag = True.",
        "B/training/config.py:1349-1359",
    ),
    Rule(
        "B7",
        "error",
        ("model.init_model_with_meta_device",),
        lambda f: f.model.get("init_model_with_meta_device"),
        "Parameters built on the meta device are never materialised without Megatron FSDP.",
        "Set model.init_model_with_meta_device = False.",
        "C/transformer/transformer_config.py:405-409; B/models/model_provider.py:647-709",
    ),
    Rule(
        "B17",
        "warning",
        ("ddp.fsdp_double_buffer", "ddp.megatron_fsdp_max_pool_double_buffer"),
        lambda f: f.ddp.get("fsdp_double_buffer") or f.ddp.get("megatron_fsdp_max_pool_double_buffer"),
        "FSDP's double buffers do nothing without Megatron FSDP.",
        "Set ddp.fsdp_double_buffer and ddp.megatron_fsdp_max_pool_double_buffer to False.",
        "F/param_and_grad_buffer.py:2517",
    ),
    Rule(
        "D1",
        "error",
        ("ddp.overlap_param_gather", "ddp.overlap_grad_reduce"),
        lambda f: not f.fsdp2 and f.ddp.get("overlap_param_gather") and not f.ddp.get("overlap_grad_reduce"),
        "overlap_param_gather needs overlap_grad_reduce.",
        "Set ddp.overlap_grad_reduce = True, or overlap_param_gather = False on ddp and optimizer.",
        "T/training/arguments.py:994 (Megatron-LM's parser; Bridge passes it)",
    ),
    Rule(
        "D2",
        "error",
        ("ddp.overlap_param_gather", "ddp.use_distributed_optimizer"),
        lambda f: not f.fsdp2 and f.ddp.get("overlap_param_gather") and not f.distopt,
        "overlap_param_gather gathers what the distributed optimizer shards, and that is off.",
        "Set overlap_param_gather = False on ddp and on optimizer.",
        "T/training/arguments.py:990-993; B/training/config.py:1945-1982",
    ),
    Rule(
        "D5",
        "error",
        ("ddp.average_in_collective", "model.calculate_per_token_loss"),
        lambda f: not f.fsdp2 and f.ddp.get("average_in_collective") and f.model.get("calculate_per_token_loss"),
        "A loss per token is averaged over tokens, so the collective must not average over ranks.",
        "Set ddp.average_in_collective = False.",
        "C/distributed/distributed_data_parallel.py:179-182 (validate() passes it)",
    ),
    Rule(
        "D6",
        "error",
        ("ddp.num_distributed_optimizer_instances", "ddp.use_distributed_optimizer"),
        lambda f: f.instances > 1 and not f.distopt,
        "More than one optimizer instance needs the distributed optimizer.",
        "Set ddp.num_distributed_optimizer_instances = 1, or switch the distributed optimizer on.",
        "C/distributed/distributed_data_parallel.py:292-295",
    ),
)

TORCH_FSDP2_RULES: tuple[Rule, ...] = (
    Rule(
        "C1",
        "error",
        ("model.pipeline_model_parallel_size", "model.expert_model_parallel_size"),
        lambda f: f.pp > 1 or f.ep > 1,
        "Torch FSDP2 works without pipeline and expert parallelism only.",
        "Set both sizes to 1.",
        "T/training/arguments.py:999-1002",
    ),
    Rule(
        "C2",
        "error",
        ("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer"),
        lambda f: f.distopt or f.ddp.get("overlap_param_gather"),
        "Torch FSDP2 does not work with the distributed optimizer, which Bridge's recipes switch on.",
        "Set use_distributed_optimizer and overlap_param_gather to False on ddp and on optimizer.",
        "T/training/arguments.py:1003-1004",
    ),
    Rule(
        "C3",
        "error",
        ("model.gradient_accumulation_fusion",),
        lambda f: f.model.get("gradient_accumulation_fusion"),
        "Torch FSDP2 has no main gradient buffer that a fused kernel could add to.",
        "Set model.gradient_accumulation_fusion = False.",
        "T/training/arguments.py:1005-1006",
    ),
    Rule(
        "C4",
        "error",
        ("model.share_embeddings_and_output_weights",),
        lambda f: f.model.get("share_embeddings_and_output_weights"),
        "Torch FSDP2 needs an output layer of its own; this model shares it with the embedding.",
        "Use Megatron FSDP or the distributed optimizer for this model.",
        "T/training/arguments.py:1009-1010",
    ),
    Rule(
        "C5",
        "error",
        ("model.fp16",),
        lambda f: f.model.get("fp16"),
        "Torch FSDP2 does not support FP16.",
        "Train in BF16, or use another strategy.",
        "T/training/arguments.py:1011-1012",
    ),
    Rule(
        "C6",
        "error",
        ("checkpoint.ckpt_format",),
        lambda f: f.saves_or_loads and f.checkpoint.get("ckpt_format") not in ("torch_dist", "torch_dcp"),
        "Torch FSDP2 saves torch_dist or torch_dcp checkpoints; ckpt_format is {f.checkpoint[ckpt_format]}.",
        'Set checkpoint.ckpt_format = "torch_dist".',
        "T/training/arguments.py:1007-1008",
    ),
    Rule(
        "C7",
        "error",
        ("env_vars.CUDA_DEVICE_MAX_CONNECTIONS",),
        lambda f: f.max_connections == "1",
        "CUDA_DEVICE_MAX_CONNECTIONS is 1; FSDP needs it unset or larger than 1.",
        'Set env_vars["CUDA_DEVICE_MAX_CONNECTIONS"] = 32.',
        "T/training/arguments.py:1013-1014",
    ),
    Rule(
        "C8",
        "warning",
        ("dist.use_torch_fsdp2",),
        lambda f: True,
        "Torch FSDP2 is experimental in Bridge: checkpoints are not loaded for it.",
        "Use Megatron FSDP (ddp.use_megatron_fsdp) instead.",
        "B/training/setup.py:414",
    ),
)

COMMON_RULES: tuple[Rule, ...] = (
    Rule(
        "A13",
        "error",
        ("checkpoint.also_save_hf_checkpoint", "checkpoint.ckpt_format"),
        lambda f: f.checkpoint.get("also_save_hf_checkpoint") and f.checkpoint.get("ckpt_format") == "fsdp_dtensor",
        "Hugging Face weights cannot be written beside fsdp_dtensor checkpoints.",
        "Set checkpoint.also_save_hf_checkpoint = False and export after training.",
        "B/training/config.py:605-610",
    ),
    Rule(
        "A14",
        "error",
        ("checkpoint.async_save", "checkpoint.ckpt_format", "checkpoint.save"),
        lambda f: (
            f.checkpoint.get("async_save")
            and (
                f.checkpoint.get("save") is None
                or f.checkpoint.get("ckpt_format") not in ("torch_dist", "fsdp_dtensor")
            )
        ),
        "Asynchronous saving needs a folder to save in and the format torch_dist or fsdp_dtensor.",
        "Set checkpoint.save and checkpoint.ckpt_format, or checkpoint.async_save = False.",
        "B/training/config.py:598-600,1397-1401",
    ),
    Rule(
        "A15",
        "error",
        ("dist.use_gloo_process_groups", "checkpoint.ckpt_format"),
        lambda f: (
            f.dist.get("use_gloo_process_groups") is False
            and f.optimizer.get("use_distributed_optimizer")
            and f.checkpoint.get("ckpt_format") not in ("torch_dist", "fsdp_dtensor")
        ),
        "Without Gloo groups a distributed optimizer can only be saved as torch_dist or fsdp_dtensor.",
        'Set checkpoint.ckpt_format = "torch_dist".',
        "B/training/config.py:1418-1427",
    ),
    Rule(
        "A19",
        "error",
        ("rerun_state_machine.check_for_nan_in_loss", "model.cuda_graph_impl"),
        lambda f: f.model.get("cuda_graph_impl") == "full_iteration" and f.rerun.get("check_for_nan_in_loss"),
        "A full-iteration CUDA graph cannot stop to look for NaN in the loss.",
        "Set rerun_state_machine.check_for_nan_in_loss = False.",
        "B/training/config.py:1369-1374",
    ),
    Rule(
        "A20",
        "error",
        ("model.calculate_per_token_loss", "ddp.average_in_collective"),
        lambda f: (
            f.cp > 1
            and f.finetunes
            and (not f.model.get("calculate_per_token_loss") or f.ddp.get("average_in_collective"))
        ),
        "Fine-tuning with context parallelism needs a loss per token, not averaged in the collective.",
        "Set model.calculate_per_token_loss = True and ddp.average_in_collective = False.",
        "B/training/config.py:1440-1457",
    ),
    Rule(
        "A22",
        "error",
        ("optimizer.use_precision_aware_optimizer", "optimizer.optimizer", "optimizer.use_distributed_optimizer"),
        lambda f: (
            f.optimizer.get("use_precision_aware_optimizer")
            and (f.optimizer.get("optimizer", "adam") != "adam" or not f.distopt)
        ),
        "The precision-aware optimizer is Adam, distributed.",
        "Set optimizer.optimizer = 'adam' and use_distributed_optimizer = True, or switch it off.",
        "C/optimizer/optimizer_config.py:429-436",
    ),
    Rule(
        "A22",
        "error",
        ("optimizer.bf16", "optimizer.fp16", "model.bf16"),
        lambda f: (
            f.optimizer.get("use_precision_aware_optimizer")
            and (
                bool(f.model.get("bf16")) != bool(f.optimizer.get("bf16"))
                or bool(f.model.get("fp16")) != bool(f.optimizer.get("fp16"))
            )
        ),
        "The precision-aware optimizer must run in the model's precision.",
        "Set optimizer.bf16 and optimizer.fp16 as on the model, or use cfg.mixed_precision for both.",
        "B/training/config.py:2005-2023",
    ),
    Rule(
        "A23",
        "error",
        (
            "optimizer.main_grads_dtype",
            "optimizer.main_params_dtype",
            "optimizer.exp_avg_dtype",
            "optimizer.exp_avg_sq_dtype",
        ),
        lambda f: (
            not f.optimizer.get("use_precision_aware_optimizer")
            and not (
                f.optimizer.get("main_grads_dtype", "float32")
                == f.optimizer.get("main_params_dtype", "float32")
                == f.optimizer.get("exp_avg_dtype", "float32")
                == f.optimizer.get("exp_avg_sq_dtype", "float32")
                == "float32"
            )
        ),
        "Optimizer states below FP32 need the precision-aware optimizer, which is off.",
        "Set optimizer.use_precision_aware_optimizer = True, or all four dtypes to torch.float32.",
        "C/optimizer/optimizer_config.py:468-480",
    ),
    Rule(
        "A24",
        "error",
        ("ddp.num_buckets", "ddp.bucket_size"),
        lambda f: f.ddp.get("num_buckets") is not None and f.ddp.get("bucket_size") is not None,
        "num_buckets and bucket_size both say how gradients are cut.",
        "Set one of them to None.",
        "C/distributed/distributed_data_parallel_config.py:268-270",
    ),
    Rule(
        "A24",
        "error",
        ("ddp.param_name_patterns_for_fp32_local_accumulation", "mixed_precision.grad_reduce_in_fp32"),
        lambda f: f.ddp.get("param_name_patterns_for_fp32_local_accumulation") and f.ddp.get("grad_reduce_in_fp32"),
        "Gradients are already FP32, so no parameters can be named for FP32 accumulation.",
        "Set mixed_precision.grad_reduce_in_fp32 = False, or name no parameters.",
        "C/distributed/distributed_data_parallel_config.py:262-266",
    ),
    Rule(
        "A24",
        "error",
        ("ddp.reuse_grad_buf_for_mxfp8_param_ag", "ddp.fp8_param_gather"),
        lambda f: f.ddp.get("reuse_grad_buf_for_mxfp8_param_ag") and not f.ddp.get("fp8_param_gather"),
        "The gradient buffer is reused for gathering FP8 parameters, and they are not FP8.",
        "Set mixed_precision.fp8_param_gather = True, or reuse_grad_buf_for_mxfp8_param_ag = False.",
        "C/distributed/distributed_data_parallel_config.py:253-254",
    ),
    Rule(
        "A24",
        "error",
        ("ddp.nccl_ub", "env_vars.PYTORCH_CUDA_ALLOC_CONF"),
        lambda f: (
            f.ddp.get("nccl_ub")
            and f.before("torch", "2.11.0")
            and "expandable_segments:True" in str(f.env_vars.get("PYTORCH_CUDA_ALLOC_CONF", "")).split(",")
        ),
        "NCCL user buffers exclude expandable segments before torch 2.11.",
        "Set ddp.nccl_ub = False, or take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF.",
        "C/distributed/distributed_data_parallel_config.py:256-260",
    ),
    Rule(
        "A30",
        "error",
        ("checkpoint.pretrained_checkpoint",),
        lambda f: f.peft is not None and f.checkpoint.get("pretrained_checkpoint") is None,
        "Parameter-efficient fine-tuning starts from a checkpoint, and none is named.",
        "Set checkpoint.pretrained_checkpoint to an existing folder.",
        "B/training/config.py:1488,590-596",
    ),
    Rule(
        "B4",
        "error",
        ("ddp.num_distributed_optimizer_instances",),
        lambda f: (
            f.instances > 1
            and (
                f.shard_group_ranks % f.instances
                or (f.model.get("num_moe_experts") and f.expert_dp and f.expert_dp % f.instances)
            )
        ),
        "{f.instances} optimizer instances do not divide the {f.shard_group_ranks} ranks of DP x CP"
        " (with experts, the {f.expert_dp} of expert data parallelism too).",
        "Use a divisor, best the number of nodes, so that sharding stays inside a node.",
        "C/parallel_state.py:922-925,1449; C/distributed/fsdp/mcore_fsdp_adapter.py:343-380",
    ),
    Rule(
        "D3",
        "error",
        ("optimizer.optimizer_offload_fraction",),
        lambda f: (
            f.optimizer.get("optimizer_cpu_offload") and not 0 <= f.optimizer.get("optimizer_offload_fraction", 0) <= 1
        ),
        "The offloaded fraction {f.optimizer[optimizer_offload_fraction]} is not between 0 and 1.",
        "Set optimizer.optimizer_offload_fraction between 0 and 1.",
        "T/training/arguments.py (Megatron-LM's parser; Bridge passes 1.5)",
    ),
    Rule(
        "D4",
        "error",
        ("optimizer.optimizer_cpu_offload", "optimizer.decoupled_weight_decay"),
        lambda f: f.optimizer.get("optimizer_cpu_offload") and f.optimizer.get("decoupled_weight_decay") is False,
        "The CPU-offloading optimizer implements decoupled weight decay only.",
        "Set optimizer.decoupled_weight_decay = True.",
        "C/optimizer/__init__.py:508",
    ),
)
