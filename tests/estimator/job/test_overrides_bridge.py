"""Overrides do to our document what Bridge's own code (Hydra strings) and Python itself (assignments) do to the
config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bridge_oracle as oracle
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from estimator.catalog import find_recipe
from estimator.errors import JobError
from estimator.job import build_document, effective_document
from estimator.job.hydra_lines import read_value
from estimator.job.operations import Unreadable

pytestmark = [
    pytest.mark.bridge,
    pytest.mark.skipif(not oracle.installed(), reason="megatron-bridge is not installed"),
]
RECIPE = "llama3_8b_pretrain_config"
PRECISION = "megatron.bridge.training.mixed_precision.MixedPrecisionConfig"
OVERLAP = "megatron.bridge.training.comm_overlap.CommOverlapConfig"

HYDRA = [
    ["train.micro_batch_size=2", "train.global_batch_size=1_024"],
    ["model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1"],
    ["model.recompute_granularity=selective", "model.recompute_modules=[core_attn,mlp]"],
    ["model.recompute_modules=['core_attn', \"layernorm\"]"],
    ["++ddp.use_megatron_fsdp=true", "++ddp.data_parallel_sharding_strategy=optim_grads_params"],
    ["ddp.average_in_collective=False", "ddp.bucket_size=null", "optimizer.lr=1e-4", "optimizer.min_lr=.5"],
    ["++env_vars.CUDA_DEVICE_MAX_CONNECTIONS=32", "++env_vars.X='a b'"],
    ["+env_vars.NEW=1", "~env_vars.PYTORCH_CUDA_ALLOC_CONF"],
    ["env_vars.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"],
    ["checkpoint.save=/tmp/a-b_c/d.e", "checkpoint.load=null", "checkpoint.ckpt_format=fsdp_dtensor"],
    ["mixed_precision=fp16_mixed"],
    ["model.params_dtype=torch.float32"],
    ["model.activation_func=gelu", "model.attention_dropout=0", "model.hidden_dropout=0.1"],
    [f"mixed_precision={{_target_:{PRECISION},bf16:true,params_dtype:torch.bfloat16,grad_reduce_in_fp32:false}}"],
    [f"comm_overlap={{_target_:{OVERLAP},tp_comm_overlap:false,bucket_size:1000000}}"],
    ["dataset.blend=null", "dataset.split='1,1,1'", "model.window_size=[128,0]"],
    ["~model.normalization"],
    ["dataset.seq_length=2048", "model.seq_length=${dataset.seq_length}"],
    ["model.seq_length=int(4096)", "dataset.seq_length=4096"],
]
HYDRA_REFUSED = [
    ["env_vars.CUDA_DEVICE_MAX_CONNECTIONS=32"],
    ["~model.recompute_modules"],
    ["~env_vars.NOT_THERE"],
    ["+model.hidden_size=4096"],
    ["model.a@b=1"],
    ["model.hidden_sise=1"],
    ["train.micro_batch_size=1,2"],
    ["comm_overlap.bucket_size=1"],
    ["mixed_precision.grad_reduce_in_fp32=false"],
    ["train.micro_batch_size"],
    ["model.recompute_modules=[core_attn"],
    ["model.seq_length='8192"],
]
PYTHON = [
    """cfg.train.micro_batch_size = 2
cfg.train.global_batch_size = 2 * 256""",
    """import torch
cfg.ddp.megatron_fsdp_main_grads_dtype = torch.float32
cfg.model.params_dtype = torch.half""",
    """from megatron.bridge.training.mixed_precision import bf16_mixed
cfg.mixed_precision = bf16_mixed()
cfg.mixed_precision.grad_reduce_in_fp32 = False""",
    """from megatron.bridge.training.mixed_precision import bf16_with_mxfp8_mixed
cfg.mixed_precision = bf16_with_mxfp8_mixed()
cfg.mixed_precision.fp8_param = False""",
    """from megatron.bridge.training.mixed_precision import MixedPrecisionConfig
from torch import bfloat16
cfg.mixed_precision = MixedPrecisionConfig(bf16=True, params_dtype=bfloat16, fp8_param_gather=True)""",
    """from megatron.bridge.training.comm_overlap import CommOverlapConfig
cfg.comm_overlap = CommOverlapConfig(
    tp_comm_overlap=False,
    bucket_size=1_000_000,
)""",
    """cfg.env_vars["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
cfg.env_vars.update({"A": 1, "B": "x"})
cfg.env_vars.pop("PYTORCH_CUDA_ALLOC_CONF", None)
del cfg.env_vars["A"]""",
    """cfg.model.recompute_modules = ['core_attn', 'mlp']
cfg.model.window_size = (128, 0)""",
    """import torch.nn.functional as F
cfg.model.activation_func = F.gelu""",
    """cfg.model.seq_length = 4096
cfg.dataset.seq_length = cfg.model.seq_length
cfg.train.micro_batch_size *= 2""",
    """cfg.optimizer.lr = -1e-4 + 2e-4
cfg.model.num_query_groups = None""",
]


def without_target_noise(document: dict[str, Any]) -> dict[str, Any]:
    """Dtypes that Bridge keeps as texts until the model is finalized are named like ours; functions by name."""
    return {
        section: {k: v.removeprefix("torch.") if isinstance(v, str) else v for k, v in value.items()}
        if isinstance(value, dict)
        else value
        for section, value in document.items()
        if section != "_target_"
    }


def compare(real: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    real, ours = without_target_noise(real), without_target_noise(ours)
    found = {}
    for section in real.keys() | ours.keys():
        theirs, mine = real.get(section), ours.get(section)
        if not isinstance(theirs, dict) or not isinstance(mine, dict):
            if theirs != mine:
                found[section] = (theirs, mine)
            continue
        for name in theirs.keys() | mine.keys():
            if theirs.get(name) != mine.get(name):
                found[f"{section}.{name}"] = (theirs.get(name), mine.get(name))
    return found


def with_hydra(overrides: list[str]) -> Any:
    config = oracle.container(find_recipe(RECIPE).document())
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    return process_config_with_overrides(config, cli_overrides=overrides)


@pytest.mark.parametrize("overrides", HYDRA, ids=lambda o: o[0][:50])
def test_hydra_strings_do_what_bridge_does(overrides: list[str]) -> None:
    real = oracle.load().plain(with_hydra(overrides))
    assert compare(real, build_document(RECIPE, overrides=overrides).values) == {}


@pytest.mark.parametrize("overrides", HYDRA_REFUSED, ids=lambda o: o[0][:50])
def test_what_bridge_cannot_parse_is_a_job_error(overrides: list[str]) -> None:
    oracle.load()
    with pytest.raises(Exception):  # noqa: B017, PT011 (Bridge's own, of several classes)
        with_hydra(overrides)
    with pytest.raises(JobError):
        build_document(RECIPE, overrides=overrides)


@pytest.mark.parametrize("text", PYTHON, ids=lambda t: t.splitlines()[-1][:50])
def test_python_lines_do_what_python_does(text: str) -> None:
    config = oracle.container(find_recipe(RECIPE).document())
    exec(compile(text, "<override>", "exec"), {"cfg": config})
    assert compare(oracle.load().plain(config), build_document(RECIPE, overrides=[text]).values) == {}


@pytest.mark.parametrize("effective", [False, True], ids=["before", "after runtime_config_update"])
@pytest.mark.parametrize("name", [RECIPE, "qwen3_8b_pretrain_config", "deepseek_v2_lite_pretrain_config"])
def test_run_config_yaml_is_read_whole(name: str, effective: bool, tmp_path: Path) -> None:
    """What Bridge writes next to a checkpoint is the same document again."""
    config = oracle.container(find_recipe(name).document())
    if effective:
        _, error = oracle.run(config, 16)
        assert error is None
    config.to_yaml(str(tmp_path / "run_config.yaml"))
    read = build_document(config=(tmp_path / "run_config.yaml").read_text())
    expected = oracle.load().plain(config)
    ignored = {"model.init_method", "model.embedding_init_method", "model.output_layer_init_method"}
    assert compare(expected, read.values).keys() - ignored == set()
    again = effective_document(read.values, 16)
    if effective:
        sections = ("model", "ddp", "optimizer", "dist", "train")
        assert [c for c in again.changes if c.path.partition(".")[0] in sections] == []


@settings(max_examples=1500, deadline=None)
@given(st.text(alphabet="ab1_0.-+eE[]{},:'\" \\/=$()@?|%*~nulltrue", min_size=1, max_size=9))
def test_values_are_read_as_hydra_reads_them(text: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override("a=" + text)
        assume(
            not override.is_sweep_override()
        )  # several values: refused by us, applied one by one by Hydra's launcher
        expected = repr(override.value())
    except (HydraException, ValueError):
        expected = "unreadable"
    assume("${" not in text)
    assume("(" not in text)
    assume(": " not in text and " :" not in text)  # Hydra keeps blanks next to a colon at either end of a text
    assume(not text.endswith(" ") or text.rstrip()[-1:] not in ('"', "'", "]", "}"))  # it refuses blanks there
    try:
        ours = repr(read_value(text))
    except Unreadable:
        ours = "unreadable"
    assert ours == expected
