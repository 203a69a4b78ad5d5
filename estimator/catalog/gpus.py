"""GPUs by name: memory as CUDA reports it, arithmetic, links.

``total_bytes`` is what ``cudaMemGetInfo`` calls total (torch: ``total_memory``): less than nvidia-smi's, which counts
the driver's reserve too. It moves by some ten MiB with the driver; the lower of the values seen is used. ``source``
says per number where it comes from and which are estimates. Link speeds are per GPU and direction;
``inter_node_bytes_per_second`` is the usual cluster's (one 200 Gb/s port a GPU for Ampere, 400 Gb/s from Hopper, 800
Gb/s for B300 and GB300), not the card's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from estimator.catalog.fields import nearest
from estimator.errors import FieldProblem, JobError

GIB = 1024**3
_TORCH = "torch's 'total capacity of {} GiB' in public out-of-memory reports"
_NVIDIA = "NVIDIA data sheet"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU. Rates are peaks of the data sheet, without sparsity."""

    name: str
    aliases: tuple[str, ...]
    """Other spellings, nvidia-smi's names among them; matched without regard to case, spaces and punctuation."""
    family: str
    """ampere | ada | hopper | blackwell."""
    total_bytes: int
    bf16_flops_per_second: float
    """Dense."""
    hbm_bytes_per_second: float
    nvlink_bytes_per_second: float
    """Per direction; where there is no NVLink, PCIe's."""
    nvlink_domain_size: int
    """GPUs that reach each other over NVLink; 1 = none."""
    inter_node_bytes_per_second: float
    source: str

    @property
    def default_gpus_per_node(self) -> int:
        """GPUs a host of this kind usually has: 4 on Grace-Blackwell trays, 1 on GH200, else 8."""
        if self.name.startswith("gh200"):
            return 1
        return 4 if self.name.startswith("gb") else 8

    def as_dict(self) -> dict[str, Any]:
        """The row of ``GET /gpus``."""
        return {**asdict(self), "aliases": list(self.aliases), "default_gpus_per_node": self.default_gpus_per_node}


def _gpu(
    name: str,
    aliases: str,
    family: str,
    gib: float,
    memory_source: str,
    tflops: float,
    hbm_gb: float,
    nvlink_gb: float,
    domain: int,
    port_gbit: float,
) -> Gpu:
    return Gpu(
        name=name,
        aliases=tuple(part.strip() for part in aliases.split("|")),
        family=family,
        total_bytes=int(gib * GIB) // 4096 * 4096,
        bf16_flops_per_second=tflops * 1e12,
        hbm_bytes_per_second=hbm_gb * 1e9,
        nvlink_bytes_per_second=nvlink_gb * 1e9,
        nvlink_domain_size=domain,
        inter_node_bytes_per_second=port_gbit * 1e9 / 8,
        source=f"total_bytes: {memory_source}; rates: {_NVIDIA}; inter-node: estimate, {port_gbit:g} Gb/s a GPU",
    )


_MEASURED_H200 = "cudaMemGetInfo on an NVIDIA H200, driver 580.159, 150109880320 bytes (nvidia-smi: 143771 MiB)"
_ESTIMATE = "estimate, {}"

# name, aliases, family, GiB, source of it, BF16 TFLOP/s, HBM GB/s, NVLink GB/s a direction, NVLink domain, Gb/s
GPUS: tuple[Gpu, ...] = (
    _gpu(
        "a100-40gb",
        "NVIDIA A100-SXM4-40GB | A100-SXM4-40GB | A100 SXM 40GB | NVIDIA A100-PCIE-40GB",
        "ampere",
        39.38,
        _TORCH.format("39.38"),
        312,
        1555,
        300,
        8,
        200,
    ),
    _gpu(
        "a100-80gb",
        "NVIDIA A100-SXM4-80GB | A100-SXM4-80GB | a100 | NVIDIA A100 80GB PCIe",
        "ampere",
        79.14,
        _TORCH.format("79.14"),
        312,
        2039,
        300,
        8,
        200,
    ),
    _gpu(
        "a800-80gb",
        "NVIDIA A800-SXM4-80GB | a800",
        "ampere",
        79.14,
        _ESTIMATE.format("as A100 80 GB"),
        312,
        2039,
        200,
        8,
        200,
    ),
    _gpu("l40s-48gb", "NVIDIA L40S | l40s", "ada", 44.39, _TORCH.format("44.39"), 362, 864, 32, 1, 200),
    _gpu(
        "h100-80gb",
        "NVIDIA H100 80GB HBM3 | h100 | h100-sxm | H100 SXM5 80GB",
        "hopper",
        79.11,
        _TORCH.format("79.11") + " (vllm-project/vllm#27508; nvidia-smi: 81559 MiB)",
        989.4,
        3352,
        450,
        8,
        400,
    ),
    _gpu(
        "h100-pcie-80gb",
        "NVIDIA H100 PCIe | h100-pcie",
        "hopper",
        79.10,
        _ESTIMATE.format("as H100 SXM"),
        756,
        2039,
        300,
        2,
        400,
    ),
    _gpu(
        "h100-nvl-94gb",
        "NVIDIA H100 NVL | h100-nvl",
        "hopper",
        93.00,
        _TORCH.format("93.00") + " (ali-vilab/VACE#56)",
        835,
        3938,
        300,
        2,
        400,
    ),
    _gpu("h800-80gb", "NVIDIA H800 | h800", "hopper", 79.11, _ESTIMATE.format("as H100 SXM"), 989.4, 3352, 200, 8, 400),
    _gpu("h20-96gb", "NVIDIA H20 | h20", "hopper", 95.00, _TORCH.format("95.00"), 148, 4000, 450, 8, 400),
    _gpu(
        "h200-141gb",
        "NVIDIA H200 | h200 | h200-sxm",
        "hopper",
        150109880320 / GIB,
        _MEASURED_H200,
        989.4,
        4800,
        450,
        8,
        400,
    ),
    _gpu(
        "h200-nvl-141gb",
        "NVIDIA H200 NVL | h200-nvl",
        "hopper",
        139.80,
        _ESTIMATE.format("as H200 SXM"),
        835,
        4800,
        450,
        4,
        400,
    ),
    _gpu("gh200-96gb", "NVIDIA GH200 480GB | gh200", "hopper", 94.50, _TORCH.format("94.50"), 989.4, 4000, 450, 1, 400),
    _gpu(
        "gh200-144gb",
        "NVIDIA GH200 144G HBM3e | gh200-hbm3e",
        "hopper",
        141.5,
        _ESTIMATE.format("144 GB less the driver's share on GH200 96 GB"),
        989.4,
        4900,
        450,
        2,
        400,
    ),
    _gpu(
        "b200",
        "NVIDIA B200 | b200-180gb | b200-192gb",
        "blackwell",
        178.35,
        _TORCH.format("178.35"),
        2250,
        8000,
        900,
        8,
        400,
    ),
    _gpu(
        "b300",
        "NVIDIA B300 SXM6 AC | NVIDIA B300 | b300-288gb",
        "blackwell",
        267.69,
        _TORCH.format("267.69"),
        2250,
        8000,
        900,
        8,
        800,
    ),
    _gpu("gb200", "NVIDIA GB200 | gb200-192gb", "blackwell", 184.31, _TORCH.format("184.31"), 2500, 8000, 900, 72, 400),
    _gpu(
        "gb300",
        "NVIDIA GB300 | gb300-288gb",
        "blackwell",
        276.5,
        _TORCH.format("276.50") + " (nvidia-smi: 284208 MiB)",
        2500,
        8000,
        900,
        72,
        800,
    ),
    _gpu(
        "rtx-pro-6000-96gb",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition | "
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition | rtx-pro-6000",
        "blackwell",
        94.96,
        _TORCH.format("94.96"),
        503,
        1597,
        64,
        1,
        400,
    ),
)


def _normal(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().removeprefix("nvidia"))


@functools.cache
def _by_alias() -> Mapping[str, Gpu]:
    return {_normal(alias): gpu for gpu in GPUS for alias in (gpu.name, *gpu.aliases)}


def list_gpus() -> tuple[Gpu, ...]:
    """All known GPUs, by family and size."""
    return GPUS


def find_gpu(name: str) -> Gpu:
    """The GPU of this name or alias. Raises JobError with the nearest names."""
    if not isinstance(name, str):
        raise JobError([FieldProblem("cluster.gpu", f"must be a GPU's name, not {type(name).__name__}")])
    gpu = _by_alias().get(_normal(name[:200]))
    if gpu is not None:
        return gpu
    word = _normal(name[:200])
    close = [_by_alias()[alias].name for alias in nearest(word, _by_alias())]
    close += [g.name for g in GPUS if word and (word in _normal(g.name) or _normal(g.name)[:4] == word[:4])]
    known = list(dict.fromkeys(close)) or [g.name for g in GPUS]
    suggestion = f"one of {', '.join(known[:6])}; or give cluster.total_bytes for a card that is not listed"
    raise JobError([FieldProblem("cluster.gpu", f"no GPU is called {name[:200]!r}", suggestion)])
