"""Kinds of failure that a text may report, as one table. The first row that matches a line names its kind.

``place`` divides them: "gpu" (the pool of the framework ran out), "gpu_driver" (an allocation outside the pool failed,
the card is just as full), "corrupt" (a size that no card has), "host" (host memory), "configuration" (Megatron FSDP's
own refusals, which people take for memory trouble; ``rule_id`` names the rule), "other" (an error that is not about
memory), "noise" (follows from a failure elsewhere), "warning" (precedes one).

Patterns are bounded: no part of them repeats without a limit, and none nests a repetition in a repetition.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Place = Literal["gpu", "gpu_driver", "corrupt", "host", "configuration", "other", "noise", "warning"]

_PYTORCH = "PyTorch c10/cuda/CUDACachingAllocator.cpp"
_BRIDGE = "megatron-bridge 0.6.2 training/config.py"
_CORE_FSDP = "megatron-core 0.19.2 core/distributed/fsdp"


@dataclass(frozen=True, slots=True)
class Kind:
    """One row. ``cause`` is what to think of first when nothing else is known."""

    kind_id: str
    place: Place
    pattern: re.Pattern[str]
    cause: str
    words: str
    source: str
    rule_id: str | None = None
    fix: str = ""
    needles: tuple[str, ...] = ()


def _kind(
    kind_id: str,
    place: Place,
    pattern: str,
    cause: str,
    words: str,
    source: str = "public reports",
    rule_id: str | None = None,
    fix: str = "",
) -> Kind:
    return Kind(kind_id, place, re.compile(pattern), cause, words, source, rule_id, fix, _NEEDLES[kind_id])


_NEEDLES: dict[str, tuple[str, ...]] = {
    "kernel_oom": ("ut of memory",),
    "cgroup_oom": (
        "oom-kill",
        "OOMKilled",
        "cgroup out of",
    ),
    "slurm_oom": (
        "oom_kill",
        "oom-kill",
        "OUT_OF_MEMORY",
        "Out Of Memory",
    ),
    "ray_oom": (
        "low on memory",
        "ray.exceptions",
    ),
    "dataloader_killed": (
        "DataLoader w",
        "shared memory",
        "/dev/shm",
    ),
    "cpu_allocator": ("DefaultCPUAllocator",),
    "errno_12": (
        "Errno 12",
        "Cannot allocate memory",
        "bad_alloc",
        "_ArrayMemoryError",
        "Unable to allocate",
    ),
    "sigkill": (
        "xitcode",
        "xit code",
        "eturn code",
        "SIGKILL",
    ),
    "fsdp_ckpt_format": ("fsdp_dtensor",),
    "fsdp_max_connections": ("CUDA_DEVICE_MAX_CONN",),
    "fsdp_rank_order": ("use_tp_pp_dp_mapping",),
    "fsdp_pipeline": (
        "EinopsError",
        "Shape mismatch, can't",
        "dp_cp",
    ),
    "fsdp_both": ("mutually exclusive",),
    "fsdp_meta": (
        "meta device",
        "meta tensor",
        "meta-device",
        "is_meta",
        "reset_parameters",
    ),
    "fsdp_manual_registration": ("fsdp_manual_registration",),
    "fsdp_weight_hash": ("check_weight_hash",),
    "fsdp_fusion": ("gradient_accumulation_fusion",),
    "absurd_request": (
        "more than 1EB",
        "more than 1 EB",
    ),
    "nccl_oom": (
        "uda failure",
        "UDA failure",
        "Failed to CUDA",
    ),
    "triton_oom": ("Triton Error",),
    "nvshmem_oom": (
        "cuMemCreate",
        "NVSHMEM",
        "nvshmem",
    ),
    "blas_oom": ("_STATUS_",),
    "cuda_malloc_async": ("would exceed allowed",),
    "torch_oom": (" out of memory",),
    "habana_oom": ("PT_DEVMEM",),
    "level_zero_oom": (
        "_ERROR_OUT_OF_",
        "OUT_OF_DEVICE",
    ),
    "jax_oom": ("RESOURCE_EXHAUSTED",),
    "allocator_assert": (
        "INTERNAL ASSERT",
        "CUDA driver error",
    ),
    "cuda_error_oom": (
        "out of memory",
        "cudaErrorMemory",
        "_ERROR_OUT_OF_MEMORY",
        "hipErrorOutOf",
    ),
    "torch_oom_bare": (
        "OutOfMemoryError",
        "Tried to allocate",
    ),
    "clone_oom": ("Failed to clone()",),
    "cache_flushes": ("allocator cache flushes",),
    "alloc_retries": ("alloc_retries", "alloc-retires"),
    "watchdog": (
        "atchdog",
        "collective operation",
        "NCCL operations",
        "NCCL communicator",
        "ncclRemote",
        "ncclSystem",
        "Connection ",
    ),
    "terminated": (
        "SIGTERM",
        "illing subprocess",
        "closing signal",
        "Force Terminated",
        "CANCELLED",
    ),
    "illegal_access": (
        "illegal memory",
        "device-side",
        "misaligned",
        "ILLEGAL_ADDRESS",
    ),
    "time_limit": ("TIME LIMIT",),
    "shape_error": ("RuntimeError",),
}
"""Texts of which a line must contain one before its pattern is tried. Found by ``find``, which is what makes a log of
100 MB take seconds."""

KINDS: tuple[Kind, ...] = (
    # ------------------------------------------------------------------ host
    _kind(
        "kernel_oom",
        "host",
        r"(?i)(?:memory cgroup )?out of memory:? kill(?:ed)? process",
        "host_memory",
        "the kernel killed a process because the host, or its cgroup, ran out of memory",
        "Linux mm/oom_kill.c",
    ),
    _kind(
        "cgroup_oom",
        "host",
        r"oom-kill:constraint=|OOMKilled|memory cgroup out of memory",
        "host_memory",
        "the container or job reached its host-memory limit",
        "Linux mm/oom_kill.c; Kubernetes pod status",
    ),
    _kind(
        "slurm_oom",
        "host",
        r"Detected \d{1,6} oom[_-]kill event|oom[_-]kill event in Step|OUT_OF_MEMORY\b(?!.{0,4}DEVICE)"
        r"|srun: error: .{0,200}Out Of Memory",
        "host_memory",
        "Slurm saw the job step exceed its host memory",
        "Slurm slurmstepd",
    ),
    _kind(
        "ray_oom",
        "host",
        r"killed due to the node running low on memory|ray\.exceptions\.OutOfMemoryError",
        "host_memory",
        "Ray killed the task because its node ran low on host memory",
        "Ray memory monitor",
    ),
    _kind(
        "dataloader_killed",
        "host",
        r"DataLoader worker .{0,80}(?:killed by signal|exited unexpectedly)"
        r"|insufficient shared memory \(shm\)|No space left on device.{0,80}/dev/shm|unable to (?:open"
        r"|mmap) shared memory",
        "shared_memory",
        "a data-loader worker was killed: shared memory (/dev/shm) or host memory",
        "torch/utils/data",
    ),
    _kind(
        "cpu_allocator",
        "host",
        r"DefaultCPUAllocator: (?:can't|not enough) (?:allocate )?memory",
        "host_memory",
        "PyTorch could not allocate host memory",
        "PyTorch c10/core/impl/alloc_cpu.cpp",
    ),
    _kind(
        "errno_12",
        "host",
        r"\[Errno 12\]|OSError: .{0,80}Cannot allocate memory|std::bad_alloc|_ArrayMemoryError"
        r"|Unable to allocate .{1,60} for an array",
        "host_memory",
        "the operating system refused host memory",
    ),
    _kind(
        "sigkill",
        "host",
        r"(?:exit ?code|exitcode|return code)\s{0,12}[:=]?\s{0,4}=?\s{0,4}-9\b|Signal 9 \(SIGKILL\)"
        r"|exits with return code = -9|received SIGKILL|died with <Signals\.SIGKILL",
        "host_memory",
        "a process was killed with SIGKILL, which is what the kernel does when host memory runs out",
        "torchelastic, DeepSpeed launcher",
    ),
    # ------------------------------------------------------------------ Megatron FSDP's own failures
    _kind(
        "fsdp_ckpt_format",
        "configuration",
        r"requires the fsdp_dtensor checkpointing format|fsdp_dtensor checkpoint format only supports",
        "configuration",
        "the checkpoint format does not go with Megatron FSDP",
        f"{_BRIDGE}:1097-1101,1391-1394",
        "A7",
        'Set checkpoint.ckpt_format = "fsdp_dtensor" and a new folder for save and load.',
    ),
    _kind(
        "fsdp_max_connections",
        "configuration",
        r"FSDP requires CUDA_DEVICE_MAX_CONNECTIONS|CUDA_DEVICE_MAX_CONNECTIONS.{0,60}(?:> 1|unset|not be 1|!= 1)",
        "configuration",
        "CUDA_DEVICE_MAX_CONNECTIONS is 1",
        f"{_BRIDGE}:1102-1104",
        "A8",
        'Set env_vars["CUDA_DEVICE_MAX_CONNECTIONS"] = 32, and export 32 or unset it: an exported value wins.',
    ),
    _kind(
        "fsdp_rank_order",
        "configuration",
        r"use_tp_pp_dp_mapping.{0,40}not supported",
        "configuration",
        "the tp-pp-dp rank order is not supported with Megatron FSDP",
        f"{_BRIDGE}:1116",
        "A11",
        "Set dist.use_tp_pp_dp_mapping = False.",
    ),
    _kind(
        "fsdp_pipeline",
        "configuration",
        r"EinopsError|Shape mismatch, can't divide axis of length|(?:einops|rearrange).{0,200}dp_cp",
        "configuration",
        "Megatron FSDP arranges its ranks as DP x CP x TP: a pipeline has no place there",
        f"{_CORE_FSDP}/mcore_fsdp_adapter.py:486-496,555-567",
        "B1",
        "Set model.pipeline_model_parallel_size = 1, or keep the pipeline and use the distributed optimizer.",
    ),
    _kind(
        "fsdp_both",
        "configuration",
        r"use_megatron_fsdp and use_torch_fsdp2 are mutually exclusive",
        "configuration",
        "Megatron FSDP and torch FSDP2 are both switched on",
        f"{_BRIDGE}:1342",
        "A1",
        "Set dist.use_torch_fsdp2 = False.",
    ),
    _kind(
        "fsdp_meta",
        "configuration",
        r"Cannot copy out of meta tensor|(?:meta device|meta tensor|is_meta"
        r"|meta-device).{0,120}(?:not supported|no data|unsupported|reset_parameters|_reset_parameters)"
        r"|reset_parameters.{0,80}meta",
        "configuration",
        "parameters were built on the meta device, and nothing materialises them",
        f"{_CORE_FSDP}/src/megatron_fsdp/param_and_grad_buffer.py:2880-2928",
        "B7",
        "Set model.init_model_with_meta_device = False (no_shard and modules without reset_parameters need it).",
    ),
    _kind(
        "fsdp_manual_registration",
        "configuration",
        r"fsdp_manual_registration requires DDP\.nccl_ub",
        "configuration",
        "user buffers are registered by hand, but nccl_ub is off",
        f"{_BRIDGE}:1105-1110",
        "A9",
        "Set ddp.fsdp_manual_registration = False, or ddp.nccl_ub = True.",
    ),
    _kind(
        "fsdp_weight_hash",
        "configuration",
        r"check_weight_hash_across_dp_replicas_interval is not",
        "configuration",
        "weights are sharded, so there are no replicas to compare",
        f"{_BRIDGE}:1111-1115",
        "A10",
        "Set train.check_weight_hash_across_dp_replicas_interval = None.",
    ),
    _kind(
        "fsdp_fusion",
        "configuration",
        r"Megatron-FSDP with gradient_accumulation_fusion requires",
        "configuration",
        "gradient accumulation fusion needs Transformer Engine 2.10",
        f"{_CORE_FSDP}/mcore_fsdp_adapter.py:147-151",
        "B10",
        "Set model.gradient_accumulation_fusion = False, or use a newer Transformer Engine.",
    ),
    # ------------------------------------------------------------------ GPU
    _kind(
        "absurd_request",
        "corrupt",
        r"Tried to allocate more than 1\s?EB",
        "corrupt_shape",
        "the size asked for is larger than any machine: a shape or a length is corrupt",
        _PYTORCH,
    ),
    _kind(
        "nccl_oom",
        "gpu_driver",
        r"(?i:cuda failure (?:2 )?'?out of memory)|Failed to CUDA (?:m|c)alloc(?: async)? \d{1,20} bytes"
        r"|Failed to CUDA host alloc",
        "outside_pool",
        "NCCL could not allocate outside PyTorch's pool, which holds the card",
        "NCCL src/include/alloc.h",
    ),
    _kind(
        "triton_oom",
        "gpu_driver",
        r"Triton Error \[(?:CUDA|HIP)\]: out of memory",
        "outside_pool",
        "Triton could not load a kernel: the pool holds the card",
        "Triton driver",
    ),
    _kind(
        "nvshmem_oom",
        "gpu_driver",
        r"(?i:nvshmem).{0,200}(?:out of memory|cuMemCreate failed|alloc\w{0,10} failed)|cuMemCreate failed",
        "outside_pool",
        "NVSHMEM's heap did not fit beside PyTorch's pool",
        "NVSHMEM",
    ),
    _kind(
        "blas_oom",
        "gpu_driver",
        r"(?:CUBLAS|HIPBLAS|CUDNN|CUSOLVER|CUFFT|ROCBLAS)_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)",
        "outside_pool",
        "a math library could not allocate its handle or workspace outside the pool",
        "cuBLAS status codes",
    ),
    _kind(
        "cuda_malloc_async",
        "gpu",
        r"Allocation on device \d{0,4}\s?would exceed allowed memory",
        "model_states",
        "CUDA's asynchronous allocator reached the device's limit",
        "PyTorch c10/cuda/CUDAMallocAsyncAllocator.cpp",
    ),
    _kind(
        "clone_oom",
        "gpu",
        r"Failed to clone\(\) tensor",
        "checkpoint_save",
        "a tensor could not be cloned while the checkpoint was gathered: the file is incomplete",
        "torch/distributed/fsdp/_state_dict_utils.py",
    ),
    _kind(
        "torch_oom",
        "gpu",
        r"(?:CUDA|HIP|NPU|XPU|MUSA|MPS|MLU) out of memory\b",
        "model_states",
        "the framework's allocator ran out of GPU memory",
        _PYTORCH,
    ),
    _kind("habana_oom", "gpu", r"PT_DEVMEM", "model_states", "Habana's device memory ran out", "Habana bridge"),
    _kind(
        "level_zero_oom",
        "gpu",
        r"(?:ZE|UR|PI)_(?:RESULT_)?ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)|OUT_OF_DEVICE_MEMORY",
        "model_states",
        "Intel's Level Zero ran out of device memory",
        "oneAPI Level Zero",
    ),
    _kind("jax_oom", "gpu", r"RESOURCE_EXHAUSTED", "model_states", "XLA ran out of device memory", "XLA"),
    _kind(
        "allocator_assert",
        "gpu_driver",
        r"NVML_SUCCESS == r INTERNAL ASSERT FAILED|CUDA driver error: (?:invalid argument|out of memory)"
        r"|CUDACachingAllocator\.cpp.{0,80}INTERNAL ASSERT",
        "outside_pool",
        "the allocator's own driver call failed, which happens when the card is full",
        _PYTORCH,
    ),
    _kind(
        "cuda_error_oom",
        "gpu_driver",
        r"CUDA error: out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"
        r"|hipErrorOutOfMemory|CUDA runtime error .{0,60}out of memory",
        "outside_pool",
        "the CUDA driver had no memory left, without saying how much was asked for",
        "CUDA runtime",
    ),
    _kind(
        "torch_oom_bare",
        "gpu",
        r"(?:torch\.(?:cuda\.)?)OutOfMemoryError|Tried to allocate \d",
        "model_states",
        "the framework's allocator ran out of GPU memory; the message is cut off",
        _PYTORCH,
    ),
    # ------------------------------------------------------------------ warnings
    _kind(
        "cache_flushes",
        "warning",
        r"\d{1,9} pytorch allocator cache flushes since last step",
        "fragmentation",
        "the pool was emptied and refilled within a step: memory pressure",
        "DeepSpeed runtime/zero/stage3.py",
    ),
    _kind(
        "alloc_retries",
        "warning",
        r"alloc[_-]re(?:tries|tires)\W{1,6}[1-9]\d{0,9}",
        "fragmentation",
        "cudaMalloc failed and the pool was flushed to make room",
        "torch.cuda.memory_stats",
    ),
    # ------------------------------------------------------------------ noise
    _kind(
        "watchdog",
        "noise",
        r"[Ww]atchdog (?:caught|thread|hang|timeout|got stuck)|watchdog got stuck"
        r"|collective operation timeout|NCCL operations have failed or timed out"
        r"|NCCL communicator (?:was aborted|encountered error)|ncclRemoteError|ncclSystemError"
        r"|Connection (?:closed|reset) by (?:localRank|remote|peer)",
        "collective_timeout",
        "this rank waited for another that had stopped",
        "PyTorch ProcessGroupNCCL",
    ),
    _kind("time_limit", "other", r"DUE TO TIME LIMIT", "not_out_of_memory", "the job reached its time limit", "Slurm"),
    _kind(
        "terminated",
        "noise",
        r"Signal 15 \(SIGTERM\)|SIGTERM|[Kk]illing subprocess \d|Sending process \d{1,9} closing signal"
        r"|Force Terminated job|CANCELLED AT",
        "collective_timeout",
        "this process was stopped because another had failed",
        "torchelastic, Slurm",
    ),
    # ------------------------------------------------------------------ not memory
    _kind(
        "illegal_access",
        "other",
        r"an illegal memory access was encountered|device-side assert triggered|misaligned address"
        r"|CUDA_ERROR_ILLEGAL_ADDRESS",
        "not_out_of_memory",
        "a kernel read or wrote outside its tensors: not a lack of memory",
        "CUDA runtime",
    ),
    _kind(
        "shape_error",
        "other",
        r"RuntimeError: .{0,120}(?:size mismatch|shapes? cannot be|must match the size|is invalid for input of size)",
        "not_out_of_memory",
        "tensor shapes do not match",
        "PyTorch",
    ),
)

BY_ID = {kind.kind_id: kind for kind in KINDS}

EXCEPTION = Kind(
    "exception",
    "other",
    re.compile(r"^\s{0,40}(?:[A-Za-z_][A-Za-z_0-9]{0,60}\.){0,8}[A-Z][A-Za-z0-9_]{0,60}(?:Error|Exception)(?::|$)"),
    "not_out_of_memory",
    "an exception that is not about memory",
    "Python traceback",
)

EXCEPTION_NEEDLES = ("Error", "Exception")

NEEDLES: tuple[bytes, ...] = tuple(dict.fromkeys(needle.encode() for kind in KINDS for needle in kind.needles))
