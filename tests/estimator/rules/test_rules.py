"""Rules on small documents: each broken by the row that names it, and by nothing beside it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.job.settings import Stack
from estimator.rules import ALL_RULES, check_rules, silent_overwrites, strategy_of
from estimator.rules.rule import version_tuple

BASE: dict[str, Any] = {
    "model": {
        "num_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "seq_length": 8192,
        "vocab_size": 128256,
        "params_dtype": "bfloat16",
        "bf16": True,
        "gradient_accumulation_fusion": True,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
    },
    "train": {"global_batch_size": 128, "micro_batch_size": 1},
    "dataset": {"seq_length": 8192},
    "ddp": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "grad_reduce_in_fp32": True,
    },
    "optimizer": {"optimizer": "adam", "use_distributed_optimizer": True, "bf16": True},
    "dist": {},
    "checkpoint": {"save": "runs/a", "load": "runs/a", "ckpt_format": "torch_dist"},
    "env_vars": {},
    "peft": None,
}
FSDP: dict[str, Any] = {
    "ddp.use_megatron_fsdp": True,
    "ddp.data_parallel_sharding_strategy": "optim_grads_params",
    "ddp.megatron_fsdp_main_grads_dtype": "float32",
    "checkpoint.ckpt_format": "fsdp_dtensor",
}


def document(**fields: Any) -> dict[str, Any]:
    """BASE with dotted fields set."""
    result = copy.deepcopy(BASE)
    for path, value in fields.items():
        section, _, name = path.partition(".")
        result[section][name] = value
    return result


def broken(
    fields: dict[str, Any], world_size: int = 8, family: str = "blackwell", stack: Stack | None = None
) -> set[str]:
    values = document(**fields)
    return {problem.rule_id for problem in check_rules(values, values, world_size, family, stack)}


ROWS = (
    # fields, rules broken, source
    ({}, set(), "BASE is a sound job"),
    (FSDP, set(), "so is it under Megatron FSDP"),
    ({**FSDP, "model.pipeline_model_parallel_size": 2}, {"B1"}, "mcore_fsdp_adapter.py:555"),
    ({**FSDP, "ddp.data_parallel_sharding_strategy": "zero3"}, {"B2"}, "param_and_grad_buffer.py:2323"),
    ({**FSDP, "ddp.outer_dp_sharding_strategy": "full"}, {"B3"}, "param_and_grad_buffer.py:2491"),
    ({**FSDP, "ddp.num_distributed_optimizer_instances": 3}, {"B4"}, "parallel_state.py:922"),
    ({**FSDP, "ddp.data_parallel_sharding_strategy": "optim_grads", "ddp.nccl_ub": True}, {"B5"}, "adapter.py:158"),
    ({**FSDP, "ddp.data_parallel_sharding_strategy": "optim"}, {"B10"}, "megatron_fsdp.py:507"),
    (
        {**FSDP, "ddp.data_parallel_sharding_strategy": "optim", "train.global_batch_size": 8},
        set(),
        "one microbatch loses nothing",
    ),
    (
        {**FSDP, "ddp.data_parallel_sharding_strategy": "no_shard", "ddp.overlap_grad_reduce": False},
        {"B18"},
        "megatron_fsdp.py:1316",
    ),
    ({**FSDP, "ddp.megatron_fsdp_main_grads_dtype": None}, {"B20"}, "mcore_fsdp_adapter.py:134"),
    ({**FSDP, "optimizer.optimizer_cpu_offload": True}, {"B13"}, "hybrid_optimizer.py"),
    ({**FSDP, "optimizer.optimizer": "dist_muon"}, {"B8"}, "arguments.py:1127"),
    ({**FSDP, "checkpoint.pretrained_checkpoint": "hf"}, {"B15"}, "checkpointing.py:2856"),
    (
        {**FSDP, "checkpoint.save": None, "checkpoint.load": None, "checkpoint.ckpt_format": "zarr"},
        set(),
        "config.py:1097",
    ),
    ({"model.tensor_model_parallel_size": 3}, {"A18", "L1", "L2"}, "config.py:1024; transformer_config.py:1323,1338"),
    (
        {"model.num_layers": 30, "model.pipeline_model_parallel_size": 4},
        {"L3"},
        "transformer_block.py:150",
    ),
    (
        {
            "model.num_layers": 30,
            "model.pipeline_model_parallel_size": 4,
            "model.account_for_embedding_in_pipeline_split": True,
            "model.account_for_loss_in_pipeline_split": True,
        },
        set(),
        "transformer_config.py:2064: 32 / 4",
    ),
    (
        {
            "model.num_layers": 31,
            "model.pipeline_model_parallel_size": 4,
            "model.num_layers_in_first_pipeline_stage": 7,
        },
        set(),
        "transformer_config.py:1991: 7 + 3 x 8",
    ),
    (
        {
            "model.tensor_model_parallel_size": 2,
            "model.vocab_size": 50257,
        },
        {"L6"},
        "gpt_provider.py:265",
    ),
    ({"model.virtual_pipeline_model_parallel_size": 2}, {"L7"}, "parallel_state.py"),
    (
        {
            "model.pipeline_model_parallel_size": 4,
            "model.pipeline_dtype": "bfloat16",
            "model.virtual_pipeline_model_parallel_size": 2,
            "model.microbatch_group_size_per_vp_stage": 3,
        },
        {"L9"},
        "schedules.py:1126",
    ),
    (
        {
            "model.pipeline_model_parallel_size": 2,
            "model.pipeline_dtype": "bfloat16",
            "model.pipeline_model_parallel_layout": "Et*9|t*9L",
        },
        {"L10"},
        "pipeline_parallel_layer_layout.py",
    ),
    (
        {
            "model.tensor_model_parallel_size": 8,
            "model.sequence_parallel": True,
            "model.seq_length": 8188,
            "dataset.seq_length": 8188,
        },
        {"L4"},
        "mappings.py:72",
    ),
    ({"train.global_batch_size": 100}, {"L5"}, "num_microbatches_calculator.py:380"),
    ({"model.sequence_parallel": True}, {"A31"}, "transformer_config.py:179"),
    (
        {"ddp.use_distributed_optimizer": False, "optimizer.use_distributed_optimizer": False},
        {"D2"},
        "arguments.py:990",
    ),
    ({"peft": None, "dist.use_torch_fsdp2": True}, {"C2", "C3", "C8"}, "arguments.py:997"),
)


@pytest.mark.parametrize(("fields", "rules", "source"), ROWS)
def test_rows(fields: dict[str, Any], rules: set[str], source: str) -> None:
    fields = {path: value for path, value in fields.items() if "." in path}
    assert broken(fields) == rules, source


def test_every_rule_says_what_where_and_how() -> None:
    for rule in ALL_RULES:
        assert rule.fields, rule
        assert rule.message.endswith("."), rule
        assert rule.fix.endswith("."), rule
        assert rule.source, rule
        assert rule.severity in ("error", "warning"), rule


def test_wrong_gradients_are_errors_whatever_bridge_says() -> None:
    """DESIGN.md section 6: a rule whose breach trains wrongly is an error."""
    values = document(**{**FSDP, "ddp.data_parallel_sharding_strategy": "optim"})
    assert [p.severity for p in check_rules(values, values, 8, "blackwell") if p.rule_id == "B10"] == ["error"]
    assert {r.severity for r in ALL_RULES if r.rule_id == "B18"} == {"error"}


def test_a_rule_ends_with_the_release_that_fixes_it() -> None:
    """Megatron-LM 342faa43cd (#6357) is in no release before 0.20.0."""
    optim = {**FSDP, "ddp.data_parallel_sharding_strategy": "optim"}
    assert "B10" in broken(optim, stack=Stack(megatron_core="0.20.0.dev0"))
    assert "B10" not in broken(optim, stack=Stack(megatron_core="0.20.0"))


def test_the_stack_decides_about_transformer_engine() -> None:
    """mcore_fsdp_adapter.py:147: gradient accumulation fusion needs Transformer Engine 2.10."""
    assert "B10" in broken(FSDP, stack=Stack(transformer_engine="2.9.0"))
    assert "B10" not in broken(FSDP, stack=Stack(transformer_engine="2.12.0"))


def test_connections_and_gpu_family() -> None:
    """config.py:1102; arguments.py:1413: before Blackwell context parallelism wants one connection."""
    assert broken({**FSDP, "env_vars.CUDA_DEVICE_MAX_CONNECTIONS": 1}) == {"A8"}
    assert broken({**FSDP, "model.context_parallel_size": 2}, family="hopper") == {"B14"}
    assert broken({**FSDP, "model.context_parallel_size": 2}, family="blackwell") == set()


def test_a_silent_overwrite_is_reported_with_the_field_that_wins() -> None:
    """O1, O2."""
    values = document(**{"ddp.grad_reduce_in_fp32": False, "ddp.bucket_size": 40_000_000})
    values |= {"mixed_precision": "bf16_mixed", "comm_overlap": {"tp_comm_overlap": False}}
    effective = document(**{"ddp.grad_reduce_in_fp32": True, "ddp.bucket_size": 134_217_728})
    found = silent_overwrites(
        values, effective, ["ddp.grad_reduce_in_fp32", "ddp.bucket_size", "train.micro_batch_size"]
    )
    assert [(p.rule_id, p.fields[1]) for p in found] == [
        ("O1", "mixed_precision.grad_reduce_in_fp32"),
        ("O2", "comm_overlap.bucket_size"),
    ]


def test_strategies_have_one_vocabulary() -> None:
    assert strategy_of(document()) == "distopt"
    assert strategy_of(document(**FSDP)) == "optim_grads_params"
    off = {"ddp.use_distributed_optimizer": False, "optimizer.use_distributed_optimizer": False}
    assert strategy_of(document(**off)) == "ddp"


SIZES = st.integers(min_value=1, max_value=64)


@given(world=SIZES, tp=SIZES, pp=SIZES, cp=SIZES, mbs=SIZES, gbs=st.integers(1, 4096), layers=st.integers(1, 128))
def test_layout_that_passes_divides(world: int, tp: int, pp: int, cp: int, mbs: int, gbs: int, layers: int) -> None:
    fields = {
        "model.tensor_model_parallel_size": tp,
        "model.pipeline_model_parallel_size": pp,
        "model.context_parallel_size": cp,
        "model.num_layers": layers,
        "train.micro_batch_size": mbs,
        "train.global_batch_size": gbs,
    }
    rules = broken(fields, world)
    assert ("A18" in rules) == (world % (tp * pp * cp) != 0)
    if not rules & {"A18", "L5"}:
        assert gbs % (mbs * (world // (tp * pp * cp))) == 0
    if "L1" not in rules:
        assert 32 % tp == 0
    if "L3" not in rules and pp > 1:
        assert layers % pp == 0


@given(st.dictionaries(st.sampled_from(["model", "ddp", "train", "dist", "optimizer", "checkpoint"]), st.just({})))
def test_documents_with_missing_sections_do_not_raise(values: dict[str, Any]) -> None:
    check_rules(values, values, 8, "hopper")


@pytest.mark.parametrize(
    ("older", "newer"),
    [("0.19.2", "0.20.0"), ("0.20.0.dev0", "0.20.0"), ("0.20.0rc1", "0.20.0"), ("2.9", "2.10"), ("2.11.0a0", "2.11.0")],
)
def test_versions_sort(older: str, newer: str) -> None:
    assert version_tuple(older) < version_tuple(newer)
