"""What the API answers, for the OpenAPI document and for clients. Answers may carry more keys and new enum values."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """Base: further keys are allowed."""

    model_config = ConfigDict(extra="allow")


class RuleProblem(Answer):
    rule_id: str
    fields: list[str]
    message: str
    fix: Any = None


class Survival(Answer):
    """Least reserved memory in which the step runs, by allocator setting; null where it was not asked for."""

    default: int | None
    expandable_segments: int | None


class Allocator(Answer):
    setting: str = Field(description="default | expandable_segments")
    source: str


class Phase(Answer):
    name: str
    allocated_bytes: int
    peak_bytes: int


class Rank(Answer):
    pipeline_rank: int
    peak_allocated_bytes: int
    required_bytes: int


class EstimateAnswer(Answer):
    """Memory of one training step on the worst rank, or on the one asked for.

    A job that cannot be laid out on these GPUs has its ``problems``, and null for every figure.
    """

    peak_allocated_bytes: int | None
    persistent_bytes: int | None
    resident_state_bytes: int | None
    peak_phase: str | None
    peak_pipeline_rank: int | None
    survival_bytes: Survival | None
    allocator: Allocator | None
    required_bytes: int | None
    usable_bytes: int | None
    fits: bool | None
    fit_probability: float | None
    intervals: dict[str, dict[str, list[int]]] | None = Field(
        default=None, description="Central intervals of peak and survival memory by coverage, in bytes"
    )
    phases: list[Phase]
    components_at_peak: dict[str, int] = Field(description="Adds up to peak_allocated_bytes")
    ranks: list[Rank]
    problems: list[RuleProblem]
    assumptions: list[str]
    moe: dict[str, Any] | None = Field(
        default=None,
        description="Experts on several ranks: the load imbalance assumed, and where the job stops fitting",
    )
    timeline: list[dict[str, Any]] | None = Field(default=None, description="Points in order, where asked for")
    estimator_version: str
    calibration_id: str | None
    schema_version: str


class ChangeAnswer(BaseModel):
    model_config = ConfigDict(extra="allow", populate_by_name=True)

    path: str
    from_: Any = Field(alias="from")
    to: Any
    why: str
    family: str


class Missing(Answer):
    path: str
    likely: Any = None


class Cause(Answer):
    cause: str
    confidence: Any
    evidence: Any


class Diagnosis(Answer):
    summary: str
    causes: list[Cause]


class Fact(Answer):
    name: str
    value: Any = Field(description="null = the text says that it is not known")
    line: int
    text: str


class DiagnoseAnswer(Answer):
    """Why a run failed: causes by confidence, with the lines that speak for them."""

    outcome: str = Field(description="gpu_memory | not_gpu_memory | needs_input")
    summary: str
    causes: list[Cause]
    failure: Any
    facts: list[Fact]
    prediction: list[Any] = Field(description="The estimate for that job, rank and phase beside what the text says")
    questions: list[str]
    missing: list[Missing]
    job: Any = Field(description="What the text says of the job, in the shape of a request")
    cluster: Any
    advice: Any
    notes: list[str]
    schema_version: str


class RunAnswer(Answer):
    """A measured run as it was sent, and what this version's estimate says of it."""

    run_id: str
    source: str
    method: str
    outcome: str
    gpu: str
    strategy: str | None
    world_size: int
    rank: int
    fingerprint: str
    stored_at: str
    recommendation_id: str | None
    measured: dict[str, Any] | None = None
    predicted: dict[str, Any] | None = None
    schema_version: str


class RunPage(BaseModel):
    items: list[RunAnswer]
    limit: int
    next_cursor: str | None
    schema_version: str


class RunsStored(BaseModel):
    stored: int
    unchanged: int = Field(description="Runs that were there already, with the same content")
    schema_version: str


class OutcomeAnswer(Answer):
    run_id: str
    stored: bool
    outcome: str
    measured_peak_bytes: int | None
    predicted_peak_bytes: int | None
    relative_error: float | None
    schema_version: str


class OutcomeList(BaseModel):
    items: list[dict[str, Any]]
    schema_version: str


class CapacityAnswer(Answer):
    """The border: the largest that fits (or the fewest GPUs), and what was tried on both sides of it."""

    question: str
    value: int | None
    current_value: int
    estimate: EstimateAnswer | None
    tried: list[dict[str, Any]]
    summary: str
    schema_version: str


class CompareAnswer(Answer):
    """From a to b: differences by phase, component and field."""

    a: EstimateAnswer
    b: EstimateAnswer
    difference_bytes: int
    phases: list[dict[str, Any]]
    components: list[dict[str, Any]]
    fields: list[dict[str, Any]] = Field(description="What the peak of a changes by when only this is taken from b")
    summary: str
    schema_version: str


class EvidenceAnswer(Answer):
    evidence_id: str
    kind: str = Field(description="text | snapshot")
    size_bytes: int
    expires_at: str
    schema_version: str


class OverrideAnswer(Answer):
    """The same changes in each form; a form that cannot say them is null, with the reason beside it."""

    python: str | None
    cli: Any
    yaml: str | None
    env: dict[str, str | None] = Field(description="null = unset")
    launch: dict[str, Any]
    harness: Any = None


class Caution(Answer):
    id: str
    text: str


class Checkpoint(Answer):
    format: str | None
    conversion_needed: bool
    text: str


class Verify(Answer):
    commands: list[str]
    criteria: list[str]


class Recommended(Answer):
    rank: int
    title: str
    changes: list[ChangeAnswer]
    override: OverrideAnswer
    estimate: EstimateAnswer
    fit_probability: float
    headroom_bytes: int
    relative_step_time: float | None
    warnings: list[Caution]
    checkpoint: Checkpoint
    verify: Verify


class RecommendAnswer(Answer):
    """Why the job does not fit, and what fits, cheapest first."""

    id: str
    created_at: str
    outcome: str = Field(description="recommended | fits_already | nothing_fits | not_gpu_memory | needs_input")
    current: EstimateAnswer | None
    problems: list[RuleProblem]
    missing: list[Missing]
    diagnosis: Diagnosis
    recommendations: list[Recommended]
    alternatives: list[Any]
    schema_version: str


class RecipeRow(Answer):
    name: str
    aliases: list[str]
    module: str
    kind: str
    task: str
    num_gpus: int | None
    gpu: str | None
    summary: dict[str, Any]


class RecipePage(BaseModel):
    items: list[RecipeRow]
    total: int
    limit: int
    offset: int
    next_offset: int | None
    schema_version: str


class RecipeAnswer(RecipeRow):
    document: dict[str, Any] = Field(description="The ConfigContainer document that the recipe builds")
    schema_version: str


class GpuRow(Answer):
    name: str
    aliases: list[str]
    family: str
    total_bytes: int
    source: str


class GpuList(BaseModel):
    items: list[GpuRow]
    schema_version: str


class Health(BaseModel):
    status: str


class Version(BaseModel):
    version: str
    estimator_version: str
    schema_version: str
    database_revision: str


class CalibrationBrief(Answer):
    calibration_id: str
    created_at: str
    stack: str
    gpu_family: str
    active: bool
    provenance: dict[str, Any]
    coverage: dict[str, Any] = Field(description="Held-out coverage and median width by level; null: too few runs")
    held_out: dict[str, Any] | None = Field(description="Errors of the peak before and after, models held out")
    structural: list[str] = Field(description="What looks like a fault of the model")


class CalibrationPage(BaseModel):
    items: list[CalibrationBrief]
    limit: int
    next_cursor: str | None
    schema_version: str


class CalibrationAnswer(CalibrationBrief):
    """One immutable version."""

    coefficients: list[dict[str, Any]] = Field(description="Relative correction by component, and its uncertainty")
    unaccounted: dict[str, Any]
    overhead: dict[str, Any]
    errors: dict[str, Any] = Field(description="Quantiles of the relative error at ``levels``, by group")
    outliers: list[dict[str, Any]]
    schema_version: str


class CalibrationRuns(BaseModel):
    run_ids: list[str]
    schema_version: str
