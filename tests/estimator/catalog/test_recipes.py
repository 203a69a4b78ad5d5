"""The recipe catalogue: complete, quick, and answering misspelt names."""

from __future__ import annotations

import subprocess
import sys

import pytest

from estimator.catalog import fields, find_recipe, list_recipes
from estimator.errors import JobError

# name, field, value; source: megatron-bridge 0.6.2, the recipe's own module
KNOWN = [
    ("llama3_8b_pretrain_config", "model.hidden_size", 4096),
    ("llama3_8b_pretrain_config", "model.context_parallel_size", 2),
    ("llama3_8b_pretrain_config", "model.seq_length", 8192),
    ("llama3_8b_pretrain_config", "train.global_batch_size", 512),
    ("llama3_8b_pretrain_config", "mixed_precision", "bf16_mixed"),
    ("llama3_8b_pretrain_config", "tokenizer.vocab_size", 32000),
    ("llama3_8b_pretrain_config", "ddp.use_distributed_optimizer", True),
    ("llama3_8b_pretrain_config", "checkpoint.save", "nemo_experiments/default/checkpoints"),
    ("llama3_8b_pretrain_config", "env_vars.PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
    ("deepseek_v2_lite_pretrain_config", "model.num_moe_experts", 64),
    ("deepseek_v2_lite_pretrain_config", "model.kv_lora_rank", 512),
    ("qwen3_8b_pretrain_config", "model.qk_layernorm", True),
    ("qwen3_8b_pretrain_config", "model.params_dtype", "bfloat16"),
    ("qwen3_8b_pretrain_config", "model.activation_func", "silu"),
]


@pytest.mark.parametrize(("name", "path", "value"), KNOWN)
def test_documents_hold_what_the_recipe_sets(name: str, path: str, value: object) -> None:
    section, _, field = path.partition(".")
    document = find_recipe(name).document()
    assert (document[section][field] if field else document[section]) == value


def test_all_recipes_are_there_and_every_document_is_whole() -> None:
    recipes = list_recipes()
    assert len(recipes) == 695
    for recipe in recipes:
        document = recipe.document()
        assert document.keys() == fields.sections().keys()
        assert recipe.summary["micro_batch_size"] == document["train"]["micro_batch_size"]
        for section in document.values():
            if isinstance(section, dict) and "_target_" in section:
                known = fields.class_fields(section["_target_"])
                assert section.keys() - {"_target_"} <= known.keys()


def test_documents_are_fresh_copies() -> None:
    recipe = find_recipe("llama3_8b_pretrain_config")
    recipe.document()["model"]["num_layers"] = 1
    recipe.document()["env_vars"]["X"] = "1"
    assert recipe.document()["model"]["num_layers"] == 32
    assert "X" not in recipe.document()["env_vars"]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("llama3_8b_pretrain", "llama3_8b_pretrain_config"),
        ("lama3_8b_pretrain_config", "llama3_8b_pretrain_config"),
        ("qwen3_8b_pretrian_config", "qwen3_8b_pretrain_config"),
    ],
)
def test_unknown_names_get_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(JobError) as error:
        find_recipe(name)
    (problem,) = error.value.problems
    assert problem.path == "job.recipe"
    assert nearest in (problem.suggestion or "")


def test_a_name_in_two_modules_asks_which() -> None:
    name = "llama3_70b_sft_32gpu_h100_bf16_config"
    with pytest.raises(JobError, match="say which with module") as error:
        find_recipe(name)
    modules = (error.value.problems[0].suggestion or "").removeprefix("one of ").split(", ")
    assert len(modules) == 2
    assert {find_recipe(name, module).module for module in modules} == set(modules)
    with pytest.raises(JobError, match="is not in module"):
        find_recipe(name, "megatron.bridge.recipes.gpt")


@pytest.mark.parametrize("name", ["", "x" * 100_000, "\x00", "ä" * 300])
def test_odd_names_are_only_unknown(name: str) -> None:
    with pytest.raises(JobError):
        find_recipe(name)


def test_one_recipe_comes_without_heavy_imports() -> None:
    code = (
        "import sys; from estimator.catalog import find_recipe; find_recipe('llama3_8b_pretrain_config').document();"
        "print([m for m in ('torch', 'yaml', 'fastapi', 'sqlalchemy', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
