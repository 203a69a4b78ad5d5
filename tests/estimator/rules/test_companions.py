"""What a change of strategy brings with it, on real recipes."""

from __future__ import annotations

from typing import Any

import pytest

from estimator.catalog import find_recipe
from estimator.changes import Change, apply_changes
from estimator.job.effective import effective_document
from estimator.rules import STRATEGIES, check_rules, strategy_changes, strategy_of

LLAMA3_8B = "llama3_8b_pretrain_2gpu_h100_bf16_config"
MUST = {
    "dist.use_megatron_fsdp": True,
    "ddp.use_megatron_fsdp": True,
    "ddp.data_parallel_sharding_strategy": "optim_grads_params",
    "ddp.average_in_collective": False,
    "checkpoint.ckpt_format": "fsdp_dtensor",
}


def job(name: str = LLAMA3_8B, **fields: Any) -> dict[str, Any]:
    values = find_recipe(name).document()
    for path, value in fields.items():
        section, _, field = path.partition(".")
        values[section] = {**values[section], field: value}
    return values


def to(values: dict[str, Any], strategy: str, gpus: int = 16, family: str = "hopper") -> dict[str, Any]:
    effective = effective_document(values, gpus, family).values
    return {change.path: change.to for change in strategy_changes(values, effective, strategy, gpus, family)}


def test_full_sharding_of_llama3_8b() -> None:
    """The whole list for NVIDIA's own recipe, in one look (bridge_rules A, B, 'Recommended companions')."""
    folder = "nemo_experiments/default/checkpoints"
    assert to(job(), "optim_grads_params") == {
        **MUST,
        "checkpoint.save": folder + "_fsdp",
        "checkpoint.load": folder + "_fsdp",
        "ddp.megatron_fsdp_main_grads_dtype": "float32",
        "env.CUDA_DEVICE_MAX_CONNECTIONS": 32,
        "model.init_model_with_meta_device": True,
    }


@pytest.mark.parametrize(
    ("fields", "path", "wanted", "source"),
    [
        ({"mixed_precision.grad_reduce_in_fp32": False}, "ddp.megatron_fsdp_main_grads_dtype", "absent", "B20"),
        ({"checkpoint.load": None}, "checkpoint.load", "absent", "a job that never resumes"),
        ({"checkpoint.save": "/runs/x/"}, "checkpoint.save", "/runs/x_fsdp", "A7"),
        ({"checkpoint.pretrained_checkpoint": "/base"}, "checkpoint.pretrained_checkpoint", "/base_fsdp", "B15"),
        ({"model.cuda_graph_impl": "transformer_engine"}, "model.cuda_graph_impl", "none", "B9"),
        ({"env_vars.CUDA_DEVICE_MAX_CONNECTIONS": 1}, "env.CUDA_DEVICE_MAX_CONNECTIONS", 32, "A8"),
        ({"env_vars.CUDA_DEVICE_MAX_CONNECTIONS": 8}, "env.CUDA_DEVICE_MAX_CONNECTIONS", "absent", "A8"),
        ({"model.use_cpu_initialization": True}, "model.init_model_with_meta_device", "absent", "B7"),
        (
            {"train.check_weight_hash_across_dp_replicas_interval": 5},
            "train.check_weight_hash_across_dp_replicas_interval",
            None,
            "A10",
        ),
        ({"checkpoint.also_save_hf_checkpoint": True}, "checkpoint.also_save_hf_checkpoint", False, "A13"),
        ({"optimizer.optimizer_cpu_offload": True}, "optimizer.optimizer_cpu_offload", False, "B13"),
        ({"model.pipeline_model_parallel_size": 2}, "model.pipeline_model_parallel_size", 1, "B1"),
    ],
)
def test_what_a_job_adds(fields: dict[str, Any], path: str, wanted: Any, source: str) -> None:
    precision = {"mixed_precision": {"grad_reduce_in_fp32": False, "bf16": True, "params_dtype": "bfloat16"}}
    values = job() | (precision if any(p.startswith("mixed_precision") for p in fields) else {})
    for name, value in fields.items():
        section, _, field = name.partition(".")
        values[section] = {**values[section], field: value}
    assert to(values, "optim_grads_params").get(path, "absent") == wanted, source


def test_optim_loses_no_gradients() -> None:
    """B10: with one microbatch nothing has to change."""
    assert to(job(), "optim")["model.gradient_accumulation_fusion"] is False
    one_each = job(**{"train.global_batch_size": 8})
    assert "model.gradient_accumulation_fusion" not in to(one_each, "optim")


def test_no_shard_is_not_built_on_the_meta_device() -> None:
    """B7."""
    assert "model.init_model_with_meta_device" not in to(job(), "no_shard")
    sharded = apply_changes(job(), as_changes(to(job(), "optim_grads_params")))
    assert to(sharded, "no_shard")["model.init_model_with_meta_device"] is False


def test_there_and_back_keeps_the_precision_of_gradients() -> None:
    sharded = apply_changes(job(), as_changes(to(job(), "optim_grads_params")))
    back = apply_changes(sharded, as_changes(to(sharded, "distopt")))
    effective = effective_document(back, 16, "hopper").values
    assert strategy_of(effective) == "distopt"
    assert effective["ddp"]["grad_reduce_in_fp32"] is True
    assert effective["checkpoint"]["ckpt_format"] == "torch_dist"
    assert effective["model"]["init_model_with_meta_device"] is False


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "name", [LLAMA3_8B, "llama3_70b_pretrain_32gpu_h100_bf16_config", "llama3_8b_pretrain_8gpu_gb200_bf16_config"]
)
def test_the_changed_job_breaks_no_rule_and_needs_no_second_change(name: str, strategy: str) -> None:
    values = find_recipe(name).document()
    changed = apply_changes(values, as_changes(to(values, strategy, 32)))
    effective = effective_document(changed, 32, "hopper").values
    assert strategy_of(effective) == strategy
    assert [p for p in check_rules(changed, effective, 32, "hopper") if p.severity == "error"] == []
    assert to(changed, strategy, 32) == {}


def test_an_unknown_strategy_is_named() -> None:
    with pytest.raises(ValueError, match="zero3"):
        to(job(), "zero3")


def as_changes(wanted: dict[str, Any]) -> list[Change]:
    return [Change(path, None, value, "", "dp_strategy") for path, value in wanted.items()]
