"""Components of the estimate in the few groups that a bar can show, always in this order and colour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from estimator import components as c

AROUND = "around"


@dataclass(frozen=True, slots=True)
class Group:
    """``key`` names the colour in the style sheet."""

    key: str
    title: str
    members: tuple[str, ...]


GROUPS: tuple[Group, ...] = (
    Group("weights", "Weights", (c.PARAMETERS, c.FP8_WEIGHTS)),
    Group("main", "Main weights (FP32)", (c.MAIN_PARAMETERS,)),
    Group("gradients", "Gradients", (c.MAIN_GRADIENTS, c.WEIGHT_GRADIENTS)),
    Group("states", "Optimizer states", (c.OPTIMIZER_STATES,)),
    Group("activations", "Activations", (*c.ACTIVATIONS, c.ACTIVATION_GRADIENTS, c.BATCH)),
    Group("logits", "Logits and loss", (c.LOGITS,)),
    Group("buffers", "FSDP buffers", (c.GATHERED_PARAMETERS, c.GRADIENT_BUCKETS)),
    Group("temporaries", "Temporaries, workspaces", (c.OPTIMIZER_TEMPORARIES, c.WGRAD_DUMMIES, c.WORKSPACES)),
    Group(AROUND, "Allocator, context, NCCL", ()),
)


def grouped(estimate: Mapping[str, Any]) -> dict[str, int]:
    """Bytes by group key; they add up to ``required_bytes``. A component that no group knows counts as temporary."""
    sizes = {group.key: 0 for group in GROUPS}
    owner = {member: group.key for group in GROUPS for member in group.members}
    for name, size in (estimate.get("components_at_peak") or {}).items():
        if name == c.CALIBRATION:  # may be negative: part of what lies around the components
            continue
        sizes[owner.get(name, "temporaries")] += size
    sizes[AROUND] = max(0, int(estimate.get("required_bytes") or 0) - sum(sizes.values()))
    return sizes
