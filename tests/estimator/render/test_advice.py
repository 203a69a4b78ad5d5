"""Warnings, checkpoints and verification of a change of strategy."""

from __future__ import annotations

from typing import Any

import pytest

from estimator.catalog import find_recipe
from estimator.changes import apply_changes
from estimator.job.effective import effective_document
from estimator.job.settings import Stack
from estimator.render import Advice, advise
from estimator.rules import strategy_changes


def advice(strategy: str, stack: Stack | None = None, **checkpoint: Any) -> Advice:
    values = find_recipe("llama3_8b_pretrain_2gpu_h100_bf16_config").document()
    values["checkpoint"] = {**values["checkpoint"], **checkpoint}
    effective = effective_document(values, 8, "hopper").values
    changes = strategy_changes(values, effective, strategy, 8, "hopper")
    changed = effective_document(apply_changes(values, changes), 8, "hopper").values
    return advise(changes, values, effective, changed, stack)


def test_torch_dist_checkpoints_must_be_converted() -> None:
    """B15."""
    found = advice("optim_grads_params", save="/runs/a", load="/runs/a")
    assert found.checkpoint_format == "fsdp_dtensor"
    assert found.conversion_needed
    assert "convert-torch-dist-to-fsdp-dtensor" in found.checkpoint_text
    assert "/runs/a/<ITERATION> /runs/a_fsdp/<ITERATION> --swiglu" in found.checkpoint_text
    assert "convert_checkpoints_fsdp.py import" in found.checkpoint_text
    assert "B15" in {note.id for note in found.warnings}


def test_nothing_to_convert_where_nothing_is_loaded() -> None:
    found = advice("optim_grads_params", save="/runs/a", load=None)
    assert not found.conversion_needed
    assert "none is converted" in found.checkpoint_text


def test_plain_ddp_keeps_its_format() -> None:
    found = advice("ddp")
    assert found.checkpoint_format == "torch_dist"
    assert not found.conversion_needed


@pytest.mark.parametrize(
    ("version", "path", "source"),
    [
        ("0.6.2", "test_groups/megatron_fsdp/test_megatron_fsdp.py", "tag v0.6.0"),
        ("0.4.2", "test_groups/training/test_megatron_fsdp.py", "tag v0.4.2"),
        ("0.3.1", "functional_tests/training/test_megatron_fsdp.py", "tag v0.3.1"),
    ],
)
def test_functional_test_is_quoted_where_it_lives(version: str, path: str, source: str) -> None:
    commands = advice("optim_grads_params", Stack(megatron_bridge=version)).verify_commands
    assert any(path in command for command in commands), source


def test_effective_values_are_printed() -> None:
    script = advice("optim_grads_params").verify_commands[0]
    compile(script, "verify", "exec")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in script
    assert "ddp.megatron_fsdp_main_grads_dtype" in script


def test_advice_is_shaped_like_the_answer() -> None:
    answer = advice("optim_grads_params").as_dict()
    assert set(answer) == {"warnings", "checkpoint", "verify"}
    assert set(answer["checkpoint"]) == {"format", "conversion_needed", "text"}
    assert set(answer["verify"]) == {"commands", "criteria"}
