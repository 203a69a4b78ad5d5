"""Megatron-LM's parsed arguments as a job."""

from __future__ import annotations

from typing import Any

import pytest

from estimator.errors import JobError
from estimator.job import build_document, effective_document, read_settings
from estimator.job.megatron_lm import megatron_config

ARGUMENTS: dict[str, Any] = {
    "num_layers": 12,
    "hidden_size": 512,
    "ffn_hidden_size": 2048,
    "num_attention_heads": 8,
    "kv_channels": 64,
    "group_query_attention": False,
    "num_query_groups": 1,
    "seq_length": 1024,
    "position_embedding_type": "learned_absolute",
    "padded_vocab_size": 50304,
    "micro_batch_size": 4,
    "global_batch_size": 32,
    "bf16": True,
    "bias_gelu_fusion": True,
    "accumulate_allreduce_grads_in_fp32": True,
    "use_distributed_optimizer": True,
    "tensor_model_parallel_size": 2,
    "main_params_dtype": "fp32",
    "tensorboard_dir": "/somewhere",
}


def settings_of(**more: Any) -> Any:
    document = build_document(config=megatron_config({**ARGUMENTS, **more}))
    return read_settings(effective_document(document.values, 8).values, 8)


def test_a_plain_model_in_bf16() -> None:
    settings = settings_of()
    assert settings.model.num_query_groups == 8, "without grouped queries the printed 1 means nothing"
    assert settings.model.vocab_size == 50304
    assert settings.model.activation_func == "gelu"
    assert settings.model.bias_activation_fusion
    assert settings.runtime.params_dtype == "bfloat16"
    assert settings.sharding.strategy == "distopt"
    assert settings.sharding.grad_reduce_in_fp32
    assert settings.optimizer.main_params_dtype == "float32"
    assert settings.parallel.tensor_model_parallel_size == 2
    assert settings.runtime.cublas_workspace_config is None


def test_what_is_derived_from_several_arguments() -> None:
    settings = settings_of(swiglu=True, bias_swiglu_fusion=False, bias_gelu_fusion=True, deterministic_mode=True)
    assert (settings.model.activation_func, settings.model.gated_linear_unit) == ("silu", True)
    assert not settings.model.bias_activation_fusion, "the fusion of its own activation counts"
    assert settings.runtime.cublas_workspace_config == ":4096:8"
    uneven = settings_of(
        pipeline_model_parallel_size=2, decoder_first_pipeline_num_layers=4, decoder_last_pipeline_num_layers=8
    )
    assert uneven.parallel.num_layers_in_last_pipeline_stage == 8


def test_arguments_that_cannot_be_said_are_named() -> None:
    with pytest.raises(JobError) as caught:
        megatron_config({**ARGUMENTS, "freeze_all_layers": True, "is_hybrid_model": True})
    assert [problem.path for problem in caught.value.problems] == [
        "job.megatron_lm_args.freeze_all_layers",
        "job.megatron_lm_args.is_hybrid_model",
    ]


def test_a_misspelt_argument_is_refused_with_the_name_that_was_meant() -> None:
    with pytest.raises(JobError) as caught:
        megatron_config({**ARGUMENTS, "tensor_model_paralel_sise": 2, "use_megatron_fdsp": True, "my_plugin": 1})
    said = {problem.path: problem.message for problem in caught.value.problems}
    assert set(said) == {"job.megatron_lm_args.use_megatron_fdsp"}, "what is given in its right spelling is not missed"
    assert "use_megatron_fsdp" in said["job.megatron_lm_args.use_megatron_fdsp"]


def test_megatrons_own_names_are_not_taken_for_misspellings() -> None:
    own = {"no_persist_layer_norm": True, "max_position_embeddings": 1024, "decoder_num_layers": None}
    assert megatron_config({**ARGUMENTS, **own}) == megatron_config(ARGUMENTS)


def test_arguments_of_the_wrapper_reach_its_fields() -> None:
    config = megatron_config({**ARGUMENTS, "ddp_pad_buckets_for_high_nccl_busbw": True})
    assert config["ddp"]["pad_buckets_for_high_nccl_busbw"] is True


def test_more_arguments_than_megatron_has_are_refused() -> None:
    with pytest.raises(JobError, match="more than 2,000"):
        megatron_config({**ARGUMENTS, **{f"argument_{number}": 1 for number in range(2000)}})
