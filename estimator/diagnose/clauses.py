"""The clauses of allocator and kernel messages: which fact each states, as a table.

Sources: PyTorch c10/cuda/CUDACachingAllocator.cpp of 1.4 ("cached"), 1.13 and 2.0 ("total capacity; already
allocated"),
2.1 and later ("has a total capacity of ... of which ... is free", once with "capacty"), CUDAMallocAsyncAllocator.cpp;
torch_npu ("current active"); Linux mm/oom_kill.c; NCCL src/include/alloc.h; PyTorch c10/core/impl/alloc_cpu.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from estimator.diagnose.evidence import Fact, Span
from estimator.diagnose.units import AMOUNT, BINARY, Quantity, quantity

_S = r"\s{1,8}"


@dataclass(frozen=True, slots=True)
class Clause:
    """``pattern`` has two groups (number, unit) for an amount, one for a plain number or text."""

    name: str
    pattern: re.Pattern[str]
    kind: str = "amount"
    zero_is_unknown: bool = False
    units: Mapping[str, int] | None = None


def _clause(name: str, pattern: str, kind: str = "amount", zero_is_unknown: bool = False) -> Clause:
    return Clause(name, re.compile(pattern), kind, zero_is_unknown)


TORCH: tuple[Clause, ...] = (
    _clause("requested_bytes", rf"Tried to allocate{_S}{AMOUNT}"),
    _clause("device", rf"(?:GPU|NPU|XPU|MUSA|device){_S}(\d{{1,4}})\b", "integer"),
    _clause("total_bytes", rf"total{_S}capac(?:ity|ty){_S}of{_S}{AMOUNT}"),
    _clause("total_bytes", rf"{AMOUNT}{_S}total{_S}capac(?:ity|ty)"),
    _clause("free_bytes", rf"of{_S}which{_S}{AMOUNT}{_S}is{_S}free"),
    _clause("free_bytes", rf"{AMOUNT}{_S}free\b"),
    _clause("allowed_bytes", rf"{AMOUNT}{_S}allowed\b"),
    _clause(
        "other_process_bytes", rf"Process{_S}\d{{1,10}}{_S}has{_S}{AMOUNT}{_S}memory{_S}in{_S}use", zero_is_unknown=True
    ),
    _clause("process_bytes", rf"this{_S}process{_S}has{_S}{AMOUNT}{_S}memory{_S}in{_S}use", zero_is_unknown=True),
    _clause("allocated_bytes", rf"allocated{_S}memory{_S}{AMOUNT}{_S}is{_S}allocated{_S}by{_S}PyTorch"),
    _clause("allocated_bytes", rf"{AMOUNT}{_S}already{_S}allocated"),
    _clause("private_pool_bytes", rf"with{_S}{AMOUNT}{_S}allocated{_S}in{_S}private{_S}pools"),
    _clause("unallocated_bytes", rf"{AMOUNT}{_S}is{_S}reserved{_S}by{_S}PyTorch{_S}but{_S}unallocated"),
    _clause("reserved_bytes", rf"{AMOUNT}{_S}reserved{_S}in{_S}total"),
    _clause("reserved_bytes", rf"{AMOUNT}{_S}cached\b"),
    _clause("active_bytes", rf"{AMOUNT}{_S}current{_S}active\b"),
)

MALLOC_ASYNC: tuple[Clause, ...] = (
    _clause("device", r"Allocation on device (\d{1,4})", "integer"),
    _clause("allocated_bytes", rf"Currently allocated\s{{0,24}}:?\s{{0,8}}{AMOUNT}"),
    _clause("requested_bytes", rf"Requested\s{{0,24}}:?\s{{0,8}}{AMOUNT}"),
    _clause("total_bytes", rf"Device limit\s{{0,24}}:?\s{{0,8}}{AMOUNT}"),
    _clause("free_bytes", rf"Free \(according to CUDA\)\s{{0,24}}:?\s{{0,8}}{AMOUNT}"),
    _clause("allowed_bytes", rf"memory fraction\)\s{{0,24}}:?\s{{0,8}}{AMOUNT}"),
)

KERNEL: tuple[Clause, ...] = (
    _clause("process_id", r"[Kk]ill(?:ed)? process (\d{1,10})", "integer"),
    _clause("process_name", r"[Kk]ill(?:ed)? process \d{1,10} \(([^)\s]{1,64})\)", "text"),
    _clause("host_resident_bytes", r"anon-rss:(\d{1,20})(kB)"),
    _clause("host_virtual_bytes", r"total-vm:(\d{1,20})(kB)"),
    _clause("host_file_bytes", r"file-rss:(\d{1,20})(kB)"),
    _clause("host_shared_bytes", r"shmem-rss:(\d{1,20})(kB)"),
)

OTHERS: Mapping[str, tuple[Clause, ...]] = {
    "nccl_oom": (_clause("requested_bytes", r"(?:calloc|malloc|alloc)(?: async)? (\d{1,20}) (bytes)"),),
    "cpu_allocator": (_clause("host_requested_bytes", r"tried to allocate (\d{1,24}) (bytes)"),),
    "errno_12": (_clause("host_requested_bytes", rf"Unable to allocate {AMOUNT}"),),
    "ray_oom": (
        _clause("host_used_bytes", rf"[Mm]emory (?:used|usage)[^0-9]{{0,40}}{AMOUNT}"),
        _clause("host_total_bytes", rf"/ {AMOUNT}"),
    ),
    "jax_oom": (_clause("requested_bytes", rf"allocat(?:e|ing){_S}{AMOUNT}"),),
    "habana_oom": (_clause("requested_bytes", r"size::?\s{0,4}(\d{1,20})()"),),
    "sigkill": (
        _clause("killed_local_rank", r"local_rank\s{0,4}[:=]\s{0,4}(\d{1,6})", "integer"),
        _clause("killed_process_id", r"\(pid:?\s{0,4}(\d{1,10})\)", "integer"),
    ),
    "slurm_oom": (_clause("oom_kill_events", r"Detected (\d{1,6}) oom[_-]kill", "integer"),),
    "cache_flushes": (_clause("cache_flushes", r"(\d{1,9}) pytorch allocator cache flushes", "integer"),),
    "alloc_retries": (_clause("alloc_retries", r"alloc[_-]re(?:tries|tires)\W{1,6}([1-9]\d{0,9})", "integer"),),
}

CLAUSES: Mapping[str, tuple[Clause, ...]] = {
    **OTHERS,
    "torch_oom": TORCH,
    "torch_oom_bare": TORCH,
    "clone_oom": TORCH,
    "level_zero_oom": TORCH,
    "cuda_error_oom": TORCH,
    "cuda_malloc_async": MALLOC_ASYNC,
    "kernel_oom": KERNEL,
    "cgroup_oom": KERNEL,
}
"""Kind of failure -> clauses that its message may have."""

REPEATED = frozenset({"other_process_bytes"})
"""Facts of which a message may have several; of all others the first counts."""

UNLIMITED_BYTES = 1 << 60
"""CUDAMallocAsyncAllocator prints the largest integer where no limit is set."""

NUMBER_PER_MESSAGE = 16


def facts_in(kind_id: str, text: str, place: Callable[[int, int], Span]) -> Iterator[Fact]:
    """The facts of one message. ``place`` turns offsets in ``text`` into a span of the log."""
    seen: set[str] = set()
    for clause in CLAUSES.get(kind_id, ()):
        if clause.name in seen and clause.name not in REPEATED:
            continue
        for count, match in enumerate(clause.pattern.finditer(text)):
            if count == NUMBER_PER_MESSAGE:
                break
            fact = _fact(clause, match, place)
            if fact is None:
                continue
            seen.add(clause.name)
            yield fact
            if clause.name not in REPEATED:
                break


def _fact(clause: Clause, match: re.Match[str], place: Callable[[int, int], Span]) -> Fact | None:
    span = place(match.start(), match.end())
    if clause.kind == "integer":
        return Fact(clause.name, int(match[1]), span)
    if clause.kind == "text":
        return Fact(clause.name, match[1], span)
    amount: Quantity | None = quantity(match[1], match[2] or "bytes", clause.units or BINARY)
    if amount is None:
        return Fact(clause.name, None, span, 0, "a number that is no amount of memory")
    if clause.zero_is_unknown and amount.num_bytes == 0:
        return Fact(clause.name, None, span, 0, "0 bytes: the driver does not see this process (a container); unknown")
    if clause.name == "allowed_bytes" and amount.num_bytes >= UNLIMITED_BYTES:
        return Fact(clause.name, None, span, 0, "no limit is set")
    return Fact(clause.name, amount.num_bytes, span, amount.resolution_bytes)
