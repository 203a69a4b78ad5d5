"""What a caller asks: a job, the cluster it runs on, and how sure the answer must be. Well-typed, not yet read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # numpy takes its time, and the command line reads options first
    from estimator.calibration import Calibration


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A job as the user says it; later wins over earlier: recipe < config < overrides."""

    recipe: str | None = None
    """An exported recipe name of Megatron-Bridge, or an alias."""
    module: str | None = None
    """Where two modules export the name."""
    config: Mapping[str, Any] | None = None
    """A ConfigContainer document, whole or partial (``run_config.yaml``)."""
    overrides: tuple[str, ...] = ()
    """Hydra-style strings or Python ``cfg.x.y = ...`` lines."""
    moe_load_imbalance: float | None = None
    """Tokens of the fullest expert-parallel rank over the mean; None = ``DEFAULT_LOAD_IMBALANCE``."""


@dataclass(frozen=True, slots=True)
class ClusterRequest:
    """The GPUs, by name and number."""

    gpu: str
    num_gpus: int
    gpus_per_node: int | None = None
    memory_limit_bytes: int | None = None
    """An allocator cap; compared with the survival memory."""
    reserved_bytes: int | None = None
    """Taken by other processes on each card."""
    total_bytes: int | None = None
    """Memory of a card that is not listed, as cudaMemGetInfo reports it."""
    calibrations: tuple[Calibration, ...] = ()
    """Those that are active, one a stack and GPU family; others are answered with the shipped ones."""


@dataclass(frozen=True, slots=True)
class EstimateRequest:
    """The question of ``POST /estimate``."""

    job: JobRequest
    cluster: ClusterRequest
    stack: Mapping[str, str] = field(default_factory=dict)
    """Versions: megatron_core, megatron_bridge, transformer_engine, torch; empty = the pinned defaults."""
    min_fit_probability: float = 0.99
    pipeline_rank: int | None = None
    """None = the worst by required_bytes."""
    survival: bool = True
    timeline: bool = False
    """Also the course of memory over the step, as points for a plot."""


@dataclass(frozen=True, slots=True)
class RecommendRequest:
    """The question of ``POST /recommend``."""

    job: JobRequest
    cluster: ClusterRequest
    stack: Mapping[str, str] = field(default_factory=dict)
    min_fit_probability: float = 0.99
    evidence: Any = None
    """What the failed run left, as ``estimator.diagnose`` reads it: an ``Evidence``, or None."""
    allow: tuple[str, ...] | None = None
    """Families of changes that the user allows beside the harmless ones; None = the default set."""
    max_recommendations: int = 5
