"""O rules: which settings Bridge overwrites silently, so that a field set elsewhere counts for nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from estimator.changes import written_path
from estimator.rules.facts import section
from estimator.rules.rule import Problem

OVERWRITES: dict[str, tuple[str, str]] = {
    "O1": (
        "cfg.mixed_precision overwrites fields of the same name on model, optimizer and ddp.",
        "B/training/mixed_precision.py:126-157; B/training/config.py:1872-1877",
    ),
    "O2": (
        "cfg.comm_overlap overwrites the overlap and bucket settings of ddp, optimizer and model.",
        "B/training/comm_overlap.py:562-586,636-643; B/training/config.py:1885",
    ),
    "O3": ("Config objects accept unknown attributes without a word.", "plain dataclasses"),
    "O4": ("validate() does not check the sharding strategy's name; the model build does (B2).", "run"),
    "O5": (
        "optim_grads_params forces overlap_param_gather, optim_grads and optim_grads_params force overlap_grad_reduce.",
        "F/megatron_fsdp.py:328-333",
    ),
    "O6": ("nccl_ub forces fsdp_double_buffer when the model is built.", "F/param_and_grad_buffer.py:2041-2048"),
    "O7": (
        "bucket_size None becomes max(40e6, 1e6 x DP x CP) elements; without overlap_grad_reduce one bucket holds all.",
        "T/models/dist_utils.py:279-295",
    ),
}
"""rule id -> (what is overwritten, where)."""


def silent_overwrites(
    values: Mapping[str, Any], effective: Mapping[str, Any], paths: Iterable[str]
) -> tuple[Problem, ...]:
    """Of ``paths`` (what the user wrote: "ddp.grad_reduce_in_fp32"), those that Bridge overwrites, as warnings."""
    distributed = bool(section(values, "ddp").get("use_distributed_optimizer"))
    found: list[Problem] = []
    for path in paths:
        wins = written_path(path, values, distributed)
        if wins == path:
            continue
        name, _, field = path.partition(".")
        wanted, got = section(values, name).get(field), section(effective, name).get(field)
        if wanted == got:
            continue
        rule_id = "O1" if wins.startswith("mixed_precision.") else "O2"
        found.append(
            Problem(
                rule_id,
                "warning",
                (path, wins),
                f"{path} = {wanted} is overwritten with {got}. {OVERWRITES[rule_id][0]}",
                f"Set {wins} instead.",
                OVERWRITES[rule_id][1],
            )
        )
    return tuple(found)
