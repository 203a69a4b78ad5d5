"""From the effective document to settings, and which jobs are not modelled."""

from __future__ import annotations

from typing import Any

import pytest

from estimator.catalog import list_recipes
from estimator.errors import JobError, NotModelled
from estimator.job import Settings, Stack, build_document, effective_document, read_settings, vocab_size
from estimator.job.not_modelled import NOT_MODELLED
from estimator.job.settings_reader import allocator_setting

RECIPE = "llama3_8b_pretrain_config"
FSDP = ["dist.use_megatron_fsdp=true", "ddp.data_parallel_sharding_strategy=optim_grads_params"]


def settings_of(
    *overrides: str, world_size: int = 16, recipe: str = RECIPE, env: dict[str, str] | None = None
) -> Settings:
    document = build_document(recipe, overrides=list(overrides))
    return read_settings(effective_document(document.values, world_size, env=env).values, world_size, Stack())


def test_llama3_8b_as_it_is_shipped() -> None:
    settings = settings_of(world_size=2)
    model = settings.model
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (32, 4096, 14336)
    assert (model.num_attention_heads, model.num_query_groups, model.kv_channels) == (32, 8, 128)
    assert (model.seq_length, model.activation_func, model.gated_linear_unit) == (8192, "silu", True)
    assert not model.share_embeddings_and_output_weights
    assert settings.parallel.context_parallel_size == 2
    assert settings.parallel.data_parallel_size == 1
    assert settings.sharding.strategy == "distopt"
    assert settings.sharding.grad_reduce_in_fp32
    assert settings.num_microbatches == 512
    assert settings.runtime.expandable_segments
    assert settings.runtime.params_dtype == "bfloat16"


# overrides, expected bucket size; source: megatron-core 0.19.2, megatron/training/models/dist_utils.py:280-297
BUCKETS = [
    ([], 16, 40_000_000),
    ([], 128, 128_000_000),
    (["ddp.bucket_size=7000"], 16, 7000),
    (["ddp.overlap_grad_reduce=false"], 16, None),
    (["ddp.overlap_grad_reduce=false", "ddp.bucket_size=7000"], 16, None),
    (["cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=False)"], 16, 134_217_728),
    ([*FSDP, "ddp.overlap_grad_reduce=false"], 16, None),
]


@pytest.mark.parametrize(("overrides", "world_size", "bucket_size"), BUCKETS)
def test_bucket_size(overrides: list[str], world_size: int, bucket_size: int | None) -> None:
    assert settings_of(*overrides, world_size=world_size).sharding.bucket_size == bucket_size


def test_fsdp_forces_overlap_when_it_is_built() -> None:
    sharding = settings_of(*FSDP, "ddp.overlap_grad_reduce=false", "ddp.overlap_param_gather=false").sharding
    assert sharding.strategy == "optim_grads_params"
    assert sharding.overlap_grad_reduce
    assert sharding.overlap_param_gather
    assert not sharding.average_in_collective


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_fsdp_strategies_and_dtypes(strategy: str) -> None:
    sharding = settings_of(
        "dist.use_megatron_fsdp=true",
        f"ddp.data_parallel_sharding_strategy={strategy}",
        "cfg.ddp.megatron_fsdp_main_grads_dtype = torch.float32",
        "cfg.ddp.megatron_fsdp_grad_comm_dtype = torch.bfloat16",
    ).sharding
    assert sharding.strategy == strategy
    assert (sharding.main_params_dtype, sharding.main_grads_dtype) == ("float32", "float32")
    assert sharding.grad_comm_dtype == "bfloat16"


# overrides, size, part of source; source: megatron-bridge 0.6.2, training/setup.py:681-721
VOCABULARIES = [
    ([], 32000, "tokenizer"),
    (["model.tensor_model_parallel_size=8"], 32768, "tokenizer"),
    (["tokenizer.use_tokenizer_vocab_size=false"], 128256, "model"),
    (["tokenizer.use_tokenizer_vocab_size=false", "model.tensor_model_parallel_size=4"], 128256, "model"),
    (["tokenizer.use_tokenizer_vocab_size=false", "model.vocab_size=null"], 32000, "tokenizer"),
    (["tokenizer.tokenizer_type=HuggingFaceTokenizer", "tokenizer.tokenizer_model=a/b"], 128256, "loaded"),
    (["tokenizer.vocab_size=32001"], 32128, "tokenizer"),
]


@pytest.mark.parametrize(("overrides", "size", "source"), VOCABULARIES)
def test_vocabulary(overrides: list[str], size: int, source: str) -> None:
    values = effective_document(build_document(RECIPE, overrides=overrides).values, 16).values
    found, where = vocab_size(values)
    assert found == size
    assert source in where


ALLOCATORS: list[tuple[dict[str, Any], bool]] = [
    ({}, False),
    ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True),
    ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128, expandable_segments:True"}, True),
    ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
    ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True),
    ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}, False),
]


@pytest.mark.parametrize(("env", "expandable"), ALLOCATORS)
def test_allocator(env: dict[str, Any], expandable: bool) -> None:
    assert allocator_setting(env)[0] is expandable


def test_an_exported_allocator_setting_wins() -> None:
    assert not settings_of(env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}).runtime.expandable_segments


RECOMPUTE = [
    ([], (None, None, None, ())),
    (
        ["model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1"],
        ("full", "uniform", 1, ()),
    ),
    (["model.recompute_granularity=selective"], ("selective", None, None, ("core_attn",))),
    (
        ["model.recompute_granularity=selective", "model.recompute_modules=[mlp,layernorm]"],
        ("selective", None, None, ("mlp", "layernorm")),
    ),
]


@pytest.mark.parametrize(("overrides", "expected"), RECOMPUTE)
def test_recompute(overrides: list[str], expected: tuple[Any, ...]) -> None:
    r = settings_of(*overrides).recompute
    assert (r.recompute_granularity, r.recompute_method, r.recompute_num_layers, r.recompute_modules) == expected


# overrides, field in the way
NOT_YET = [
    (["model.num_moe_experts=8"], "model.moe_grouped_gemm"),
    (["model.mtp_num_layers=1", *FSDP], "model.mtp_num_layers"),
    (["mixed_precision=bf16_with_mxfp8_mixed"], "model.fp8_recipe"),
    (["mixed_precision=bf16_with_fp8_delayed_scaling_mixed", *FSDP], "model.fp8_param"),
    (
        [
            "mixed_precision=bf16_with_fp8_subchannel_scaling_mixed",
            "model.tensor_model_parallel_size=2",
            "model.sequence_parallel=true",
        ],
        "model.sequence_parallel",
    ),
    (["mixed_precision=bf16_with_nvfp4_mixed"], "model.fp4"),
    (["mixed_precision=fp16_mixed"], "model.fp16"),
    (["mixed_precision=null", "model.bf16=false"], "model.bf16"),
    (["model.cpu_offloading=true"], "model.cpu_offloading"),
    (["model.cuda_graph_impl=transformer_engine"], "model.cuda_graph_impl"),
    (["optimizer.optimizer_cpu_offload=true"], "optimizer.optimizer_cpu_offload"),
    (["optimizer.optimizer=muon"], "optimizer.optimizer"),
    (
        [*FSDP, "ddp.num_distributed_optimizer_instances=2", "cfg.ddp.megatron_fsdp_grad_comm_dtype = torch.float32"],
        "ddp.megatron_fsdp_grad_comm_dtype",
    ),
    (["dist.use_torch_fsdp2=true"], "dist.use_torch_fsdp2"),
    (["model.transformer_impl=local"], "model.transformer_impl"),
    ([*FSDP[:1], "ddp.data_parallel_sharding_strategy=bogus"], "ddp.data_parallel_sharding_strategy"),
    (["ddp.num_buckets=3"], "ddp.num_buckets"),
]


@pytest.mark.parametrize(("overrides", "field"), NOT_YET)
def test_not_modelled_names_the_field(overrides: list[str], field: str) -> None:
    with pytest.raises(NotModelled) as error:
        settings_of(*overrides)
    assert f"job.config.{field}" in [f.path for f in error.value.fields]


def test_every_field_in_the_way_is_listed() -> None:
    with pytest.raises(NotModelled) as error:
        settings_of("model.num_moe_experts=8", "model.cpu_offloading=true", "ddp.nccl_ub=true")
    assert len(error.value.fields) >= 3


def test_every_row_of_the_table_names_a_field_that_exists() -> None:
    document = build_document("deepseek_v2_lite_pretrain_config").values
    hybrid = build_document("nemotron_nano_9b_v2_pretrain_config").values
    for path, _, message in NOT_MODELLED:
        section, _, name = path.partition(".")
        known = [d[section] for d in (document, hybrid)]
        if name and name not in ("_target_", "heterogeneous_block_specs"):
            assert any(name in (d or {}) for d in known), path
        assert message


def test_every_recipe_is_read_or_not_modelled() -> None:
    modelled = 0
    for recipe in list_recipes():
        try:
            document = build_document(recipe.name, recipe.module)
        except JobError:
            assert not recipe.summary.get("num_layers")
            continue
        try:
            settings = read_settings(effective_document(document.values, 1024).values, 1024, Stack())
        except NotModelled:
            continue
        modelled += 1
        assert settings.model.vocab_size % settings.parallel.tensor_model_parallel_size == 0
        assert settings.model.ffn_hidden_size > 0
    assert modelled >= 29
