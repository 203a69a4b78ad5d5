"""The table of ConfigContainer's sections, classes and fields."""

from __future__ import annotations

import pytest

from estimator.catalog import fields

GPT = "megatron.bridge.models.gpt_provider.GPTModelProvider"
MLA = "megatron.bridge.models.mla_provider.MLAModelProvider"
DDP = "megatron.bridge.training.config.DistributedDataParallelConfig"

# class, field, kinds, default; source: megatron-bridge 0.6.2 and megatron-core 0.19.2, the dataclasses
KNOWN = [
    (DDP, "bucket_size", {"int", "none"}, None),
    (DDP, "data_parallel_sharding_strategy", {"str"}, "no_shard"),
    (DDP, "megatron_fsdp_main_params_dtype", {"dtype", "none"}, "float32"),
    (DDP, "megatron_fsdp_main_grads_dtype", {"dtype", "none"}, None),
    (DDP, "overlap_grad_reduce", {"bool"}, False),
    (GPT, "seq_length", {"int"}, 1024),
    (GPT, "make_vocab_size_divisible_by", {"int"}, 128),
    (GPT, "share_embeddings_and_output_weights", {"bool"}, True),
    (GPT, "gradient_accumulation_fusion", {"bool"}, True),
    (GPT, "params_dtype", {"dtype"}, "float32"),
]


@pytest.mark.parametrize(("target", "name", "kinds", "default"), KNOWN)
def test_types_and_defaults(target: str, name: str, kinds: set[str], default: object) -> None:
    spec = fields.class_fields(target)[name]
    assert set(spec.kinds) == kinds
    assert spec.default == default


def test_sections_are_those_of_the_container() -> None:
    sections = fields.sections()
    assert {"model", "train", "optimizer", "ddp", "dist", "dataset", "checkpoint", "mixed_precision"} <= sections.keys()
    assert {
        "comm_overlap",
        "scheduler",
        "tokenizer",
        "logger",
        "rng",
        "peft",
        "env_vars",
        "validation",
    } <= sections.keys()
    assert sections["peft"].nullable
    assert not sections["ddp"].nullable
    assert sections["model"].default_class == GPT
    assert fields.versions()["megatron-bridge"] == "0.6.2"


def test_inheritance_and_section_membership() -> None:
    assert "kv_lora_rank" in fields.class_fields(MLA)
    assert "kv_lora_rank" not in fields.class_fields(GPT)
    assert fields.is_subclass(MLA, GPT)
    assert fields.section_accepts("model", MLA)
    assert fields.section_accepts(
        "ddp", "megatron.core.distributed.distributed_data_parallel_config.DistributedDataParallelConfig"
    )
    assert not fields.section_accepts("model", DDP)
    assert not fields.section_accepts("ddp", GPT)


def test_every_class_resolves() -> None:
    for target in fields._table()["classes"]:
        specs = fields.class_fields(target)
        assert all(spec.kinds for spec in specs.values())
        assert fields.new_object(target)["_target_"] == target


def test_enum_fields_know_their_members() -> None:
    spec = fields.class_fields(GPT)["attention_backend"]
    assert {"flash", "fused", "unfused", "local", "auto"} <= dict(spec.members).keys()


def test_new_objects_do_not_share_containers() -> None:
    fields.new_object(GPT)["cuda_graph_modules"] = "changed"
    first = fields.new_object("megatron.bridge.training.config.ProfilingConfig")
    first["profile_ranks"].append(7)
    assert fields.new_object("megatron.bridge.training.config.ProfilingConfig")["profile_ranks"] == [0]


@pytest.mark.parametrize("name", ["bf16_mixed", "bf16-mixed", "bf16_with_mxfp8_mixed"])
def test_precision_names(name: str) -> None:
    config = fields.precision_config(name)
    assert config["bf16"] is True
    assert config["grad_reduce_in_fp32"] is True
