"""Out-of-memory texts of our own making, with what a reader has to find in each.

Kinds and framings as public reports have them; three sizes each. ``facts`` are exact (bytes of the printed numbers),
``cause`` is the first cause that has to be named from the text alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Text:
    name: str
    text: str
    kind: str
    cause: str
    facts: dict[str, Any] = field(default_factory=dict)
    rank: int | None = None
    phase: str | None = None
    outcome: str = "gpu_memory"
    line: int | None = None


def size(gib: float, unit: str = "GiB") -> tuple[str, int]:
    """("2.00 GiB", its bytes): as PyTorch prints it."""
    scale = {"GiB": GIB, "MiB": MIB, "KiB": KIB}[unit]
    printed = f"{gib:.2f} {unit}"
    return printed, int(round(float(f"{gib:.2f}") * scale))


SIZES = ((2.0, 79.11, 70.12, 1.25, 0.55), (0.50, 39.38, 37.77, 0.21, 0.30), (12.34, 139.8, 125.5, 3.75, 1.5))
"""Requested, capacity, allocated, free, unallocated in GiB."""


def traceback_of(*frames: str) -> str:
    lines = ["Traceback (most recent call last):"]
    for frame in frames:
        path, function = frame.split(" ")
        lines += [f'  File "/opt/{path}", line 123, in {function}', "    something()"]
    return "\n".join(lines) + "\n"


TRAIN = ("megatron/bridge/training/train.py train", "megatron/bridge/training/train.py train_step")
LOSS = traceback_of(
    *TRAIN,
    "megatron/core/pipeline_parallel/schedules.py forward_step",
    "megatron/core/models/gpt/gpt_model.py forward",
    "megatron/core/tensor_parallel/cross_entropy.py vocab_parallel_cross_entropy",
)
ATTENTION = traceback_of(
    *TRAIN,
    "megatron/core/pipeline_parallel/schedules.py forward_step",
    "megatron/core/transformer/attention.py forward",
    "megatron/core/transformer/dot_product_attention.py forward",
    "megatron/core/fusions/fused_softmax.py forward_torch_softmax",
)
MLP = traceback_of(
    *TRAIN, "megatron/core/pipeline_parallel/schedules.py forward_step", "megatron/core/transformer/mlp.py forward"
)
STEP = traceback_of(
    *TRAIN,
    "megatron/core/optimizer/optimizer.py step",
    "transformer_engine/pytorch/optimizers/fused_adam.py step",
    "transformer_engine/pytorch/optimizers/fused_adam.py initialize_state",
)
GATHER = traceback_of(
    *TRAIN,
    "megatron/core/pipeline_parallel/schedules.py forward_step",
    "megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py all_gather_params",
)
BUILD = traceback_of(
    "megatron/bridge/training/setup.py setup", "megatron/bridge/models/model_provider.py provide_distributed_model"
)
LOAD = traceback_of(
    "megatron/bridge/training/setup.py setup", "megatron/bridge/training/checkpointing.py load_checkpoint"
)
SAVE = traceback_of(
    "megatron/bridge/training/train.py train", "megatron/bridge/training/checkpointing.py save_checkpoint"
)
EVALUATE = traceback_of(
    "megatron/bridge/training/eval.py evaluate_and_print_results", "megatron/bridge/training/eval.py evaluate"
)


def modern(s: tuple[float, ...], extra: str = "", allowed: str = "", process: str | None = None, gpu: int = 0) -> str:
    requested, total, allocated, free, spare = s
    mine = process if process is not None else f"this process has {total - free:.2f} GiB memory in use"
    return (
        f"CUDA out of memory. Tried to allocate {requested:.2f} GiB. GPU {gpu} has a total capacity of {total:.2f} GiB of "
        f"which {free:.2f} GiB is free. {extra}Including non-PyTorch memory, {mine}. {allowed}Of the allocated memory "
        f"{allocated:.2f} GiB is allocated by PyTorch, and {spare:.2f} GiB is reserved by PyTorch but unallocated. If "
        "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation.  See documentation for Memory Management"
    )


def modern_facts(s: tuple[float, ...], **more: Any) -> dict[str, Any]:
    requested, total, allocated, free, spare = s
    facts = {
        "requested_bytes": size(requested)[1],
        "total_bytes": size(total)[1],
        "free_bytes": size(free)[1],
        "process_bytes": size(total - free)[1],
        "allocated_bytes": size(allocated)[1],
        "unallocated_bytes": size(spare)[1],
        "device": 0,
    }
    return {**facts, **more}


Framing = Callable[[str], str]


def _ranked(mark: str) -> Framing:
    return lambda text: "".join(f"{mark}{line}\n" for line in text.splitlines())


NOISE = (
    "[rank{r}]:[E1201 12:00:00.000000000 ProcessGroupNCCL.cpp:616] [Rank {r}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=12, OpType=_ALLGATHER_BASE) ran for 600000 milliseconds before timing out.\n"
)

ELASTIC = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2025-03-01_12:00:09
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 101)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2025-03-01_12:00:01
  rank      : {rank} (local_rank: {rank})
  exitcode  : 1 (pid: 100)
============================================================
"""

FRAMINGS: dict[str, tuple[Framing, int | None]] = {
    "plain": (lambda t: t, None),
    "rank": (_ranked("[rank5]: "), 5),
    "srun": (_ranked("3: "), 3),
    "tee": (_ranked("[default7]:"), 7),
    "name_and_rank": (_ranked("trainer/0 [rank54]:"), 54),
    "mpirun": (_ranked("[1,6]<stderr>:"), 6),
    "ansi": (lambda t: "".join(f"\x1b[31m\x1b[1m{line}\x1b[0m\n" for line in t.splitlines()), None),
    "crlf": (lambda t: t.replace("\n", "\r\n"), None),
    "watchdogs_first": (lambda t: "".join(NOISE.format(r=r) for r in (1, 2)) + _ranked("[rank0]: ")(t), 0),
    "watchdogs_after": (lambda t: _ranked("[rank0]: ")(t) + "".join(NOISE.format(r=r) for r in (1, 2)), 0),
    "progress_bar": (lambda t: " 10%|#   | 1/10\r 20%|##  | 2/10\r" + t, None),
}


def texts() -> Iterator[Text]:
    yield from _modern()
    yield from _older()
    yield from _disguised()
    yield from _host()
    yield from _configuration()
    yield from _framed()
    yield from _special()


def _modern() -> Iterator[Text]:
    for n, s in enumerate(SIZES):
        oom = f"torch.OutOfMemoryError: {modern(s)}\n"
        for name, trace, cause, phase in (
            ("loss", LOSS, "logits", "forward"),
            ("attention", ATTENTION, "unfused_attention", "forward"),
            ("mlp", MLP, "activations", "forward"),
            ("first_step", STEP, "optimizer_first_step", "optimizer_step"),
            ("gather", GATHER, "fsdp_buffers", "forward"),
            ("build", BUILD, "model_build", "model_build"),
            ("load", LOAD, "checkpoint_load", "checkpoint_load"),
            ("save", SAVE, "checkpoint_save", "checkpoint_save"),
            ("evaluate", EVALUATE, "evaluation", "evaluation"),
        ):
            yield Text(f"{name}_{n}", trace + oom, "torch_oom", cause, modern_facts(s), phase=phase)
        requested, total, allocated, free, spare = s
        pieces = (requested, total, allocated - requested * 4, free, requested * 4 + 0.5)
        yield Text(
            f"fragmented_{n}",
            MLP + f"torch.OutOfMemoryError: {modern(pieces)}\n",
            "torch_oom",
            "fragmentation",
            modern_facts(pieces),
        )
        held = total * 0.4
        other = f"Process 4711 has {held:.2f} GiB memory in use. "
        crowded = (requested, total, allocated - held, free, spare)
        mine = f"this process has {total - free - held:.2f} GiB memory in use"
        yield Text(
            f"other_process_{n}",
            f"torch.cuda.OutOfMemoryError: {modern(crowded, other, process=mine)}\n",
            "torch_oom",
            "other_process",
            modern_facts(crowded, other_process_bytes=size(held)[1], process_bytes=size(total - free - held)[1]),
        )
        zero = modern(s, process="this process has 0 bytes memory in use")
        yield Text(
            f"container_{n}",
            LOSS + f"torch.OutOfMemoryError: {zero}\n",
            "torch_oom",
            "logits",
            modern_facts(s, process_bytes=None),
        )
        cap = total * 0.6
        capped = (requested, total, cap - spare - requested / 2, total - cap, spare)
        yield Text(
            f"capped_{n}",
            f"torch.OutOfMemoryError: {modern(capped, allowed=f'{cap:.2f} GiB allowed; ')}\n",
            "torch_oom",
            "memory_cap",
            modern_facts(capped, allowed_bytes=size(cap)[1]),
        )
        pool = allocated * 0.3
        graphs = modern(s).replace(
            "is allocated by PyTorch, and",
            f"is allocated by PyTorch, with {pool:.2f} GiB allocated in private pools (e.g., CUDA Graphs), and",
        )
        yield Text(
            f"graphs_{n}",
            f"torch.OutOfMemoryError: {graphs}\n",
            "torch_oom",
            "cuda_graphs",
            modern_facts(s, private_pool_bytes=size(pool)[1]),
        )
        cut = modern(s)[: modern(s).index("Including")]
        yield Text(
            f"cut_{n}",
            LOSS + f"torch.OutOfMemoryError: {cut}",
            "torch_oom",
            "logits",
            {
                k: v
                for k, v in modern_facts(s).items()
                if k in ("requested_bytes", "total_bytes", "free_bytes", "device")
            },
        )
        yield Text(
            f"misspelt_{n}",
            LOSS + modern(s).replace("capacity", "capacty") + "\n",
            "torch_oom",
            "logits",
            modern_facts(s),
        )
        yield Text(
            f"wrapped_{n}",
            LOSS + "torch.OutOfMemoryError: " + _wrapped(modern(s), 60) + "\n",
            "torch_oom",
            "logits",
            modern_facts(s),
        )


def _wrapped(text: str, width: int) -> str:
    """Broken at blanks, as a terminal or a chat does."""
    words, lines = text.split(" "), [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return "\n".join(lines)


def _older() -> Iterator[Text]:
    for n, (requested, total, allocated, free, spare) in enumerate(SIZES):
        reserved = allocated + spare
        base = {
            "requested_bytes": size(requested)[1],
            "total_bytes": size(total)[1],
            "allocated_bytes": size(allocated)[1],
            "free_bytes": size(free)[1],
            "reserved_bytes": size(reserved)[1],
            "device": 1,
        }
        body = (
            f"CUDA out of memory. Tried to allocate {requested:.2f} GiB (GPU 1; {total:.2f} GiB total capacity; "
            f"{allocated:.2f} GiB already allocated; {free:.2f} GiB free; {reserved:.2f} GiB "
        )
        yield Text(
            f"two_{n}",
            LOSS
            + f"RuntimeError: {body}reserved in total by PyTorch) If reserved memory is >> allocated memory try setting "
            "max_split_size_mb to avoid fragmentation.  See documentation\n",
            "torch_oom",
            "logits",
            base,
        )
        yield Text(f"oldest_{n}", LOSS + f"RuntimeError: {body}cached)\n", "torch_oom", "logits", base)
        npu = (
            body.replace("CUDA", "NPU")
            .replace("GPU 1", "NPU 1")
            .replace("already allocated; ", f"already allocated; {allocated:.2f} GiB current active; ")
        )
        yield Text(
            f"npu_{n}",
            MLP + f"RuntimeError: {npu}reserved in total by PyTorch)\n",
            "torch_oom",
            "activations",
            {**base, "active_bytes": size(allocated)[1]},
        )
        hip = (
            f"HIP out of memory. Tried to allocate {requested:.2f} GiB. GPU 0 has a total capacity of {total:.2f} GiB of "
            f"which {free:.2f} GiB is free. Of the allocated memory {allocated:.2f} GiB is allocated by PyTorch, and "
            f"{spare:.2f} GiB is reserved by PyTorch but unallocated."
        )
        facts = modern_facts((requested, total, allocated, free, spare))
        del facts["process_bytes"]
        yield Text(f"hip_{n}", LOSS + f"torch.OutOfMemoryError: {hip}\n", "torch_oom", "logits", facts)
        yield Text(
            f"malloc_async_{n}",
            MLP + "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\n"
            f"Currently allocated     : {allocated:.2f} GiB\nRequested               : {requested:.2f} GiB\n"
            f"Device limit            : {total:.2f} GiB\nFree (according to CUDA): {free:.2f} GiB\n"
            "PyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB\n",
            "cuda_malloc_async",
            "activations",
            {
                "requested_bytes": size(requested)[1],
                "total_bytes": size(total)[1],
                "allocated_bytes": size(allocated)[1],
                "free_bytes": size(free)[1],
                "device": 0,
            },
        )


def _disguised() -> Iterator[Text]:
    for n, amount in enumerate((24, 4 << 20, 1 << 30)):
        yield Text(
            f"nccl_calloc_{n}",
            f"node1:12:34 [0] include/alloc.h:178 NCCL WARN Failed to CUDA calloc async {amount} bytes\n",
            "nccl_oom",
            "outside_pool",
            {"requested_bytes": amount},
        )
    for n, text in enumerate(
        (
            "node1:12:34 [2] NCCL WARN Cuda failure 2 'out of memory'",
            "torch.distributed.DistBackendError: NCCL error: unhandled cuda error. Last error: Cuda failure 'out of memory'",
            "node7:1:2 [0] transport/p2p.cc NCCL WARN Cuda failure 2 'out of memory'",
        )
    ):
        yield Text(f"nccl_failure_{n}", text + "\n", "nccl_oom", "outside_pool")
    for kind, lines in (
        (
            "cuda_error_oom",
            (
                "RuntimeError: CUDA error: out of memory",
                "torch.AcceleratorError: CUDA error: out of memory",
                "cudaErrorMemoryAllocation: allocation failed",
            ),
        ),
        (
            "triton_oom",
            (
                "RuntimeError: Triton Error [CUDA]: out of memory",
                "Triton Error [HIP]: out of memory",
                "triton.runtime.errors: Triton Error [CUDA]: out of memory",
            ),
        ),
        (
            "blas_oom",
            (
                "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
                "RuntimeError: CUDA error: HIPBLAS_STATUS_ALLOC_FAILED",
                "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
            ),
        ),
        (
            "nvshmem_oom",
            (
                "/src/mem.cpp:12: NVSHMEM cuMemCreate failed",
                "NVSHMEM ERROR: symmetric heap out of memory",
                "nvshmem: heap alloc failed",
            ),
        ),
        (
            "allocator_assert",
            (
                'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1016',
                "RuntimeError: CUDA driver error: invalid argument",
                "RuntimeError: CUDA driver error: out of memory",
            ),
        ),
    ):
        for n, line in enumerate(lines):
            yield Text(f"{kind}_{n}", line + "\n", kind, "outside_pool")
    for n, amount in enumerate((1 << 28, 5 << 30, 7 << 20)):
        yield Text(
            f"jax_{n}",
            f"jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate "
            f"{amount} bytes.\n",
            "jax_oom",
            "model_states",
            {"requested_bytes": amount},
        )
        yield Text(
            f"habana_{n}",
            f"RuntimeError: [Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::{amount} "
            f"({amount >> 20})MB\n",
            "habana_oom",
            "model_states",
            {"requested_bytes": amount},
        )
    for n, line in enumerate(
        (
            "RuntimeError: level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
            "Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)",
            "ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
        )
    ):
        yield Text(f"level_zero_{n}", line + "\n", "level_zero_oom", "model_states")
    for n, amount in enumerate(("13535.27", "65536.00", "999999.99")):
        yield Text(
            f"absurd_{n}",
            f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {amount} GiB. GPU 0 has a total capacity of 79.11 "
            "GiB of which 60.00 GiB is free. Including non-PyTorch memory, this process has 19.11 GiB memory in use. Of the "
            "allocated memory 18.00 GiB is allocated by PyTorch, and 0.20 GiB is reserved by PyTorch but unallocated.\n",
            "torch_oom",
            "corrupt_shape",
            {"requested_bytes": round(round(float(amount) * 100) * GIB / 100), "device": 0},
            outcome="not_gpu_memory",
        )
        yield Text(
            f"exabyte_{n}",
            "x\n" * n + "RuntimeError: CUDA out of memory. Tried to allocate more than 1EB memory.\n",
            "absurd_request",
            "corrupt_shape",
            outcome="not_gpu_memory",
        )
        yield Text(
            f"clone_{n}",
            "UserWarning: Failed to clone() tensor with name layers.0.weight on rank 0. This may mean that this "
            f"state_dict entry could point to invalid memory. Error: CUDA out of memory. Tried to allocate {n + 1}.00 GiB\n",
            "clone_oom",
            "checkpoint_save",
            {"requested_bytes": (n + 1) * GIB},
        )


def _host() -> Iterator[Text]:
    def host(name: str, text: str, kind: str, cause: str = "host_memory", **facts: Any) -> Text:
        return Text(name, text, kind, cause, facts, outcome="not_gpu_memory")

    for n, rss in enumerate((2_097_152, 250_000_000, 1_073_741_824)):
        yield host(
            f"kernel_{n}",
            f"[12345.6] Out of memory: Killed process {1000 + n} (python) total-vm:{rss * 2}kB, "
            f"anon-rss:{rss}kB, file-rss:1024kB, shmem-rss:4kB, UID:0\n",
            "kernel_oom",
            process_id=1000 + n,
            host_resident_bytes=rss * KIB,
            host_virtual_bytes=rss * 2 * KIB,
            process_name="python",
        )
        yield host(
            f"cgroup_{n}",
            f"Memory cgroup out of memory: Killed process {n + 7} (pt_main_thread) total-vm:{rss}kB, "
            f"anon-rss:{rss}kB\n",
            "kernel_oom",
            process_id=n + 7,
            host_resident_bytes=rss * KIB,
        )
        yield host(
            f"cpu_allocator_{n}",
            "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't "
            f"allocate memory: you tried to allocate {rss} bytes. Error code 12 (Cannot allocate memory)\n",
            "cpu_allocator",
            host_requested_bytes=rss,
        )
    for kind, lines in (
        (
            "sigkill",
            (
                "  exitcode  : -9 (pid: 4242)",
                "ERROR:torch.distributed.elastic: failed (exitcode: -9) local_rank: 3",
                "[2025-01-01] [ERROR] [launch.py:325:sigkill_handler] exits with return code = -9",
            ),
        ),
        (
            "slurm_oom",
            (
                "slurmstepd: error: Detected 3 oom_kill events in StepId=12.0.",
                "srun: error: node3: task 5: Out Of Memory",
                "slurmstepd: error: Detected 1 oom_kill event in StepId=99.batch. Some of the step tasks have been OOM Killed.",
            ),
        ),
        (
            "ray_oom",
            (
                "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
                "Task was killed due to the node running low on memory.",
                "(raylet) Worker was killed due to the node running low on memory",
            ),
        ),
        (
            "errno_12",
            (
                "OSError: [Errno 12] Cannot allocate memory",
                "terminate called after throwing: std::bad_alloc",
                "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 12.0 GiB for an array with shape (1,)",
            ),
        ),
        (
            "cgroup_oom",
            (
                "Last State: Terminated  Reason: OOMKilled  Exit Code: 137",
                "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=pod",
                "State: OOMKilled",
            ),
        ),
    ):
        for n, line in enumerate(lines):
            yield host(f"{kind}_{n}", line + "\n", kind)
    for n, line in enumerate(
        (
            "RuntimeError: DataLoader worker (pid 123) is killed by signal: Bus error. It is possible that dataloader's workers "
            "are out of shared memory. Please try to raise your shared memory limit.",
            "RuntimeError: DataLoader worker (pid 77) is killed by signal: Killed.",
            "RuntimeError: DataLoader worker (pid(s) 99) exited unexpectedly",
        )
    ):
        yield host(f"dataloader_{n}", line + "\n", "dataloader_killed", "shared_memory")


def _configuration() -> Iterator[Text]:
    rows = (
        ("fsdp_ckpt_format", "AssertionError: Megatron-FSDP requires the fsdp_dtensor checkpointing format!"),
        ("fsdp_max_connections", "AssertionError: FSDP requires CUDA_DEVICE_MAX_CONNECTIONS > 1 or unset."),
        ("fsdp_rank_order", "AssertionError: use_tp_pp_dp_mapping is not supported with Megatron FSDP"),
        (
            "fsdp_pipeline",
            'einops.EinopsError:  Error while processing rearrange-reduction pattern "(dp_cp tp) -> dp_cp tp"',
        ),
        ("fsdp_both", "ValueError: use_megatron_fsdp and use_torch_fsdp2 are mutually exclusive."),
        ("fsdp_meta", "NotImplementedError: Cannot copy out of meta tensor; no data!"),
    )
    for kind, line in rows:
        for n, mark in enumerate(("", "[rank3]: ", "0: ")):
            yield Text(
                f"{kind}_{n}", f"{mark}{line}\n", kind, "configuration", outcome="not_gpu_memory", rank=(None, 3, 0)[n]
            )


def _framed() -> Iterator[Text]:
    for name, (frame, rank) in FRAMINGS.items():
        for n, s in enumerate(SIZES):
            text = frame(LOSS + f"torch.OutOfMemoryError: {modern(s)}\n")
            yield Text(f"framed_{name}_{n}", text, "torch_oom", "logits", modern_facts(s), rank=rank)


def _special() -> Iterator[Text]:
    for n, s in enumerate(SIZES):
        larger = tuple(x * 2 for x in s)
        # Several GiB of the process outside PyTorch's pool are more than context and NCCL: then that is the cause.
        outside = s[1] - s[3] - s[2] - s[4] >= 3
        cause = "outside_pool" if outside else "model_states"
        one = f"[rank{n}]: torch.OutOfMemoryError: {modern(s)}"
        two = f"[rank9]: torch.OutOfMemoryError: {modern(larger)}"
        yield Text(f"one_line_{n}", f"{one}{two}\n", "torch_oom", cause, modern_facts(s), rank=n)
        yield Text(f"several_{n}", f"start\n{one}\n{two}\n{one}\n", "torch_oom", cause, modern_facts(s), rank=n, line=2)
        yield Text(
            f"root_cause_{n}",
            f"{two}\n{one}\n" + ELASTIC.format(rank=n),
            "torch_oom",
            cause,
            modern_facts(s),
            rank=n,
            line=2,
        )
        yield Text(
            f"killed_after_{n}", f"{one}\n  exitcode  : -9 (pid: 1)\n", "torch_oom", cause, modern_facts(s), rank=n
        )
        yield Text(
            f"times_{n}",
            f"2025-01-02 10:00:05,000 {two}\n2025-01-02 10:00:01,500 {one}\n",
            "torch_oom",
            cause,
            modern_facts(s),
            rank=n,
            line=2,
        )
        yield Text(
            f"expandable_on_{n}",
            f"export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n{LOSS}torch.OutOfMemoryError: {modern(s)}\n",
            "torch_oom",
            "logits",
            modern_facts(s),
        )
        yield Text(
            f"flushes_{n}",
            f"[WARNING] [stage3.py:1850:step] {n + 2} pytorch allocator cache flushes since last step. this happens when\n"
            + MLP.replace("mlp.py forward", "x.py f")
            + f"torch.OutOfMemoryError: {modern((s[0], *s[1:4], s[0] + 1))}\n",
            "torch_oom",
            "fragmentation",
            modern_facts((s[0], *s[1:4], s[0] + 1)),
        )
        yield Text(
            f"script_{n}",
            "Traceback of TorchScript (most recent call last):\n"
            '  File "/opt/megatron/core/fusions/fused_bias_swiglu.py", line 12, in fallback_function\n'
            f"RuntimeError: {modern(s)}\n",
            "torch_oom",
            "activations",
            modern_facts(s),
            phase="forward",
        )
    for n, line in enumerate(
        (
            "RuntimeError: CUDA error: an illegal memory access was encountered",
            "KeyError: 'decoder.layers.0.weight'",
            "slurmstepd: error: *** JOB 12 ON node1 CANCELLED AT 2025-01-01T00:00:00 DUE TO TIME LIMIT ***",
        )
    ):
        kind = ("illegal_access", "exception", "time_limit")[n]
        yield Text(f"not_memory_{n}", line + "\n", kind, "not_out_of_memory", outcome="not_gpu_memory")
        yield Text(
            f"only_noise_{n}",
            NOISE.format(r=n) * (n + 1),
            "watchdog",
            "collective_timeout",
            outcome="not_gpu_memory",
            rank=n,
        )
