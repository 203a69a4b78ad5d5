"""Merging recipe, config and overrides, and saying everything that is wrong at once."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimator.catalog import fields
from estimator.errors import JobError
from estimator.job import build_document, effective_document, read_settings

RECIPE = "llama3_8b_pretrain_config"
MINIMAL: dict[str, Any] = {
    "model": {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 1000, "seq_length": 512},
    "train": {"micro_batch_size": 1, "global_batch_size": 8},
}


def problems(**job: Any) -> dict[str, str]:
    """Path -> message and suggestion of the JobError that this job raises."""
    with pytest.raises(JobError) as error:
        build_document(**job)
    return {p.path: f"{p.message} | {p.suggestion}" for p in error.value.problems}


def test_later_wins_over_earlier_and_origins_say_so() -> None:
    job = build_document(
        RECIPE,
        config={"train": {"micro_batch_size": 2, "global_batch_size": 64}, "model": {"seq_length": 4096}},
        overrides=["train.micro_batch_size=4", "cfg.env_vars['A'] = '1'"],
    )
    assert job.values["train"]["micro_batch_size"] == 4
    assert job.values["train"]["global_batch_size"] == 64
    assert job.values["model"]["hidden_size"] == 4096
    assert job.origin("train.micro_batch_size") == "overrides"
    assert job.origin("train.global_batch_size") == "config"
    assert job.origin("model.hidden_size") == "recipe"
    assert job.origin("model.rotary_percent") == "default"
    assert job.origin("env_vars.A") == "overrides"
    assert job.origin("ddp.bucket_size") == "default"


def test_a_config_alone_takes_bridges_defaults() -> None:
    job = build_document(config=MINIMAL)
    assert job.values["model"]["_target_"].endswith("GPTModelProvider")
    assert job.values["model"]["make_vocab_size_divisible_by"] == 128
    assert job.values["ddp"]["use_distributed_optimizer"] is False
    assert job.values["peft"] is None
    assert job.values["dataset"]["seq_length"] == 512
    assert job.values["mixed_precision"] is None


def test_a_config_with_a_precision_can_be_estimated() -> None:
    config = {**MINIMAL, "mixed_precision": "bf16_mixed", "optimizer": {"optimizer": "adam"}}
    settings_ = read_settings(effective_document(build_document(config=config).values, 8).values, 8)
    assert settings_.model.ffn_hidden_size == 1024
    assert settings_.model.kv_channels == 64
    assert settings_.sharding.strategy == "ddp"


def test_what_is_missing_is_named() -> None:
    found = problems(config={"model": {"hidden_size": 256}})
    assert set(found) == {
        "job.config.model.num_layers",
        "job.config.model.num_attention_heads",
        "job.config.model.vocab_size",
        "job.config.train.micro_batch_size",
        "job.config.train.global_batch_size",
    }


WRONG: list[tuple[dict[str, Any], str, str]] = [
    # config, path below job.config, part of message or suggestion
    ({"trian": {}}, "trian", "train"),
    ({"model": {"hidden_sise": 1}}, "model.hidden_sise", "hidden_size"),
    ({"ddp": {"overlap_grad_reduction": True}}, "ddp.overlap_grad_reduction", "overlap_grad_reduce"),
    ({"model": {"num_layers": True}}, "model.num_layers", "boolean"),
    ({"model": {"num_layers": "32"}}, "model.num_layers", "without quotes"),
    ({"model": {"num_layers": 32.5}}, "model.num_layers", "an integer"),
    ({"model": {"num_layers": -1}}, "model.num_layers", "at least 1"),
    ({"model": {"num_layers": 20_000_000}}, "model.num_layers", "larger"),
    ({"model": {"num_layers": None}}, "model.num_layers", "null"),
    ({"model": {"num_layers": [1]}}, "model.num_layers", "list"),
    ({"model": {"hidden_size": float("nan")}}, "model.hidden_size", "finite"),
    ({"model": {"hidden_dropout": float("inf")}}, "model.hidden_dropout", "finite"),
    ({"model": {"hidden_size": 10**400}}, "model.hidden_size", "too large"),
    ({"model": {"params_dtype": "float7"}}, "model.params_dtype", "dtype"),
    ({"model": {"attention_backend": "flahs"}}, "model.attention_backend", "flash"),
    ({"model": {"tensor_model_parallel_size": 0}}, "model.tensor_model_parallel_size", "at least 1"),
    ({"train": {"micro_batch_size": 0}}, "train.micro_batch_size", "at least 1"),
    ({"ddp": {"use_megatron_fsdp": 1}}, "ddp.use_megatron_fsdp", "true or false"),
    ({"ddp": None}, "ddp", "mapping"),
    ({"ddp": []}, "ddp", "mapping"),
    ({"mixed_precision": "bf16_mixd"}, "mixed_precision", "bf16_mixed"),
    ({"mixed_precision": 3}, "mixed_precision", "mapping or null"),
    ({"comm_overlap": {"bucket_size": 1}}, "comm_overlap.tp_comm_overlap", "required"),
    ({"env_vars": {"A": None}}, "env_vars.A", "text or a number"),
    ({"env_vars": {"": "1"}}, "env_vars.", "name"),
    ({"model": {"_target_": "os.system"}}, "model._target_", "os.system"),
    ({"model": {"_target_": "a.b.GPTModelProvider"}}, "model._target_", "megatron.bridge.models.gpt_provider"),
    ({"ddp": {"_target_": "megatron.bridge.training.config.OptimizerConfig"}}, "ddp._target_", "not a class"),
    (
        {"model": {"pipeline_model_parallel_layout": {"_target_": "os.x", "a": 1}}},
        "model.pipeline_model_parallel_layout",
        "os.x",
    ),
    ({"model": {"recompute_modules": [1]}}, "model.recompute_modules[0]", "text"),
    ({"_target_": "os.system"}, "_target_", "ConfigContainer"),
]


@pytest.mark.parametrize(("config", "path", "words"), WRONG, ids=lambda v: v if isinstance(v, str) else "")
def test_what_is_wrong_is_told(config: dict[str, Any], path: str, words: str) -> None:
    found = problems(recipe=RECIPE, config=config)
    messages = [text for where, text in found.items() if where.startswith(f"job.config.{path}")]
    assert messages
    assert words in messages[0]


def test_all_problems_are_collected() -> None:
    found = problems(
        recipe=RECIPE,
        config={"model": {"num_layers": -1, "hidden_size": "x"}, "nothing": 1},
        overrides=["train.micro_batch_size=true", "((", "cfg.ddp.x = 1"],
    )
    assert len(found) >= 4
    assert {"job.config.model.num_layers", "job.config.model.hidden_size", "job.config.nothing"} <= set(found)


@pytest.mark.parametrize("config", [[], 3, "- a", "a: [", "a: &x [1]\nb: *x", "\x00", "!!python/object:os.system {}"])
def test_not_a_configuration(config: Any) -> None:
    with pytest.raises(JobError):
        build_document(RECIPE, config=config)


def test_yaml_bombs_and_deep_nesting_are_refused() -> None:
    nested: Any = {}
    for _ in range(5000):
        nested = {"a": nested}
    bombs = (
        nested,
        {"model": nested},
        "[" * 20_000,
        "a: " + "{b: " * 5000,
        "- " * 100_000,
        "\n".join(" " * n + "a:" for n in range(600)),
        "a: &a [x,x]\nb: &b [*a,*a]\n" + "\n".join(f"{c}: &{c} [*b,*b,*b]" for c in "cdefg") + "\nh: &h [*h]",
        "x" * 1_000_000,
    )
    for config in bombs:
        start = time.perf_counter()
        with pytest.raises(JobError):
            build_document(RECIPE, config=config)
        assert time.perf_counter() - start < 2


def test_values_of_bridges_yaml_become_names() -> None:
    text = """
_target_: megatron.bridge.training.config.ConfigContainer
model:
  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
  num_layers: 2
  hidden_size: 128
  num_attention_heads: 2
  vocab_size: 512
  params_dtype: {_target_: torch.bfloat16, _call_: false}
  activation_func: {_target_: torch.nn.functional.silu, _call_: false}
  attention_backend: {_target_: megatron.core.transformer.enums.AttnBackend, _call_: true, _args_: [1]}
  init_method: {_target_: torch.nn.init.normal_, _partial_: true, _args_: [], mean: 0.0}
train: {micro_batch_size: 1, global_batch_size: 8}
"""
    model = build_document(config=text).values["model"]
    assert model["params_dtype"] == "bfloat16"
    assert model["activation_func"] == "silu"
    assert model["attention_backend"] == "flash"
    assert model["init_method"] == "normal_"


def test_precision_parameters_follow_each_other() -> None:
    job = build_document(
        RECIPE, overrides=["cfg.mixed_precision = bf16_with_mxfp8_mixed()", "cfg.mixed_precision.fp8_param = False"]
    )
    assert job.values["mixed_precision"]["fp8_param_gather"] is False
    job = build_document(RECIPE, config={"mixed_precision": {"grad_reduce_in_fp32": False}})
    assert job.values["mixed_precision"]["bf16"] is True
    assert job.values["mixed_precision"]["grad_reduce_in_fp32"] is False


def test_a_dtype_on_the_command_line_is_noted_where_bridge_leaves_a_text() -> None:
    job = build_document(RECIPE, overrides=["ddp.megatron_fsdp_main_grads_dtype=torch.float32"])
    assert job.values["ddp"]["megatron_fsdp_main_grads_dtype"] == "float32"
    assert "stays a text" in job.notes[0]


def test_fields_without_effect_on_memory_are_accepted() -> None:
    build_document(RECIPE, config={"logger": {"wandb_project": "x"}, "scheduler": {"lr_warmup_iters": 3}})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
SOME_FIELDS = st.sampled_from(
    [
        (s, f)
        for s, spec in fields.sections().items()
        if spec.default_class
        for f in fields.class_fields(spec.default_class)
    ]
)


@settings(max_examples=300, deadline=None)
@given(SOME_FIELDS, JSON)
def test_any_value_in_any_field_is_taken_or_a_job_error(where: tuple[str, str], value: Any) -> None:
    section, field = where
    try:
        job = build_document(RECIPE, config={section: {field: value}})
    except JobError:
        return
    effective_document(job.values, 16)
