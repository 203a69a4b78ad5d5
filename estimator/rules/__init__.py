"""What Megatron-Bridge, or the model build behind it, refuses or trains wrongly: rules as tables, and one function.

The rules are read from megatron-bridge 0.6.2 and megatron-core 0.19.2 (their numbers: A enforced by validate(), B not
caught by it, C torch FSDP2, D distributed optimizer and DDP, L layout arithmetic, O silent overwrites). A rule whose
breach loses gradients (B10, B18) is an error although Bridge accepts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from estimator.job.settings import Stack
from estimator.rules.companions import STRATEGIES, fsdp_companions, strategy_changes
from estimator.rules.distributed import COMMON_RULES, TORCH_FSDP2_RULES, WITHOUT_FSDP_RULES
from estimator.rules.facts import FSDP_STRATEGIES, Facts, strategy_of
from estimator.rules.layout import LAYOUT_RULES
from estimator.rules.megatron_fsdp import FSDP_RULES
from estimator.rules.model import (
    CPU_OFFLOAD_RULES,
    EXPERT_OVERLAP_RULES,
    FINE_GRAINED_OFFLOAD_RULES,
    RECOMPUTE_RULES,
)
from estimator.rules.overwrites import OVERWRITES, silent_overwrites
from estimator.rules.rule import Problem, Rule, Severity

__all__ = [
    "ALL_RULES",
    "FSDP_STRATEGIES",
    "OVERWRITES",
    "STRATEGIES",
    "Problem",
    "Rule",
    "Severity",
    "check_rules",
    "fsdp_companions",
    "silent_overwrites",
    "strategy_changes",
    "strategy_of",
]

_TABLES: tuple[tuple[Rule, ...], ...] = (
    LAYOUT_RULES,
    FSDP_RULES,
    WITHOUT_FSDP_RULES,
    TORCH_FSDP2_RULES,
    COMMON_RULES,
    RECOMPUTE_RULES,
    CPU_OFFLOAD_RULES,
    FINE_GRAINED_OFFLOAD_RULES,
    EXPERT_OVERLAP_RULES,
)
ALL_RULES: tuple[Rule, ...] = tuple(rule for table in _TABLES for rule in table)


def check_rules(
    values: Mapping[str, Any],
    effective: Mapping[str, Any],
    world_size: int,
    gpu_family: str,
    stack: Stack | None = None,
) -> tuple[Problem, ...]:
    """Every rule that the job breaks, errors first.

    ``values`` is the job as written, ``effective`` the same after Bridge's own adjustments
    (``estimator.job.effective_document``): nested mappings shaped like ConfigContainer, dtypes as strings. Nothing is
    copied or changed. ``gpu_family`` decides rules about GPUs before Blackwell ("hopper", "ampere" ...).
    """
    stack = stack or _DEFAULT_STACK
    facts = Facts(values, effective, world_size, gpu_family, stack)
    layout, fsdp, without, fsdp2, common, recompute, offload, fine_grained, overlap = _active(stack.megatron_core)
    model = facts.model
    broken = [rule for rule in layout if rule.breached(facts)]
    broken += [rule for rule in (fsdp if facts.fsdp else without) if rule.breached(facts)]
    if facts.fsdp2:
        broken += [rule for rule in fsdp2 if rule.breached(facts)]
    broken += [rule for rule in common if rule.breached(facts)]
    if facts.granularity is not None:
        broken += [rule for rule in recompute if rule.breached(facts)]
    if model.get("cpu_offloading"):
        broken += [rule for rule in offload if rule.breached(facts)]
    if model.get("fine_grained_activation_offloading"):
        broken += [rule for rule in fine_grained if rule.breached(facts)]
    if model.get("overlap_moe_expert_parallel_comm"):
        broken += [rule for rule in overlap if rule.breached(facts)]
    if not broken:
        return ()
    broken.sort(key=lambda rule: rule.severity != "error")
    return tuple(rule.problem(facts) for rule in broken)


_DEFAULT_STACK = Stack()


@lru_cache(maxsize=32)
def _active(megatron_core: str) -> tuple[tuple[Rule, ...], ...]:
    return tuple(tuple(rule for rule in table if rule.holds_in(megatron_core)) for table in _TABLES)
