"""The start form: what was typed, what evidence adds to it, and the request that it makes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from app.problems import Problem, of_validation_error
from app.schemas import RecommendBody
from estimator.errors import FieldProblem

MAX_TEXT = 2_000_000
FIELDS = ("recipe", "gpu", "num_gpus", "overrides", "log", "evidence_id", "evidence_name", "config")

FIELD_OF_PATH = {
    "job.recipe": "recipe",
    "job.module": "recipe",
    "job.overrides": "overrides",
    "job.config": "config",
    "cluster.gpu": "gpu",
    "cluster.num_gpus": "num_gpus",
    "cluster": "num_gpus",
    "evidence": "log",
    "evidence_id": "log",
}


@dataclass(frozen=True, slots=True)
class StartForm:
    """Values as typed, errors by field, and what was filled in from evidence."""

    recipe: str = ""
    gpu: str = ""
    num_gpus: str = ""
    overrides: str = ""
    log: str = ""
    evidence_id: str = ""
    evidence_name: str = ""
    config: str = ""
    errors: Mapping[str, str] = field(default_factory=dict)
    filled: frozenset[str] = frozenset()
    """Fields whose value was read in the evidence."""
    missing: tuple[str, ...] = ()
    general: tuple[str, ...] = ()
    """Errors that belong to no field."""


def from_values(values: Mapping[str, Any]) -> StartForm:
    """What was typed, cut to what a form may hold."""
    recipe, gpu, num_gpus, overrides, log, evidence_id, evidence_name, config = (
        str(values.get(name) or "")[:MAX_TEXT] for name in FIELDS
    )
    return StartForm(recipe, gpu, num_gpus, overrides, log, evidence_id, evidence_name, config)


def override_list(text: str) -> list[str]:
    """Each line is one override; lines of Python that belong together stay one text."""
    lines = [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
    if any(line.lstrip().startswith(("cfg.", "import ", "from ", "del ")) for line in lines):
        return ["\n".join(lines)]
    return [line.strip() for line in lines]


def request_of(form: StartForm) -> RecommendBody | StartForm:
    """The request, or the form with an error beside each field that is wrong."""
    errors: dict[str, str] = {}
    if not form.recipe and not form.config and not (form.log or form.evidence_id):
        errors["recipe"] = "Name a recipe, or give a configuration or a log that tells the job."
    if not form.gpu:
        errors["gpu"] = "Say which GPU: for example h100-80gb."
    count = form.num_gpus.strip()
    if not count.isascii() or not count.isdigit():
        errors["num_gpus"] = "A whole number is needed: how many GPUs the whole job has."
    config = None
    if form.config.strip():
        try:
            config = json.loads(form.config)
        except ValueError as error:
            errors["config"] = f"This is not JSON: {error}"
    if errors:
        return replace(form, errors=errors)
    document = {
        "job": {"recipe": form.recipe.strip() or None, "config": config, "overrides": override_list(form.overrides)},
        "cluster": {"gpu": form.gpu.strip(), "num_gpus": int(count[:12])},
        "evidence": {"log": form.log or None, "evidence_id": form.evidence_id or None},
    }
    try:
        return RecommendBody.model_validate(document)
    except ValidationError as error:
        return with_problem(form, of_validation_error(error, RecommendBody))


def with_problem(form: StartForm, problem: Problem) -> StartForm:
    """The form with a problem of the request shown beside its fields."""
    errors: dict[str, str] = {}
    general: list[str] = []
    for error in problem.errors or (FieldProblem("", problem.detail),):
        text = _sentence(error)
        name = None if problem.slug == "not-modelled" else _field_of(error.path)
        if name is None:
            general.append(f"{error.path.removeprefix('job.config.')}: {text}" if error.path else text)
        elif name not in errors:
            errors[name] = text
        else:
            errors[name] += " " + text
    return replace(form, errors=errors, general=tuple(general))


def _sentence(error: FieldProblem) -> str:
    text = error.message[:1].upper() + error.message[1:]
    text += "" if text.endswith((".", "?", "!")) else "."
    return f"{text} {error.suggestion}" if error.suggestion else text


def _field_of(path: str) -> str | None:
    trimmed = path.partition("[")[0]
    while trimmed:
        if trimmed in FIELD_OF_PATH:
            return FIELD_OF_PATH[trimmed]
        trimmed = trimmed.rpartition(".")[0]
    return None


def filled_from(form: StartForm, answer: Mapping[str, Any]) -> StartForm:
    """What evidence says goes into the fields that are empty; what was typed stays."""
    job = answer.get("job") or {}
    cluster = answer.get("cluster") or answer.get("known_of_cluster") or {}
    config = job.get("config")
    found = {
        "recipe": str(job.get("recipe") or ""),
        "overrides": "\n".join(str(item) for item in job.get("overrides") or ()),
        "config": json.dumps(config, indent=1, default=str) if config else "",
        "gpu": str(cluster.get("gpu") or ""),
        "num_gpus": str(cluster.get("num_gpus") or ""),
    }
    new = frozenset(name for name, value in found.items() if value and not getattr(form, name))
    return replace(
        form,
        recipe=form.recipe or found["recipe"],
        overrides=form.overrides or found["overrides"],
        config=form.config or found["config"],
        gpu=form.gpu or found["gpu"],
        num_gpus=form.num_gpus or found["num_gpus"],
        filled=new,
        missing=tuple(_missing(row) for row in answer.get("missing") or ()),
    )


def _missing(row: Mapping[str, Any]) -> str:
    likely = row.get("likely")
    return str(row["path"]) + ("" if likely is None else f" (likely {likely})")
