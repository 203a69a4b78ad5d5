"""From ``Settings`` to the arguments of Megatron-Core's configuration classes.

Any field of ``Settings`` that carries the name of a Megatron-Core field is passed on, so that new settings reach the
profiler without a change here. Pure: classes and torch dtypes are looked up by the caller.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from estimator.profiling.job import ProfileJob

TORCH_FSDP2 = "torch_fsdp2"
_UNBOUNDED = 10**15
"""A bucket size above any model: ``_ddp_wrap`` would replace None by its own default."""

_NOT_OF_THE_MODEL_CONFIG = frozenset({"activation_func", "attention_backend", "seq_length", "vocab_size"})


def transformer_arguments(job: ProfileJob, known: Iterable[str]) -> dict[str, Any]:
    """Keyword arguments for TransformerConfig; dtypes, activation and attention backend still as text.

    What Bridge's GPTModelProvider sets unlike Megatron-Core's default is set here too
    (megatron-bridge 0.6.2, models/gpt_provider.py:108-120, training/mixed_precision.py bf16_mixed).
    """
    settings, names = job.settings, set(known)
    arguments: dict[str, Any] = {
        "attention_softmax_in_fp32": False,
        "deallocate_pipeline_outputs": True,
        "use_cpu_initialization": settings.model.use_cpu_initialization,
    }
    for section in (settings.model, settings.parallel, settings.recompute):
        for entry in fields(section):
            if entry.name in names and entry.name not in _NOT_OF_THE_MODEL_CONFIG:
                value = getattr(section, entry.name)
                arguments[entry.name] = list(value) if entry.name.endswith("_modules") else value
    arguments["activation_func"] = settings.model.activation_func
    arguments["attention_backend"] = settings.model.attention_backend
    dtype = settings.runtime.params_dtype
    arguments.update(bf16=dtype == "bfloat16", fp16=dtype == "float16", params_dtype=dtype, pipeline_dtype=dtype)
    if not settings.recompute.recompute_modules:
        arguments.pop("recompute_modules", None)
    arguments.update(job.extra_transformer_config)
    return arguments


def ddp_arguments(job: ProfileJob) -> dict[str, Any]:
    """Keyword arguments for DistributedDataParallelConfig; dtypes still as text."""
    sharding = job.settings.sharding
    arguments: dict[str, Any] = {
        "grad_reduce_in_fp32": sharding.grad_reduce_in_fp32,
        "overlap_grad_reduce": sharding.overlap_grad_reduce,
        "overlap_param_gather": sharding.overlap_param_gather and sharding.strategy not in ("ddp", TORCH_FSDP2),
        "use_distributed_optimizer": sharding.strategy not in ("ddp", TORCH_FSDP2),
        "average_in_collective": sharding.average_in_collective,
        "check_for_nan_in_grad": sharding.check_for_nan_in_grad,
        "num_distributed_optimizer_instances": sharding.num_distributed_optimizer_instances,
        "bucket_size": sharding.bucket_size,
    }
    if sharding.bucket_size is None and sharding.overlap_grad_reduce:
        arguments["bucket_size"] = _UNBOUNDED
    if sharding.is_megatron_fsdp:
        arguments.update(
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy=sharding.strategy,
            suggested_communication_unit_size=sharding.suggested_communication_unit_size,
            fsdp_double_buffer=sharding.fsdp_double_buffer,
            megatron_fsdp_main_params_dtype=sharding.main_params_dtype,
            megatron_fsdp_main_grads_dtype=sharding.main_grads_dtype,
            megatron_fsdp_grad_comm_dtype=sharding.grad_comm_dtype,
            megatron_fsdp_use_decoupled_grad=sharding.use_decoupled_grad,
        )
    arguments.update(job.extra_ddp_config)
    return arguments


def optimizer_arguments(job: ProfileJob, ddp: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments for OptimizerConfig; dtypes still as text. Bridge keeps the pairs of flags equal (rule A16)."""
    optimizer, dtype = job.settings.optimizer, job.settings.runtime.params_dtype
    arguments: dict[str, Any] = {
        "lr": 1e-4,
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "params_dtype": dtype,
        "optimizer": optimizer.optimizer,
        "clip_grad": optimizer.clip_grad,
        "use_distributed_optimizer": ddp["use_distributed_optimizer"],
        "overlap_param_gather": ddp["overlap_param_gather"],
    }
    if dtype == "float16":
        arguments["initial_loss_scale"] = 2.0**15
    if optimizer.use_precision_aware_optimizer:
        for name in (
            "use_precision_aware_optimizer",
            "main_params_dtype",
            "main_grads_dtype",
            "exp_avg_dtype",
            "exp_avg_sq_dtype",
            "store_param_remainders",
        ):
            arguments[name] = getattr(optimizer, name)
    arguments.update(job.extra_optimizer_config)
    return arguments


def environment_variables(job: ProfileJob) -> dict[str, str | None]:
    """Environment of the process that runs the job, None = must not be set.

    Both of torch's names for the allocator's settings are set or removed. Megatron FSDP refuses
    CUDA_DEVICE_MAX_CONNECTIONS=1; elsewhere 1 is what Megatron asks for before Blackwell.
    """
    connections = job.settings.runtime.cuda_device_max_connections
    sharding = job.settings.sharding
    if connections is None and not sharding.is_megatron_fsdp and sharding.strategy != TORCH_FSDP2:
        connections = "1"
    return {
        "PYTORCH_CUDA_ALLOC_CONF": ("expandable_segments:True" if job.settings.runtime.expandable_segments else None),
        "PYTORCH_ALLOC_CONF": None,
        "CUDA_DEVICE_MAX_CONNECTIONS": connections,
        "NVTE_FRAMEWORK": "pytorch",
    }


def steady_iteration(job: ProfileJob, cuda_graph_impl: str, warmup_steps: int) -> int:
    """Zero-based iteration that counts as steady: the second, or the one after CUDA graphs were captured."""
    if cuda_graph_impl == "none":
        return 1
    return max(1, warmup_steps + 1)
