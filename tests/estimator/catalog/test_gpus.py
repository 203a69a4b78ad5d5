"""The GPU table."""

from __future__ import annotations

import pytest

from estimator.catalog import find_gpu, list_gpus
from estimator.catalog.gpus import GIB
from estimator.errors import JobError

ALIASES = [
    ("NVIDIA H100 80GB HBM3", "h100-80gb"),
    ("h100", "h100-80gb"),
    ("H100-80GB", "h100-80gb"),
    ("NVIDIA H200", "h200-141gb"),
    ("h200_141gb", "h200-141gb"),
    ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
    ("A100-SXM4-40GB", "a100-40gb"),
    ("NVIDIA H100 NVL", "h100-nvl-94gb"),
    ("NVIDIA B200", "b200"),
    ("GB200", "gb200"),
    ("gb300", "gb300"),
    ("NVIDIA GH200 480GB", "gh200-96gb"),
    ("NVIDIA L40S", "l40s-48gb"),
]


@pytest.mark.parametrize(("alias", "name"), ALIASES)
def test_aliases(alias: str, name: str) -> None:
    assert find_gpu(alias).name == name


def test_h200_is_what_cuda_reports() -> None:
    """cudaMemGetInfo on an NVIDIA H200, driver 580.159."""
    assert find_gpu("h200").total_bytes == 150_109_880_320


def test_the_table_is_consistent() -> None:
    gpus = list_gpus()
    assert len({gpu.name for gpu in gpus}) == len(gpus)
    for gpu in gpus:
        assert 30 * GIB < gpu.total_bytes < 300 * GIB
        assert gpu.family in {"ampere", "ada", "hopper", "blackwell"}
        assert gpu.nvlink_bytes_per_second > 1e9
        assert gpu.inter_node_bytes_per_second < gpu.nvlink_bytes_per_second or gpu.nvlink_domain_size == 1
        assert "total_bytes:" in gpu.source
        assert gpu.as_dict()["total_bytes"] == gpu.total_bytes


@pytest.mark.parametrize("name", ["h10", "h100-90gb", "v100", "", "x" * 10_000])
def test_unknown_gpus_get_suggestions(name: str) -> None:
    with pytest.raises(JobError) as error:
        find_gpu(name)
    assert error.value.problems[0].path == "cluster.gpu"
    assert "one of" in (error.value.problems[0].suggestion or "")
