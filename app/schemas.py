"""Request bodies of the API, shared with the command line: strict types, and unknown keys name the nearest known one.

Integers are accepted as JSON writes them (8 and 8.0 are the same number); a boolean or a string is not a number.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    model_validator,
)

from estimator.job.megatron_lm import megatron_config
from estimator.requests import ClusterRequest, EstimateRequest, JobRequest, RecommendRequest

MAX_BYTES = 2**50
"""A PiB on one card: more is a typing error."""


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"must be a number, not {_json_kind(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("must be a finite number")
    return value


def _whole_number(value: Any) -> Any:
    value = _number(value)
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(f"must be a whole number, not {value}")
    return int(value)


def _json_kind(value: Any) -> str:
    if value is None:
        return "null"
    return {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}.get(
        type(value), type(value).__name__
    )


def _text(value: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("is not valid Unicode text (a lone surrogate)")
    if "\x00" in value:
        raise ValueError("contains a NUL character")
    return value


# The validator stands after Field, so that it runs before Field's own checks.
WholeNumber = Annotated[int, BeforeValidator(_whole_number)]
Bytes = Annotated[int, Field(ge=1, le=MAX_BYTES), BeforeValidator(_whole_number)]
Probability = Annotated[float, Field(gt=0, lt=1), BeforeValidator(_number)]
Text = Annotated[StrictStr, AfterValidator(_text)]
Name = Annotated[StrictStr, Field(min_length=1, max_length=200), AfterValidator(_text)]


class Body(BaseModel):
    """Base of all bodies: immutable, and a key that is not known is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Job(Body):
    """The training job. Later wins over earlier: recipe < config < overrides."""

    recipe: Name | None = Field(default=None, description="A recipe of Megatron-Bridge, or an alias of one")
    module: Name | None = Field(default=None, description="Where two modules export the recipe's name")
    config: dict[str, Any] | None = Field(
        default=None, description="A ConfigContainer document, whole or partial: run_config.yaml as Bridge writes it"
    )
    megatron_lm_args: dict[str, Any] | None = Field(
        default=None,
        description="Megatron-LM's arguments as it parses them, by name (num_layers): in place of recipe and config",
    )
    overrides: list[Annotated[Text, Field(max_length=100_000)]] = Field(
        default_factory=list, max_length=5_000, description="Hydra-style overrides, or Python lines cfg.x.y = value"
    )
    moe_load_imbalance: Annotated[float, Field(ge=1, le=4096, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Tokens of the fullest expert-parallel rank over the mean; null = as a trained router has",
    )

    @model_validator(mode="after")
    def _one_vocabulary(self) -> Job:
        if self.megatron_lm_args is not None and (self.recipe is not None or self.config is not None):
            raise ValueError("megatron_lm_args stands in place of recipe and config: give one of them, and overrides")
        return self

    def to_request(self) -> JobRequest:
        """Raises JobError naming arguments of Megatron-LM that matter and cannot be translated."""
        config = self.config if self.megatron_lm_args is None else megatron_config(self.megatron_lm_args)
        return JobRequest(self.recipe, self.module, config, tuple(self.overrides), self.moe_load_imbalance)


class Cluster(Body):
    """Where the job runs."""

    gpu: Name = Field(description="A name of GET /gpus, or an alias such as nvidia-smi's")
    num_gpus: Annotated[int, Field(ge=1, le=1_000_000), BeforeValidator(_whole_number)]
    gpus_per_node: Annotated[int, Field(ge=1, le=10_000), BeforeValidator(_whole_number)] | None = None
    memory_limit_bytes: Bytes | None = Field(
        default=None, description="An allocator cap, compared with survival memory"
    )
    reserved_bytes: Annotated[int, Field(ge=0, le=MAX_BYTES), BeforeValidator(_whole_number)] | None = Field(
        default=None, description="Taken by other processes on each card"
    )
    total_bytes: Bytes | None = Field(default=None, description="Memory of a card that is not listed")

    def to_request(self) -> ClusterRequest:
        return ClusterRequest(**self.model_dump())


class Evidence(Body):
    """What the failed run left."""

    log: Text | None = Field(default=None, description="The out-of-memory text or the end of the log")
    evidence_id: Name | None = None


class Constraints(Body):
    """What a recommendation may change."""

    allow: list[Name] | None = Field(
        default=None, max_length=100, description="Families of changes; null = the harmless"
    )
    max_recommendations: Annotated[int, Field(ge=1, le=20), BeforeValidator(_whole_number)] = 5


class EstimateBody(Body):
    """Body of POST /estimate."""

    job: Job
    cluster: Cluster
    stack: dict[Name, Name] = Field(default_factory=dict, max_length=100, description="Versions of the software stack")
    min_fit_probability: Probability = 0.99
    pipeline_rank: Annotated[int, Field(ge=0, le=1_000_000), BeforeValidator(_whole_number)] | None = None
    survival: StrictBool = True
    timeline: StrictBool = Field(default=False, description="Also the course of memory over the step, for a plot")

    def to_request(self) -> EstimateRequest:
        return EstimateRequest(
            job=self.job.to_request(),
            cluster=self.cluster.to_request(),
            stack=self.stack,
            min_fit_probability=self.min_fit_probability,
            pipeline_rank=self.pipeline_rank,
            survival=self.survival,
            timeline=self.timeline,
        )


class RecommendBody(Body):
    """Body of POST /recommend. A job that says neither recipe nor config is taken from the evidence."""

    job: Job
    cluster: Cluster
    stack: dict[Name, Name] = Field(default_factory=dict, max_length=100, description="Versions of the software stack")
    min_fit_probability: Probability = 0.99
    evidence: Evidence = Field(default_factory=Evidence)
    constraints: Constraints = Field(default_factory=Constraints)

    def to_request(self, evidence: Any = None) -> RecommendRequest:
        """``evidence``: what ``self.evidence`` refers to, as the service read it."""
        allow = self.constraints.allow
        return RecommendRequest(
            job=self.job.to_request(),
            cluster=self.cluster.to_request(),
            stack=self.stack,
            min_fit_probability=self.min_fit_probability,
            evidence=evidence,
            allow=None if allow is None else tuple(allow),
            max_recommendations=self.constraints.max_recommendations,
        )


class DiagnoseBody(Body):
    """Body of POST /diagnose: a pasted text, an upload, or both; job and cluster where they are known."""

    log: Text | None = Field(default=None, description="An out-of-memory text, a log, run_config.yaml")
    evidence_id: Name | None = Field(default=None, description="An upload of POST /evidence")
    job: Job | None = None
    cluster: Cluster | None = None
    stack: dict[Name, Name] = Field(default_factory=dict, max_length=100, description="Versions of the software stack")


Size = Annotated[int, Field(ge=0, le=MAX_BYTES), BeforeValidator(_whole_number)]


class Phase(Body):
    """Memory of one phase of a step (the closed list of the estimate, and "wrap")."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: Name
    allocated_bytes: Size
    peak_allocated_bytes: Size
    peak_reserved_bytes: Size | None = None


class Measured(Body):
    """What was measured on one rank, over the whole life of the process."""

    peak_allocated_bytes: Bytes | None = None
    persistent_bytes: Bytes | None = None
    peak_reserved_bytes: Bytes | None = None
    device_used_bytes: Bytes | None = None
    survival_bytes: Bytes | None = Field(default=None, description="Smallest allocator cap in which it ran, bisected")
    step_time_seconds: Annotated[float, Field(gt=0, le=1e6), BeforeValidator(_number)] | None = None
    num_alloc_retries: Annotated[int, Field(ge=0, le=2**40), BeforeValidator(_whole_number)] | None = None


class Run(Body):
    """One measured run of one rank."""

    run_id: Name
    source: Literal["profiler", "log", "snapshot", "feedback"] = "profiler"
    method: Literal["simulated", "real"] = "real"
    outcome: Literal["ok", "oom", "error"] = "ok"
    gpu: Name = Field(description="A name of GET /gpus, or an alias such as nvidia-smi's")
    world_size: Annotated[int, Field(ge=1, le=1_000_000), BeforeValidator(_whole_number)]
    rank: Annotated[int, Field(ge=0, le=1_000_000), BeforeValidator(_whole_number)] = 0
    allocator: Literal["default", "expandable_segments"] = "default"
    stack: dict[Name, Name] = Field(default_factory=dict, max_length=100)
    job: dict[str, Any] | None = Field(default=None, description="As POST /estimate takes it")
    profile: dict[str, Any] | None = Field(default=None, description="As the profiler writes it")
    measured: Measured = Field(default_factory=Measured)
    phases: list[Phase] = Field(default_factory=list, max_length=100)
    measured_at: Text | None = Field(default=None, max_length=40)
    error: Annotated[Text, Field(max_length=20_000)] | None = None


class RunsBody(Body):
    """Body of POST /runs: all are stored, or none."""

    runs: list[Run] = Field(min_length=1, max_length=10_000)


class CalibrateBody(Body):
    """Body of POST /calibrations: which stored runs to fit."""

    gpu: Name | None = Field(default=None, description="A name of GET /gpus: its family is calibrated")
    gpu_family: Name | None = Field(default=None, description="ampere, ada, hopper or blackwell, instead of gpu")
    stack: dict[Name, Name] = Field(default_factory=dict, max_length=100, description="Versions of the software stack")
    activate: StrictBool = Field(default=False, description="Answer with it from now on")


class OutcomeBody(Body):
    """Body of POST /recommendations/{id}/outcome."""

    rank: Annotated[int, Field(ge=0, le=20), BeforeValidator(_whole_number)] = Field(
        description="Which recommendation was tried; 0 = the job unchanged"
    )
    ran: StrictBool
    peak: Bytes | None = Field(default=None, description="torch.cuda.max_memory_allocated() of the worst rank")
    log: Annotated[Text, Field(max_length=1_000_000)] | None = None


class CapacityBody(Body):
    """Body of POST /capacity."""

    job: Job
    cluster: Cluster
    question: Name = Field(description="micro_batch_size | seq_length | num_gpus")
    stack: dict[Name, Name] = Field(default_factory=dict, max_length=100, description="Versions of the software stack")
    min_fit_probability: Probability = 0.99

    def to_request(self) -> EstimateRequest:
        return EstimateRequest(self.job.to_request(), self.cluster.to_request(), self.stack, self.min_fit_probability)


class Side(Body):
    """One of two jobs that are compared."""

    job: Job
    cluster: Cluster


class CompareBody(Body):
    """Body of POST /compare: from ``a`` to ``b``."""

    a: Side
    b: Side
    stack: dict[Name, Name] = Field(default_factory=dict, max_length=100, description="Versions of the software stack")
    min_fit_probability: Probability = 0.99

    def to_requests(self) -> tuple[EstimateRequest, EstimateRequest]:
        first, second = (
            EstimateRequest(side.job.to_request(), side.cluster.to_request(), self.stack, self.min_fit_probability)
            for side in (self.a, self.b)
        )
        return first, second
