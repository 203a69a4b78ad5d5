"""The rules against the real Megatron-Bridge 0.6.2: what validate() refuses is an error here, and the other way round.

Rules that Bridge passes although the model build fails (B), or that only Megatron-LM's parser knows, are in the second
table: Bridge accepts those jobs, this project does not.
"""

from __future__ import annotations

from typing import Any

import pytest

from estimator.catalog import find_recipe
from estimator.job.document import build_document
from estimator.job.effective import effective_document
from estimator.rules import check_rules

pytestmark = pytest.mark.bridge

RECIPE = "llama3_8b_pretrain_2gpu_h100_bf16_config"
SFT = "llama3_8b_sft_2gpu_h100_bf16_config"
FSDP = (
    "cfg.ddp.use_megatron_fsdp = True",
    "cfg.ddp.data_parallel_sharding_strategy = 'optim_grads_params'",
    "cfg.checkpoint.ckpt_format = 'fsdp_dtensor'",
)

REFUSED = (
    # rule, GPUs, lines, source (bridge_rules, executed here)
    ("A1", 8, (*FSDP, "cfg.dist.use_torch_fsdp2 = True"), "training/config.py:1342"),
    ("A7", 8, FSDP[:2], "training/config.py:1097"),
    ("A8", 8, (*FSDP, "cfg.env_vars['CUDA_DEVICE_MAX_CONNECTIONS'] = 1"), "training/config.py:1102"),
    ("A9", 8, (*FSDP, "cfg.ddp.fsdp_manual_registration = True"), "training/config.py:1105"),
    ("A10", 8, (*FSDP, "cfg.train.check_weight_hash_across_dp_replicas_interval = 10"), "training/config.py:1111"),
    ("A11", 8, (*FSDP, "cfg.dist.use_tp_pp_dp_mapping = True"), "training/config.py:1116"),
    ("A12", 8, ("cfg.checkpoint.ckpt_format = 'fsdp_dtensor'",), "training/config.py:1391"),
    ("A13", 8, (*FSDP, "cfg.checkpoint.also_save_hf_checkpoint = True"), "training/config.py:605"),
    ("A14", 8, ("cfg.checkpoint.async_save = True", "cfg.checkpoint.save = None"), "training/config.py:598"),
    ("A18", 6, ("cfg.model.tensor_model_parallel_size = 4",), "training/config.py:1024"),
    ("A18", 8, ("cfg.validation.eval_global_batch_size = 33",), "training/config.py:1335"),
    ("A21", 8, ("cfg.model.seq_length = 8190", "cfg.dataset.seq_length = 8190"), "training/config.py:1435"),
    ("A21", 8, ("cfg.model.seq_length = 4096",), "training/config.py:1505"),
    (
        "A22",
        8,
        ("cfg.optimizer.use_precision_aware_optimizer = True", "cfg.optimizer.optimizer = 'sgd'"),
        "optimizer_config.py:429",
    ),
    ("A23", 8, ("import torch", "cfg.optimizer.exp_avg_dtype = torch.bfloat16"), "optimizer_config.py:468"),
    (
        "A24",
        8,
        ("cfg.ddp.num_buckets = 4", "cfg.ddp.bucket_size = 40000000"),
        "distributed_data_parallel_config.py:268",
    ),
    (
        "A24",
        8,
        ("cfg.ddp.param_name_patterns_for_fp32_local_accumulation = ('all',)",),
        "distributed_data_parallel_config.py:262",
    ),
    ("A24", 8, ("cfg.ddp.reuse_grad_buf_for_mxfp8_param_ag = True", "cfg.mixed_precision = None"), "same:253"),
    (
        "A26",
        8,
        ("cfg.model.cpu_offloading = True", "cfg.model.cpu_offloading_num_layers = 32"),
        "transformer_config.py:1707",
    ),
    (
        "A26",
        8,
        (
            "cfg.model.cpu_offloading = True",
            "cfg.model.cpu_offloading_num_layers = 4",
            "cfg.model.recompute_granularity = 'selective'",
        ),
        "transformer_config.py:1719",
    ),
    ("A27", 8, ("cfg.model.fine_grained_activation_offloading = True",), "transformer_config.py:1852"),
    ("A28", 8, ("cfg.model.recompute_granularity = 'full'",), "transformer_config.py:1731"),
    (
        "A28",
        8,
        ("cfg.model.recompute_granularity = 'selective'", "cfg.model.recompute_num_layers = 1"),
        "transformer_config.py:1750",
    ),
    (
        "A28",
        8,
        ("cfg.model.recompute_granularity = 'selective'", "cfg.model.recompute_modules = ['mla_up_proj']"),
        "transformer_config.py:1792",
    ),
    (
        "A28",
        8,
        ("cfg.model.recompute_granularity = 'selective'", "cfg.model.recompute_modules = ['attention']"),
        "transformer_config.py:1769",
    ),
    ("B16", 8, (*FSDP, "cfg.model.defer_embedding_wgrad_compute = True"), "overrides.py:110"),
    (
        "L1",
        8,
        ("cfg.model.tensor_model_parallel_size = 3", "cfg.model.context_parallel_size = 1"),
        "transformer_config.py:1323",
    ),
    (
        "L2",
        12,
        ("cfg.model.tensor_model_parallel_size = 6", "cfg.model.num_attention_heads = 36"),
        "transformer_config.py:1338",
    ),
)

ACCEPTED_BUT_WRONG = (
    # rule, GPUs, lines, source
    ("B1", 8, (*FSDP, "cfg.model.pipeline_model_parallel_size = 2"), "mcore_fsdp_adapter.py:555"),
    ("B2", 8, (*FSDP, "cfg.ddp.data_parallel_sharding_strategy = 'bogus'"), "param_and_grad_buffer.py:2323"),
    ("B3", 8, (*FSDP, "cfg.ddp.outer_dp_sharding_strategy = 'optim'"), "param_and_grad_buffer.py:2491"),
    ("B4", 8, ("cfg.ddp.num_distributed_optimizer_instances = 3",), "parallel_state.py:922"),
    (
        "B7",
        8,
        (*FSDP, "cfg.ddp.data_parallel_sharding_strategy = 'no_shard'", "cfg.model.init_model_with_meta_device = True"),
        "transformer_config.py:405",
    ),
    ("B7", 8, ("cfg.model.init_model_with_meta_device = True",), "transformer_config.py:405"),
    ("B8", 8, (*FSDP, "cfg.optimizer.optimizer = 'muon'"), "arguments.py:1127"),
    ("B9", 8, (*FSDP, "cfg.model.cuda_graph_impl = 'transformer_engine'"), "nemotron_3_nano.py:186"),
    ("B10", 8, (*FSDP, "cfg.ddp.data_parallel_sharding_strategy = 'optim'"), "megatron_fsdp.py:507"),
    (
        "B18",
        8,
        (*FSDP, "cfg.ddp.data_parallel_sharding_strategy = 'no_shard'", "cfg.ddp.overlap_grad_reduce = False"),
        "megatron_fsdp.py:1316",
    ),
    ("D1", 8, ("cfg.ddp.overlap_grad_reduce = False",), "arguments.py:994"),
    (
        "D3",
        8,
        ("cfg.optimizer.optimizer_cpu_offload = True", "cfg.optimizer.optimizer_offload_fraction = 1.5"),
        "bridge_rules D3",
    ),
    ("D5", 8, ("cfg.model.calculate_per_token_loss = True",), "distributed_data_parallel.py:179"),
    (
        "L5",
        8,
        ("cfg.train.global_batch_size = 127", "cfg.validation.eval_global_batch_size = 128"),
        "num_microbatches_calculator.py:380",
    ),
)


def errors(lines: tuple[str, ...], world_size: int, recipe: str = RECIPE) -> set[str]:
    values = build_document(recipe=recipe, overrides=list(lines)).values
    effective = effective_document(values, world_size, "hopper").values
    return {p.rule_id for p in check_rules(values, effective, world_size, "hopper") if p.severity == "error"}


def run(bridge: Any, lines: tuple[str, ...], world_size: int, recipe: str = RECIPE) -> None:
    cfg = bridge.recipe(recipe, find_recipe(recipe).module)
    bridge.validated(bridge.with_python(cfg, "\n".join(lines)), world_size, {})


@pytest.mark.parametrize(("rule_id", "gpus", "lines", "source"), REFUSED)
def test_what_bridge_refuses_is_an_error(
    bridge: Any, rule_id: str, gpus: int, lines: tuple[str, ...], source: str
) -> None:
    assert rule_id in errors(lines, gpus), source
    with pytest.raises((AssertionError, ValueError, RuntimeError, ZeroDivisionError)):
        run(bridge, lines, gpus)


@pytest.mark.parametrize(("rule_id", "gpus", "lines", "source"), ACCEPTED_BUT_WRONG)
def test_what_bridge_passes_although_it_cannot_run_is_an_error(
    bridge: Any, rule_id: str, gpus: int, lines: tuple[str, ...], source: str
) -> None:
    run(bridge, lines, gpus)
    assert rule_id in errors(lines, gpus), source


def test_a_recipe_as_shipped_breaks_no_rule(bridge: Any) -> None:
    run(bridge, (), 2)
    assert errors((), 2) == set()


def test_fine_tuning_with_context_parallelism_needs_a_loss_per_token(bridge: Any) -> None:
    """A20, training/config.py:1440-1457."""
    lines = (
        "cfg.model.context_parallel_size = 2",
        "cfg.model.tensor_model_parallel_size = 1",
        "cfg.model.sequence_parallel = False",
        "cfg.model.calculate_per_token_loss = False",
    )
    assert "A20" in errors(lines, 4, SFT)
    with pytest.raises(AssertionError, match="calculate_per_token_loss"):
        run(bridge, lines, 4, SFT)
