"""What Bridge overwrites, without Bridge: the rules one by one (the whole is compared in test_effective_bridge.py)."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest

from estimator.catalog import find_recipe, list_recipes
from estimator.job import build_document, effective_document

RECIPE = "llama3_8b_pretrain_config"


def effective(*overrides: str, world_size: int = 16, env: dict[str, str] | None = None) -> dict[str, Any]:
    return effective_document(build_document(RECIPE, overrides=list(overrides)).values, world_size, env=env).values


# overrides, path, value afterwards; source: bridge_rules numbers in the code
RULES: list[tuple[list[str], str, Any]] = [
    (["ddp.use_megatron_fsdp=true"], "dist.use_megatron_fsdp", True),
    (["dist.use_megatron_fsdp=true"], "ddp.use_megatron_fsdp", True),
    (
        ["dist.use_megatron_fsdp=true", "ddp.use_distributed_optimizer=false"],
        "optimizer.use_distributed_optimizer",
        True,
    ),
    (["dist.use_megatron_fsdp=true"], "ddp.average_in_collective", False),
    (["dist.use_megatron_fsdp=true", "ddp.disable_symmetric_registration=true"], "ddp.average_in_collective", True),
    (
        ["dist.use_megatron_fsdp=true", "optimizer.use_precision_aware_optimizer=true"],
        "ddp.megatron_fsdp_use_decoupled_grad",
        True,
    ),
    (["dist.use_megatron_fsdp=true", "ddp.nccl_ub=true"], "ddp.fsdp_manual_registration", True),
    (["ddp.megatron_fsdp_max_pool_double_buffer=true"], "ddp.fsdp_double_buffer", True),
    (["ddp.grad_reduce_in_fp32=false"], "ddp.grad_reduce_in_fp32", True),
    (
        ["cfg.mixed_precision = bf16_mixed()\ncfg.mixed_precision.grad_reduce_in_fp32 = False"],
        "ddp.grad_reduce_in_fp32",
        False,
    ),
    (["cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=False)"], "ddp.bucket_size", 134217728),
    (["cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=False, bucket_size=5)"], "ddp.bucket_size", 5),
    (
        ["cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=False)", "ddp.overlap_grad_reduce=false"],
        "ddp.overlap_grad_reduce",
        True,
    ),
    (["model.sequence_parallel=true"], "model.sequence_parallel", False),
    (["model.sequence_parallel=true", "model.tensor_model_parallel_size=2"], "model.sequence_parallel", True),
    (["model.ffn_hidden_size=null"], "model.ffn_hidden_size", 16384),
    (["model.kv_channels=null"], "model.kv_channels", 128),
    (["model.num_query_groups=null"], "model.num_query_groups", 32),
    (
        ["model.expert_tensor_parallel_size=null", "model.tensor_model_parallel_size=4"],
        "model.expert_tensor_parallel_size",
        4,
    ),
    ([], "optimizer.overlap_param_gather", True),
    ([], "model.recompute_modules", ["core_attn"]),
    ([], "model.autocast_dtype", "bfloat16"),
    ([], "model.cuda_graph_modules", []),
    (["dist.lazy_mpu_init=true"], "model.use_cpu_initialization", True),
    (["train.train_iters=null", "train.train_samples=51200"], "train.train_iters", 100),
    (["mixed_precision=bf16_with_fp8_delayed_scaling_mixed"], "model.fp8_param", True),
    (["mixed_precision=bf16_with_fp8_delayed_scaling_mixed"], "ddp.fp8_param_gather", True),
]


@pytest.mark.parametrize(("overrides", "path", "value"), RULES)
def test_rules(overrides: list[str], path: str, value: Any) -> None:
    section, _, name = path.partition(".")
    assert effective(*overrides)[section][name] == value


def test_plain_ddp_needs_all_four_flags() -> None:
    off = [
        f"{s}.{n}=false" for s in ("ddp", "optimizer") for n in ("use_distributed_optimizer", "overlap_param_gather")
    ]
    values = effective(*off)
    assert values["ddp"]["use_distributed_optimizer"] is False
    assert values["optimizer"]["overlap_param_gather"] is False
    assert effective(*off[:3], "optimizer.overlap_param_gather=true")["ddp"]["overlap_param_gather"] is True


def test_one_data_parallel_rank_overlaps_nothing() -> None:
    values = effective("cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=False)", world_size=2)
    assert values["ddp"]["bucket_size"] is None
    assert values["ddp"]["overlap_grad_reduce"] is False


def test_exported_variables_win() -> None:
    job = effective_document(
        find_recipe(RECIPE).document(), 16, env={"PYTORCH_CUDA_ALLOC_CONF": "backend:native", "A": "1"}
    )
    assert job.environment["PYTORCH_CUDA_ALLOC_CONF"] == "backend:native"
    assert job.values["env_vars"]["A"] == "1"
    assert job.environment["NCCL_NVLS_ENABLE"] == "0"


def test_the_input_is_left_alone_and_the_result_is_stable() -> None:
    for recipe in list_recipes()[::5]:
        document = recipe.document()
        before = copy.deepcopy(document)
        once = effective_document(document, 64)
        assert document == before
        for change in once.changes:
            assert change.from_ != change.to
        if any(change.path == "ddp.use_distributed_optimizer" for change in once.changes):
            continue  # comm_overlap came too early for it the first time, as in Bridge
        twice = effective_document(once.values, 64)
        assert twice.values == once.values
        assert twice.changes == ()


def test_untouched_sections_are_shared() -> None:
    document = find_recipe(RECIPE).document()
    assert effective_document(document, 16).values["logger"] is document["logger"]


def test_odd_documents_do_not_raise() -> None:
    for overrides in (
        ["model.tensor_model_parallel_size=64"],
        ["model.num_attention_heads=0"],
        ["model.pipeline_model_parallel_layout='Et*3|(tt|)*3,m|L'", "model.pipeline_model_parallel_size=2"],
        ["model.cuda_graph_impl=local", "model.cuda_graph_scope=[full_iteration]"],
        ["model.window_size=[128,0]", "mixed_precision=null", "comm_overlap=null"],
    ):
        try:
            document = build_document(RECIPE, overrides=overrides).values
        except Exception:
            continue
        effective_document(document, 3)


def test_a_candidate_costs_well_under_a_millisecond() -> None:
    document = find_recipe(RECIPE).document()
    effective_document(document, 16)
    times = []
    for _ in range(50):
        start = time.perf_counter()
        effective_document(document, 16)
        times.append(time.perf_counter() - start)
    assert min(times) < 1e-3
