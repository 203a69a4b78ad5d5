"""Our effective document is the one that Megatron-Bridge's ``runtime_config_update`` leaves behind.

Every text recipe of the catalogue (GPT, MLA, MoE, hybrid), as it is, with Megatron FSDP, with plain DDP, and with the
precision and communication settings that overwrite others; compared field by field.
"""

from __future__ import annotations

from typing import Any

import bridge_oracle as oracle
import pytest

from estimator.catalog import Recipe, list_recipes
from estimator.job import build_document, effective_document

pytestmark = [
    pytest.mark.bridge,
    pytest.mark.slow,
    pytest.mark.skipif(not oracle.installed(), reason="megatron-bridge is not installed"),
]

SECTIONS = ("model", "optimizer", "ddp", "dist", "train", "checkpoint", "comm_overlap", "mixed_precision", "rng")

NOT_COMPARED = {
    # field: why it has no part in memory
    "model.init_method": "a function that fills tensors",
    "model.embedding_init_method": "a function that fills tensors",
    "model.output_layer_init_method": "a function that fills tensors",
    "model.transformer_layer_spec": "a function known by name only; the name does not change",
    "model.hybrid_stack_spec": "a function known by name only; the name does not change",
    "model.mamba_stack_spec": "a function known by name only; the name does not change",
    "model.quant_recipe": "an object outside the table",
    "model.timers": "a function, None until training starts",
}

FSDP = """
cfg.dist.use_megatron_fsdp = True
cfg.ddp.use_megatron_fsdp = True
cfg.ddp.data_parallel_sharding_strategy = "optim_grads_params"
cfg.ddp.average_in_collective = False
cfg.checkpoint.ckpt_format = "fsdp_dtensor"
cfg.ddp.megatron_fsdp_main_grads_dtype = torch.float32
cfg.env_vars["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
"""
FSDP_ONE_FLAG = """
cfg.ddp.use_megatron_fsdp = True
cfg.ddp.use_distributed_optimizer = False
cfg.optimizer.use_distributed_optimizer = False
cfg.ddp.average_in_collective = True
cfg.checkpoint.ckpt_format = "fsdp_dtensor"
cfg.ddp.data_parallel_sharding_strategy = "optim"
cfg.env_vars["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
"""
PLAIN_DDP = """
cfg.ddp.use_distributed_optimizer = False
cfg.ddp.overlap_param_gather = False
cfg.optimizer.use_distributed_optimizer = False
cfg.optimizer.overlap_param_gather = False
"""
OVERLAP = """
from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.bridge.training.mixed_precision import bf16_mixed
cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=True, bucket_size=7_000_000)
cfg.mixed_precision = bf16_mixed()
cfg.mixed_precision.grad_reduce_in_fp32 = False
cfg.ddp.grad_reduce_in_fp32 = True
cfg.ddp.overlap_grad_reduce = False
cfg.model.sequence_parallel = True
"""
VARIANTS = {"as it is": "", "fsdp": FSDP, "fsdp, one flag": FSDP_ONE_FLAG, "plain ddp": PLAIN_DDP, "overlap": OVERLAP}

TEXT_CLASSES = {
    "GPTModelProvider",
    "MLAModelProvider",
    "OlMoEModelProvider",
    "Gemma2ModelProvider",
    "Gemma3ModelProvider",
    "HybridModelProvider",
}


def text_recipes() -> list[Recipe]:
    """All but the one whose dimensions are left to the user."""
    return [r for r in list_recipes() if r.model_class in TEXT_CLASSES and r.summary.get("num_layers")]


def world_size_of(recipe: Recipe) -> int:
    """GPUs in the name, or twice the ranks of one replica where that does not divide."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    replica = 1
    for name in names:
        replica *= recipe.summary.get(name, 1)
    return recipe.num_gpus if recipe.num_gpus and recipe.num_gpus % replica == 0 else 2 * replica


def differences(real: dict[str, Any], ours: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted path -> (Bridge's value, ours) where they differ."""
    found: dict[str, tuple[Any, Any]] = {}
    for section in SECTIONS:
        theirs, mine = real.get(section), ours.get(section)
        if not isinstance(theirs, dict) or not isinstance(mine, dict):
            if theirs != mine:
                found[section] = (theirs, mine)
            continue
        for name in theirs.keys() | mine.keys():
            path = f"{section}.{name}"
            pair = (theirs.get(name, "absent"), mine.get(name, "absent"))
            if pair[0] != pair[1] and path not in NOT_COMPARED:
                found[path] = pair
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_text_recipe_becomes_what_bridge_makes_of_it(variant: str, tmp_path: Any) -> None:
    python = VARIANTS[variant]
    wrong: dict[str, Any] = {}
    compared = refused = 0
    for recipe in text_recipes():
        text = python
        if recipe.task == "peft":
            text += f"\ncfg.checkpoint.pretrained_checkpoint = {str(tmp_path)!r}\n"
        world_size = world_size_of(recipe)
        document = build_document(recipe.name, recipe.module, overrides=[text] if text.strip() else [])
        ours = effective_document(document.values, world_size)
        real, error = oracle.run(oracle.container(recipe.document()), world_size, text)
        if error is not None:  # refused: Bridge stopped half-way, there is nothing to compare
            refused += 1
            continue
        compared += 1
        if found := differences(real, ours.values):
            wrong[f"{recipe.name} ({recipe.module})"] = found
    assert not wrong, f"{len(wrong)} of {compared}: {list(wrong.items())[:5]}"
    print(f"{variant}: {compared} compared, {refused} refused by Bridge")  # noqa: T201 (pytest -s shows it)
    assert compared > 300, f"only {compared} compared, Bridge refused {refused}"


@pytest.mark.parametrize("name", ["llama3_8b_pretrain_config", "qwen3_8b_pretrain_config"])
def test_exported_variables_win_as_in_bridge(name: str) -> None:
    recipe = next(r for r in list_recipes() if name in (r.name, *r.aliases))
    exported = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}
    ours = effective_document(recipe.document(), world_size_of(recipe), env=exported)
    assert ours.environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False"
    real, error = oracle.run(oracle.container(recipe.document()), world_size_of(recipe), env=exported)
    assert error is None
    assert differences(real, ours.values) == {}
