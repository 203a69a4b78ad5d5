"""What the result page shows of a stored answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.db.models import Recommendation
from app.schemas import EstimateBody, RecommendBody
from app.web.charts import bars, course_plot, pareto_plot
from app.web.whatif import WhatIf, what_if
from estimator.calibration import Calibration
from estimator.errors import EstimatorError
from estimator.requests import EstimateRequest

OUTCOMES = {
    "recommended": ("Does not fit", "bad"),
    "fits_already": ("Fits already", "good"),
    "nothing_fits": ("Nothing fits", "bad"),
    "not_gpu_memory": ("Not GPU memory", "warn"),
    "needs_input": ("Needs more input", "warn"),
}
FORMS = (("python", "Python"), ("cli", "Command line"), ("yaml", "YAML"))


def title_of(request: Mapping[str, Any]) -> str:
    """ "llama3_8b_pretrain_config on 2 x h100-80gb"."""
    job, cluster = request.get("job") or {}, request.get("cluster") or {}
    name = job.get("recipe") or ("a configuration" if job.get("config") else "a job from its log")
    more = len(job.get("overrides") or ())
    changes = f" with {more} change{'s' if more > 1 else ''}" if more else ""
    return f"{name}{changes} on {cluster.get('num_gpus')} x {cluster.get('gpu')}"


def context(
    row: Recommendation,
    query: Mapping[str, str],
    reports: Sequence[Mapping[str, Any]],
    address: str,
    calibrations: tuple[Calibration, ...] = (),
) -> dict[str, Any]:
    """Everything that result.html needs; ``calibrations``: that of the answer."""
    answer, request = row.result, row.request
    current = answer.get("current")
    estimated = current if current and current.get("required_bytes") else None
    usable = int(estimated["usable_bytes"]) if estimated else 0
    recommendations = answer.get("recommendations") or []
    rows = [("The job as it is", estimated)] if estimated else []
    rows += [(f"{r['rank']}. {r['title']}", r["estimate"]) for r in recommendations]
    headline, mood = OUTCOMES.get(str(answer["outcome"]), (str(answer["outcome"]), "warn"))
    return {
        "row": row,
        "answer": answer,
        "request": request,
        "title": title_of(request),
        "headline": headline,
        "mood": mood,
        "address": address.partition("?")[0],
        "current": estimated,
        "usable": usable,
        "bars": bars([(label, estimate) for label, estimate in rows if estimate], usable) if usable else [],
        "forms": [_forms(r["override"]) for r in recommendations],
        "course": _course(request, estimated),
        "pareto": pareto_plot(answer.get("alternatives") or [], usable) if usable else "",
        "reports": reports,
        "feedback": {},
        "feedback_error": "",
        **what_if_context(row, query, calibrations),
    }


def _forms(override: Mapping[str, Any]) -> list[dict[str, str]]:
    """The override's forms that say something, ready to copy."""
    found = [{"key": key, "title": title, "text": str(override[key])} for key, title in FORMS if override.get(key)]
    env = override.get("env") or {}
    lines = [f"unset {name}" if value is None else f"export {name}={value}" for name, value in env.items()]
    if lines:
        found.append({"key": "env", "title": "Environment", "text": "\n".join(lines)})
    for key, title in (("torchrun", "torchrun"), ("slurm", "Slurm")):
        if text := (override.get("launch") or {}).get(key):
            found.append({"key": key, "title": title, "text": str(text)})
    return found


def _course(request: Mapping[str, Any], estimated: Mapping[str, Any] | None) -> Any:
    """The plot of the job as it is; computed again from the stored request, which decides it entirely."""
    if estimated is None:
        return ""
    try:
        body = EstimateBody.model_validate(
            {name: request[name] for name in ("job", "cluster", "stack") if name in request}
        )
        asked: EstimateRequest = body.model_copy(update={"timeline": True, "survival": False}).to_request()
        from estimator.answers import estimate_answer

        points = estimate_answer(asked).get("timeline") or []
    except (EstimatorError, ValueError):
        return ""
    overhead = sum((estimated.get("overhead_bytes") or {}).values())
    room = max(0, int(estimated["usable_bytes"]) - overhead)
    return course_plot(points, room, "out of memory above this line")


def what_if_context(
    row: Recommendation, query: Mapping[str, str], calibrations: tuple[Calibration, ...] = ()
) -> dict[str, Any]:
    """The what-if section: the form, and bars where something was changed."""
    answer = row.result
    estimated = answer.get("current")
    if not estimated or not estimated.get("required_bytes"):
        return {"row": row, "what_if": None, "what_if_bars": []}
    try:
        found: WhatIf | None = what_if(RecommendBody.model_validate(row.request), query, calibrations)
    except (EstimatorError, ValueError):
        return {"row": row, "what_if": None, "what_if_bars": []}
    shown = [("The job as it is", estimated)]
    if found and found.estimate:
        shown.append(("With these settings", found.estimate))
    return {"row": row, "what_if": found, "what_if_bars": bars(shown, int(estimated["usable_bytes"]))}
