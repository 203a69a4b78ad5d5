"""From a request to settings: document, Bridge's adjustments, broken rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from estimator.cluster import Cluster
from estimator.errors import FieldProblem, JobError
from estimator.imbalance import with_load_imbalance
from estimator.job import JobDocument, build_document, effective_document, read_settings, vocab_size
from estimator.job.effective import EffectiveJob
from estimator.job.settings import Settings, Stack
from estimator.requests import JobRequest
from estimator.rules import Problem, check_rules
from estimator.rules.layout import LAYOUT_RULES

LAYOUT_RULE_IDS = frozenset(rule.rule_id for rule in LAYOUT_RULES if rule.severity == "error")
"""A job that breaks one of these has no ranks to estimate."""


@dataclass(frozen=True, slots=True)
class ReadJob:
    """A job as read. Unless ``laid_out``, its ranks cannot exist on these GPUs (``problems`` say why)."""

    document: JobDocument
    effective: EffectiveJob
    settings: Settings
    laid_out: bool
    problems: tuple[Problem, ...]
    assumptions: tuple[str, ...]
    moe_load_imbalance: float | None = None
    """As asked for."""

    @property
    def errors(self) -> tuple[Problem, ...]:
        return tuple(p for p in self.problems if p.severity == "error")


def read_stack(given: Mapping[str, str]) -> Stack:
    """Pinned defaults, replaced by what is given; raises JobError for an unknown package."""
    known = {f.name for f in fields(Stack)}
    unknown = [name for name in given if name not in known]
    if unknown:
        raise JobError(
            [FieldProblem(f"stack.{name}", "unknown package", f"one of {', '.join(sorted(known))}") for name in unknown]
        )
    return replace(Stack(), **dict(given))


def read_job(request: JobRequest, cluster: Cluster, stack: Stack) -> ReadJob:
    """Raises JobError (cannot be read) or NotModelled (no memory model for it)."""
    document = build_document(
        recipe=request.recipe, module=request.module, config=request.config, overrides=list(request.overrides)
    )
    return read_values(document.values, document, cluster, stack, request.moe_load_imbalance)


def read_values(
    values: Mapping[str, Any],
    document: JobDocument,
    cluster: Cluster,
    stack: Stack,
    moe_load_imbalance: float | None = None,
) -> ReadJob:
    """Read a document that may differ from the one asked about (a candidate of the search)."""
    effective = effective_document(values, cluster.num_gpus, cluster.gpu.family)
    problems = check_rules(values, effective.values, cluster.num_gpus, cluster.gpu.family, stack)
    blocked = any(p.severity == "error" and p.rule_id in LAYOUT_RULE_IDS for p in problems)
    settings = with_load_imbalance(read_settings(effective.values, cluster.num_gpus, stack), moe_load_imbalance)
    return ReadJob(
        document=document,
        effective=effective,
        settings=settings,
        laid_out=not blocked,
        problems=problems,
        assumptions=(*document.notes, _vocabulary(effective.values)),
        moe_load_imbalance=moe_load_imbalance,
    )


def _vocabulary(effective: Mapping[str, Any]) -> str:
    """The vocabulary decides logits and embeddings, and Bridge may take it from the tokenizer instead of the model."""
    size, source = vocab_size(effective)
    return f"vocabulary of {size} ({source})"
