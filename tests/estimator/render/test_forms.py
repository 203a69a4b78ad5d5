"""One change list in every form. What Bridge makes of them is tested in tests/bridge; here, what they say."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from estimator.changes import Change, apply_changes, routed, written_path
from estimator.render import Cluster, render_override
from estimator.render.launch import node_shape
from estimator.render.values import hydra_literal

PLAIN: dict[str, Any] = {"mixed_precision": None, "comm_overlap": None, "env_vars": {}, "ddp": {}}
NAMED = {**PLAIN, "mixed_precision": "bf16_mixed"}
OBJECT = {**PLAIN, "mixed_precision": {"grad_reduce_in_fp32": True}}
OVERLAPPED = {
    **PLAIN,
    "comm_overlap": {"tp_comm_overlap": False},
    "ddp": {"use_distributed_optimizer": True},
}


def change(path: str, to: Any) -> Change:
    return Change(path, None, to, "because", "dp_strategy")


ROWS = (
    # values, path, to, python, cli, source
    (PLAIN, "train.micro_batch_size", 2, "cfg.train.micro_batch_size = 2", "train.micro_batch_size=2", "an integer"),
    (PLAIN, "checkpoint.load", None, "cfg.checkpoint.load = None", "checkpoint.load=null", "None"),
    (
        PLAIN,
        "ddp.megatron_fsdp_main_grads_dtype",
        "float32",
        "import torch\ncfg.ddp.megatron_fsdp_main_grads_dtype = torch.float32",
        "'ddp.megatron_fsdp_main_grads_dtype={_target_:torch.float32,_call_:false}'",
        "omegaconf_utils.py: a string would stay a string",
    ),
    (
        PLAIN,
        "model.recompute_modules",
        ["core_attn", "mlp"],
        "cfg.model.recompute_modules = ['core_attn', 'mlp']",
        "'model.recompute_modules=[core_attn,mlp]'",
        "a list",
    ),
    (
        PLAIN,
        "checkpoint.save",
        "/runs/my run",
        'cfg.checkpoint.save = "/runs/my run"',
        "'checkpoint.save=\"/runs/my run\"'",
        "quoted for Hydra and for the shell",
    ),
    (
        PLAIN,
        "env.CUDA_DEVICE_MAX_CONNECTIONS",
        32,
        'cfg.env_vars["CUDA_DEVICE_MAX_CONNECTIONS"] = 32',
        "++env_vars.CUDA_DEVICE_MAX_CONNECTIONS=32",
        "config.py:1832: setdefault",
    ),
    (
        NAMED,
        "ddp.grad_reduce_in_fp32",
        False,
        """from megatron.bridge.training.mixed_precision import bf16_mixed
cfg.mixed_precision = bf16_mixed()
cfg.mixed_precision.grad_reduce_in_fp32 = False""",
        None,
        "O1",
    ),
    (
        OBJECT,
        "ddp.grad_reduce_in_fp32",
        False,
        "cfg.mixed_precision.grad_reduce_in_fp32 = False",
        "mixed_precision.grad_reduce_in_fp32=false",
        "O1",
    ),
    (
        OVERLAPPED,
        "ddp.bucket_size",
        40_000_000,
        "cfg.comm_overlap.bucket_size = 40000000",
        "comm_overlap.bucket_size=40000000",
        "O2",
    ),
    (
        PLAIN,
        "model.attention_backend",
        "flash",
        "from megatron.core.transformer.enums import AttnBackend\ncfg.model.attention_backend = AttnBackend.flash",
        "'model.attention_backend={_target_:megatron.core.transformer.enums.AttnBackend.flash,_call_:false}'",
        "transformer/enums.py",
    ),
)


@pytest.mark.parametrize(("values", "path", "to", "python", "cli", "source"), ROWS)
def test_rows(values: dict[str, Any], path: str, to: Any, python: str, cli: str | None, source: str) -> None:
    override = render_override([change(path, to)], values, Cluster(8, 8))
    assert override.python == python + "\n", source
    if cli is not None:
        assert override.cli == cli, source


def test_command_line_splits_into_its_arguments() -> None:
    override = render_override(
        [change("checkpoint.save", 'a "b" c'), change("ddp.x_dtype", "bfloat16")], PLAIN, Cluster(8, 8)
    )
    assert tuple(shlex.split(str(override.cli))) == override.cli_arguments


def test_plain_ddp_is_not_overwritten_by_comm_overlap() -> None:
    """O2 holds with the distributed optimizer only (comm_overlap.py:636-643)."""
    off = change("ddp.use_distributed_optimizer", False)
    gather = change("ddp.overlap_param_gather", False)
    assert [c.path for c in routed([off, gather], OVERLAPPED)][1] == "ddp.overlap_param_gather"
    assert [c.path for c in routed([gather], OVERLAPPED)] == ["comm_overlap.overlap_param_gather"]
    assert written_path("model.overlap_p2p_comm", OVERLAPPED, False) == "comm_overlap.overlap_p2p_comm"


def test_environment_is_exported_and_written() -> None:
    changes = [change("env.NAME", "a b"), change("env.GONE", None)]
    override = render_override(changes, {**PLAIN, "env_vars": {"GONE": 1}}, Cluster(16, 8))
    assert override.env == {"NAME": "a b", "GONE": None}
    assert "cfg.env_vars.pop('GONE', None)" in str(override.python)
    assert "~env_vars.GONE" in str(override.cli)
    assert override.yaml is None
    assert "env_vars" in override.reasons["yaml"]
    for text in override.launch.values():
        assert "export NAME='a b'" in text
        assert "unset GONE" in text
        assert text.index("export NAME") < text.index("torchrun --")


def test_an_exported_variable_is_not_written_twice() -> None:
    override = render_override([change("env.NAME", 32)], {**PLAIN, "env_vars": {"NAME": 32}}, Cluster(8, 8))
    assert override.python is None
    assert override.env == {"NAME": "32"}
    assert override.reasons["python"]


def test_a_reference_cannot_be_said_to_omegaconf() -> None:
    override = render_override([change("checkpoint.save", "${HOME}/runs")], PLAIN, Cluster(8, 8))
    assert override.cli is None
    assert override.yaml is None
    assert "checkpoint.save" in override.reasons["cli"]
    assert override.python is not None


def test_an_unknown_precision_recipe_is_left_to_python() -> None:
    override = render_override(
        [change("ddp.grad_reduce_in_fp32", False)], {**PLAIN, "mixed_precision": "mine"}, Cluster(8, 8)
    )
    assert override.cli is None
    assert "cfg.mixed_precision = mine()" in str(override.python)


@pytest.mark.parametrize(
    ("gpus", "per_node", "shape"),
    [(2, 8, (1, 2)), (16, 8, (2, 8)), (64, 4, (16, 4)), (12, 8, (2, 6)), (8, None, (1, 8)), (1, 8, (1, 1))],
)
def test_nodes(gpus: int, per_node: int | None, shape: tuple[int, int]) -> None:
    assert node_shape(Cluster(gpus, per_node)) == shape
    assert node_shape({"num_gpus": gpus, "gpus_per_node": per_node}) == shape


def test_slurm_script_asks_for_the_nodes() -> None:
    text = render_override([change("train.micro_batch_size", 1)], PLAIN, Cluster(32, 8)).launch["slurm"]
    assert "#SBATCH --nodes=4" in text
    assert "#SBATCH --gpus-per-node=8" in text
    assert "<YOUR_TRAINING_SCRIPT.py>" in text


FSDP = [
    change("dist.use_megatron_fsdp", True),
    change("ddp.use_megatron_fsdp", True),
    change("ddp.data_parallel_sharding_strategy", "optim_grads_params"),
    change("ddp.average_in_collective", False),
    change("checkpoint.ckpt_format", "fsdp_dtensor"),
    change("checkpoint.load", "runs/a_fsdp"),
    change("model.init_model_with_meta_device", True),
]
FUSED = {**PLAIN, "model": {"gradient_accumulation_fusion": True}}


def test_harness_flag_says_what_it_sets() -> None:
    """scripts/performance/utils/overrides.py of v0.6.0: the flag sets load = None, so the folder is a flag too."""
    harness = render_override(FSDP, FUSED, Cluster(8, 8)).harness
    assert harness == "--use_megatron_fsdp true --load_dir runs/a_fsdp checkpoint.ckpt_format=fsdp_dtensor"


def test_harness_flag_is_not_written_where_it_would_undo_a_change() -> None:
    changes = [*FSDP, change("model.gradient_accumulation_fusion", False)]
    harness = str(render_override(changes, FUSED, Cluster(8, 8)).harness)
    assert "--use_megatron_fsdp" not in harness
    assert "ddp.use_megatron_fsdp=true" in harness


def test_changed_document_shares_what_does_not_change() -> None:
    values = {**NAMED, "model": {"a": 1}, "train": {"b": 1}}
    changed = apply_changes(values, [change("train.b", 2), change("ddp.grad_reduce_in_fp32", False)])
    assert changed["model"] is values["model"]
    assert values["train"] == {"b": 1}
    assert changed["train"] == {"b": 2}
    assert changed["mixed_precision"]["grad_reduce_in_fp32"] is False
    assert changed["mixed_precision"]["params_dtype"] == "bfloat16"


TEXT = st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=20)
LEAF = st.none() | st.booleans() | st.integers() | TEXT


@given(st.dictionaries(st.from_regex("[a-z][a-z_]{0,8}", fullmatch=True), LEAF, min_size=1, max_size=4))
def test_yaml_says_what_changed(fields: dict[str, Any]) -> None:
    override = render_override([change(f"train.{name}", value) for name, value in fields.items()], PLAIN, Cluster(8, 8))
    if override.yaml is not None:
        assert yaml.safe_load(override.yaml) == {"train": fields}


@given(LEAF | st.lists(LEAF, max_size=3))
def test_hydra_literals_stay_on_one_line(value: Any) -> None:
    assert "\n" not in hydra_literal(value)
