"""Every rendered form, applied by the real Megatron-Bridge 0.6.2, ends in the settings that were estimated.

For each recipe and strategy: the Python, command-line and YAML forms give equal ConfigContainers, Bridge accepts them
on that many ranks, no field is unknown, no rule is broken, nothing is overwritten silently, and what Bridge ends with
is what ``estimator.job.effective_document`` predicts for the changed document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from comparing import differences, ignored, missing_settings, silently_overwritten, unknown_fields

from estimator.catalog import find_recipe
from estimator.changes import Change, apply_changes
from estimator.job.effective import effective_document
from estimator.render import Cluster, Override, render_override
from estimator.rules import STRATEGIES, check_rules, strategy_changes

pytestmark = pytest.mark.bridge

RECIPES = (
    # name, GPUs, pipeline stages
    ("llama3_8b_pretrain_2gpu_h100_bf16_config", 2, 1),
    ("llama3_8b_pretrain_2gpu_h100_bf16_config", 16, 1),
    ("llama3_8b_pretrain_16gpu_h100_bf16_16k_config", 16, 2),
    ("llama3_8b_pretrain_32gpu_h100_bf16_64k_config", 32, 2),
    ("llama3_70b_pretrain_32gpu_h100_bf16_config", 32, 4),
    ("llama3_70b_pretrain_256gpu_h100_bf16_64k_config", 256, 4),
    ("llama3_70b_pretrain_64gpu_h100_bf16_config", 64, 4),
    ("llama3_8b_pretrain_8gpu_h100_bf16_config", 8, 1),
    ("llama3_8b_pretrain_8gpu_gb200_bf16_config", 8, 1),
    ("llama3_70b_pretrain_64gpu_gb200_bf16_config", 64, 1),
    ("llama31_8b_pretrain_2gpu_h100_bf16_config", 2, 1),
    ("llama31_70b_pretrain_32gpu_h100_bf16_config", 32, 4),
    ("llama31_405b_pretrain_256gpu_h100_bf16_config", 256, 8),
    ("llama32_1b_pretrain_1gpu_h100_bf16_config", 1, 1),
    ("llama32_3b_pretrain_1gpu_h100_bf16_config", 8, 1),
    ("llama2_7b_pretrain_2gpu_h100_bf16_config", 2, 1),
    ("gpt3_175b_pretrain_32gpu_h100_bf16_config", 32, 8),
    ("qwen2_1p5b_pretrain_1gpu_h100_bf16_config", 1, 1),
    ("qwen2_7b_pretrain_2gpu_h100_bf16_config", 4, 1),
    ("qwen2_72b_pretrain_32gpu_h100_bf16_config", 32, 4),
    ("qwen25_7b_pretrain_2gpu_h100_bf16_config", 2, 1),
    ("qwen25_14b_pretrain_4gpu_h100_bf16_config", 4, 1),
    ("qwen25_32b_pretrain_16gpu_h100_bf16_config", 16, 2),
    ("qwen3_600m_pretrain_1gpu_h100_bf16_config", 8, 1),
    ("qwen3_4b_pretrain_2gpu_h100_bf16_config", 2, 1),
    ("qwen3_8b_pretrain_4gpu_h100_bf16_config", 4, 1),
    ("qwen3_14b_pretrain_8gpu_h100_bf16_config", 8, 1),
    ("qwen3_32b_pretrain_16gpu_h100_bf16_config", 16, 2),
    ("llama3_8b_sft_2gpu_h100_bf16_config", 2, 1),
)

OFFLOADING = ("llama3_70b_pretrain_64gpu_gb200_bf16_config",)
"""Recipes that offload activations, which excludes recomputation (A26)."""

EXTRA_CHANGES = {
    "none": (),
    "recompute": (
        Change("model.recompute_granularity", None, "full", "", "recompute"),
        Change("model.recompute_method", None, "uniform", "", "recompute"),
        Change("model.recompute_num_layers", None, 1, "", "recompute"),
    ),
    "allocator and buckets": (
        Change("env.PYTORCH_CUDA_ALLOC_CONF", None, "expandable_segments:True,max_split_size_mb:512", "", "allocator"),
        Change("ddp.bucket_size", None, 40_000_000, "", "fsdp_buffers"),
        Change("ddp.suggested_communication_unit_size", None, 200_000_000, "", "fsdp_buffers"),
        Change("model.cross_entropy_fusion_impl", None, "te", "", "cross_entropy"),
    ),
    "gradients in BF16": (
        Change("ddp.grad_reduce_in_fp32", True, False, "", "gradient_precision"),
        Change("ddp.megatron_fsdp_main_grads_dtype", None, None, "", "gradient_precision"),
        Change("ddp.megatron_fsdp_grad_comm_dtype", None, "bfloat16", "", "gradient_precision"),
    ),
    "recompute of modules": (
        Change("model.recompute_granularity", None, "selective", "", "recompute"),
        Change("model.recompute_modules", None, ["core_attn", "mlp"], "", "recompute"),
        Change("model.recompute_method", None, None, "", "recompute"),
        Change("model.recompute_num_layers", None, None, "", "recompute"),
    ),
}


def changes_for(
    values: Mapping[str, Any], strategy: str, world_size: int, family: str, extra: tuple[Change, ...]
) -> tuple[Change, ...]:
    effective = effective_document(values, world_size, family).values
    return (*strategy_changes(values, effective, strategy, world_size, family), *extra)


def cases() -> Iterator[Any]:
    for number, (name, gpus, stages) in enumerate(RECIPES):
        for strategy in STRATEGIES:
            with_extras = strategy in ("optim_grads_params", "distopt") and number % 3 == 0
            for extra in EXTRA_CHANGES if with_extras else ("none",):
                if extra.startswith("recompute") and name in OFFLOADING:
                    continue
                yield pytest.param(name, gpus, stages, strategy, extra, id=f"{name}-{gpus}-{strategy}-{extra}")


@pytest.mark.parametrize(("name", "gpus", "stages", "strategy", "extra"), list(cases()))
def test_three_forms_end_in_the_estimated_settings(
    bridge: Any, name: str, gpus: int, stages: int, strategy: str, extra: str
) -> None:
    recipe = find_recipe(name)
    values = recipe.document()
    assert values["model"]["pipeline_model_parallel_size"] == stages
    family = "blackwell" if "b200" in name else "hopper"
    changes = changes_for(values, strategy, gpus, family, EXTRA_CHANGES[extra])
    override = render_override(changes, values, Cluster(gpus, 8))
    changed = apply_changes(values, changes)
    predicted = effective_document(changed, gpus, family).values

    problems = check_rules(changed, predicted, gpus, family)
    assert not [problem for problem in problems if problem.severity == "error"]

    def fresh() -> Any:
        return bridge.recipe(recipe.name, recipe.module)

    forms = {
        "python": bridge.with_python(fresh(), override.python),
        "cli": bridge.with_cli(fresh(), list(override.cli_arguments)),
        "yaml": bridge.with_yaml(fresh(), override.yaml),
    }
    documents = {form: bridge.document(cfg) for form, cfg in forms.items()}
    assert list(differences(documents["python"], documents["cli"])) == []
    assert list(differences(documents["python"], documents["yaml"])) == []
    assert unknown_fields(forms["python"], override.python or "") == []
    assert missing_settings(documents["python"], changes, values) == []

    cfg, environment = bridge.validated(forms["python"], gpus, override.env)
    got = bridge.document(cfg)
    different = [text for text in differences(got, predicted) if not ignored(text)]
    assert different == []
    assert silently_overwritten(got, changes, values) == []
    for variable, value in override.env.items():
        assert environment.get(variable) == value


def test_override_is_rendered_for_a_named_mixed_precision_recipe(bridge: Any) -> None:
    """Rule O1: the recipe's name becomes an object, in all three forms the same one."""
    recipe = find_recipe("llama3_8b_pretrain_2gpu_h100_bf16_config")
    values = recipe.document()
    assert values["mixed_precision"] == "bf16_mixed"
    override: Override = render_override(
        [Change("ddp.grad_reduce_in_fp32", True, False, "", "gradient_precision")], values, Cluster(2, 8)
    )
    assert "cfg.mixed_precision = bf16_mixed()" in str(override.python)
    cfg, _ = bridge.validated(bridge.with_python(bridge.recipe(recipe.name, recipe.module), override.python), 2, {})
    assert cfg.ddp.grad_reduce_in_fp32 is False
