"""The answers of ``POST /estimate`` and ``POST /recommend``, as plain data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from estimator import ESTIMATOR_VERSION, SCHEMA_VERSION, words
from estimator.changes import FAMILIES
from estimator.cluster import Cluster, resolve_cluster
from estimator.course import course
from estimator.diagnose import Diagnosis, diagnose
from estimator.errors import FieldProblem, JobError
from estimator.estimate import SCALED, Estimate, estimate
from estimator.imbalance import LOAD_IMBALANCE_INTERVAL, stops_fitting_at
from estimator.job.settings import Settings, Stack
from estimator.reading import ReadJob, read_job, read_stack
from estimator.render import advise, render_override
from estimator.requests import EstimateRequest, JobRequest, RecommendRequest
from estimator.search import DEFAULT_FAMILIES, Candidate, SearchResult, search
from estimator.search.space import current_point
from estimator.step import steady_peak, step_timeline
from estimator.survival import SETTINGS

MAX_RECOMMENDATIONS = 20
MAX_GPU_FACTOR = 64
"""How far "what would fit" looks: this many times the GPUs."""


def estimate_answer(request: EstimateRequest) -> dict[str, Any]:
    """Raises JobError (unreadable) or NotModelled. A job that cannot be laid out has ``problems`` and nulls."""
    _check_probability(request.min_fit_probability)
    cluster = resolve_cluster(request.cluster)
    job = read_job(request.job, cluster, read_stack(request.stack))
    if not job.laid_out:
        return {**_unestimated(), "problems": [p.as_dict() for p in job.problems], "assumptions": list(job.assumptions)}
    ratios = None if request.survival else dict.fromkeys(SETTINGS, 1.0)
    result = estimate(job.settings, cluster, request.min_fit_probability, request.pipeline_rank, survival_ratios=ratios)
    answer = {**result.as_dict(), "problems": [p.as_dict() for p in job.problems]}
    if not request.survival:
        answer |= _lower_bound(result)
    answer |= _imbalance(result, request.min_fit_probability)
    if request.timeline:
        answer["timeline"] = course_answer(job, cluster, result)
    answer["assumptions"] = [*answer["assumptions"], *job.assumptions]
    return answer


def _imbalance(result: Estimate, min_probability: float) -> dict[str, Any]:
    """Of experts on several ranks: what was assumed of their load, and from which imbalance on the job does not fit.

    Nothing for other jobs. The worst rank alone is looked at, its survival memory in the same ratio to the peak.
    """
    settings = result.settings
    if settings.model.moe is None or settings.parallel.expert_model_parallel_size == 1:
        return {}

    def fits(trial: Settings) -> bool:
        peak = steady_peak(trial, result.rank.pipeline_rank, result.cluster.gpu.family)
        return result.verdict_at(int(peak * result.survival_ratios[result.allocator_setting]), min_probability).fits

    return {
        "moe": {
            "load_imbalance": settings.moe_load_imbalance,
            "interval": list(LOAD_IMBALANCE_INTERVAL),
            "stops_fitting_at": stops_fitting_at(settings, fits),
        }
    }


def course_answer(job: ReadJob, cluster: Cluster, result: Estimate) -> list[dict[str, Any]]:
    """Points of the rank that the figures are about."""
    step = step_timeline(job.settings, result.rank.pipeline_rank, cluster.gpu.family)
    return course(step.timeline, result.allocator_setting)


def _lower_bound(result: Estimate) -> dict[str, Any]:
    """Without a simulated allocator the peak is all that is known: enough to say that a job does not fit."""
    note = "survival memory was not asked for: required_bytes is the allocated peak plus overheads, a lower bound"
    return {
        "survival_bytes": None,
        "fits": None if result.verdict.fits else False,
        "fit_probability": None,
        "headroom_bytes": None,
        "assumptions": [note, *(a for a in result.assumptions() if not a.startswith(SCALED))],
    }


def recommend_answer(request: RecommendRequest) -> dict[str, Any]:
    """The answer without its ``id``, which whoever stores it adds. Raises JobError or NotModelled."""
    _check_probability(request.min_fit_probability)
    allow = _families(request.allow)
    wanted = _bounded("constraints.max_recommendations", request.max_recommendations, 1, MAX_RECOMMENDATIONS)
    cluster = resolve_cluster(request.cluster)
    stack = read_stack(request.stack)
    seen = _diagnosis(request)
    if seen is not None and (seen.outcome == "not_gpu_memory" or _says_nothing(request.job)):
        if seen.outcome == "not_gpu_memory" or seen.proposal.job is None:
            return _without_a_job(seen)
        request = replace(request, job=seen.proposal.job)
    job = read_job(request.job, cluster, stack)
    answer = _empty_answer(job)
    answer["calibration_id"] = cluster.calibration(stack).calibration_id
    current = estimate(job.settings, cluster, request.min_fit_probability) if job.laid_out else None
    prefer = seen.advice.families_first if seen is not None else ()
    if current is not None:
        answer["current"] = {**current.as_dict(), "problems": answer["problems"]}
        answer["current"] |= _imbalance(current, request.min_fit_probability)
        if current.verdict.fits and not job.errors:
            _fits_already(answer, current)
            if seen is not None and seen.outcome == "gpu_memory":
                if seen.advice.search and prefer:
                    found = search(job, cluster, stack, allow, request.min_fit_probability, wanted, prefer)
                    answer["recommendations"] = _recommendations(found, job, cluster, stack)
                answer["diagnosis"] = _seen(seen, words.fits_but_failed(current))
            return answer
    found = search(job, cluster, stack, allow, request.min_fit_probability, wanted, prefer)
    if not found.fitting:
        if current is None:
            return _cannot_lay_out(answer, job)
        _nothing_fits(answer, current, found, job, request, stack, allow)
        if seen is not None and seen.outcome == "gpu_memory":
            answer["diagnosis"] = _seen(seen, answer["diagnosis"]["summary"])
        return answer
    answer["outcome"] = "recommended"
    answer["recommendations"] = _recommendations(found, job, cluster, stack)
    sentences = [words.current_sentence(current)] if current is not None else []
    sentences += [p.message for p in job.errors[:1]]
    sentences.append(words.recommendation_sentences(found.fitting))
    answer["diagnosis"]["summary"] = " ".join(sentences)
    answer["diagnosis"]["causes"] = _causes(current, job)
    answer["search"] = _search_facts(found)
    answer["alternatives"] = _alternatives(found, job)
    if not found.exhausted:
        answer["assumptions"].append("the search ended before every candidate was looked at: a cheaper one may exist")
    if seen is not None and seen.outcome == "gpu_memory":
        answer["diagnosis"] = _seen(seen, answer["diagnosis"]["summary"])
    return answer


def _diagnosis(request: RecommendRequest) -> Diagnosis | None:
    """What the evidence says about the job that is asked about, or about its own."""
    if request.evidence is None:
        return None
    job = None if _says_nothing(request.job) else request.job
    return diagnose(request.evidence, job, request.cluster, request.stack)


def _says_nothing(job: JobRequest) -> bool:
    return not (job.recipe or job.config)


def _without_a_job(seen: Diagnosis) -> dict[str, Any]:
    """No setting of the GPU helps, or the evidence does not tell enough of the job: no estimate, no recommendation."""
    needs_input = seen.outcome != "not_gpu_memory"
    return {
        **_blank(),
        "outcome": "needs_input" if needs_input else "not_gpu_memory",
        "missing": [m.as_dict() for m in seen.missing] if needs_input else [],
        "diagnosis": _seen(seen, ""),
        "assumptions": list(seen.proposal.notes),
    }


def _seen(seen: Diagnosis, more: str) -> dict[str, Any]:
    """The diagnosis of the evidence, then what the estimate adds."""
    return {
        **seen.brief(),
        "summary": " ".join(part for part in (seen.summary, *seen.advice.actions[:1], more) if part),
        "advice": seen.advice.as_dict(),
        "questions": list(seen.questions),
        "failure": seen.evidence.first.as_dict() if seen.evidence.first else None,
    }


def _recommendations(found: SearchResult, job: ReadJob, cluster: Cluster, stack: Stack) -> list[dict[str, Any]]:
    return [_recommendation(rank, candidate, job, cluster, stack) for rank, candidate in enumerate(found.fitting, 1)]


def _alternatives(found: SearchResult, job: ReadJob) -> list[dict[str, Any]]:
    """The Pareto front, for a plot: memory against step time."""
    now = current_point(job.settings)
    return [
        {
            "title": words.point_title(front.point, now),
            "required_bytes": front.need_bytes,
            "relative_step_time": round(front.relative_step_time, 4),
            "fits": front.fits,
        }
        for front in found.front
    ]


def _empty_answer(job: ReadJob) -> dict[str, Any]:
    return {
        **_blank(),
        "problems": [p.as_dict() for p in job.problems],
        "assumptions": list(job.assumptions),
    }


def _blank() -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "estimator_version": ESTIMATOR_VERSION,
        "calibration_id": None,
        "outcome": "needs_input",
        "current": None,
        "problems": [],
        "missing": [],
        "diagnosis": {"summary": "", "causes": []},
        "recommendations": [],
        "alternatives": [],
        "assumptions": [],
    }


def _cannot_lay_out(answer: dict[str, Any], job: ReadJob) -> dict[str, Any]:
    """Sizes that do not divide: memory cannot be discussed before that is mended."""
    answer["missing"] = [
        {"path": field, "likely": problem.fix} for problem in job.errors for field in problem.fields[:1]
    ]
    answer["diagnosis"]["summary"] = "The job cannot be laid out on these GPUs. " + " ".join(
        f"{p.message} {p.fix}" for p in job.errors[:3]
    )
    return answer


def _fits_already(answer: dict[str, Any], current: Estimate) -> None:
    answer["outcome"] = "fits_already"
    answer["diagnosis"]["summary"] = (
        f"{words.current_sentence(current)} That fits (probability {words.chance(current.verdict.probability)}), so an "
        "out-of-memory error must have another cause. Look for another process on the card, a longer sequence or "
        "larger batch than configured, memory outside the allocator, evaluation or a checkpoint being saved."
    )


def _nothing_fits(
    answer: dict[str, Any],
    current: Estimate,
    found: SearchResult,
    job: ReadJob,
    request: RecommendRequest,
    stack: Stack,
    allow: frozenset[str],
) -> None:
    answer["outcome"] = "nothing_fits"
    answer["search"] = _search_facts(found)
    room = current.cluster.usable_bytes
    closest = found.closest_bytes or current.required_bytes()
    would = _gpus_that_fit(request, stack, allow)
    answer["nothing_fits"] = {
        "closest_required_bytes": closest,
        "missing_bytes": max(0, closest - room),
        "num_gpus_that_fit": would,
    }
    by = (
        f"The closest of {found.num_candidates} combinations still lacks at least {words.gib(max(0, closest - room))}. "
    )
    what = (
        f"{would} GPUs of this kind would do."
        if would
        else f"Not even {MAX_GPU_FACTOR} times the GPUs would do: shorten the sequence or take a card with more memory."
    )
    answer["diagnosis"]["summary"] = f"{words.current_sentence(current)} Nothing fits. {by}{what}"
    answer["diagnosis"]["causes"] = _causes(current, job)


def _gpus_that_fit(request: RecommendRequest, stack: Stack, allow: frozenset[str]) -> int | None:
    """The smallest power-of-two multiple of the GPUs with which some candidate fits."""
    factor = 2
    while factor <= MAX_GPU_FACTOR:
        num_gpus = request.cluster.num_gpus * factor
        cluster = resolve_cluster(
            replace(request.cluster, num_gpus=num_gpus, gpus_per_node=request.cluster.gpus_per_node)
        )
        job = read_job(request.job, cluster, stack)
        unchanged = job.laid_out and not job.errors
        if unchanged and estimate(job.settings, cluster, request.min_fit_probability).verdict.fits:
            return num_gpus
        if search(job, cluster, stack, allow, request.min_fit_probability, 1).fitting:
            return num_gpus
        factor *= 2
    return None


def _recommendation(rank: int, candidate: Candidate, job: ReadJob, cluster: Cluster, stack: Stack) -> dict[str, Any]:
    values = job.document.values
    override = render_override(candidate.changes, values, cluster, stack)
    advice = advise(candidate.changes, values, job.effective.values, candidate.job.effective.values, stack)
    return {
        "rank": rank,
        "title": words.title(candidate),
        "changes": [change.as_dict() for change in candidate.changes],
        "override": override.as_dict(),
        "estimate": {**candidate.estimate.as_dict(), "problems": [p.as_dict() for p in candidate.job.problems]},
        "fit_probability": round(candidate.estimate.verdict.probability, 6),
        "headroom_bytes": candidate.estimate.verdict.headroom_bytes,
        "relative_step_time": round(candidate.relative_step_time, 4),
        "cost_terms": candidate.cost_terms,
        **advice.as_dict(),
    }


def _causes(current: Estimate | None, job: ReadJob) -> list[dict[str, Any]]:
    """The components that fill the card, by share of the peak; broken rules before them."""
    causes = [{"cause": f"rule {p.rule_id}", "confidence": 1.0, "evidence": p.message} for p in job.errors]
    if current is None:
        return causes
    peak = current.rank.peak.peak_bytes
    largest = sorted(current.rank.components_at_peak.items(), key=lambda item: -item[1])[:3]
    return causes + [
        {"cause": name, "confidence": round(n / peak, 3), "evidence": f"{words.gib(n)} of the {words.gib(peak)} peak"}
        for name, n in largest
    ]


def _search_facts(found: SearchResult) -> dict[str, Any]:
    return {"candidates": found.num_candidates, "estimated": found.num_estimated, "exhausted": found.exhausted}


def _unestimated() -> dict[str, Any]:
    names = (
        "peak_allocated_bytes persistent_bytes resident_state_bytes peak_phase peak_pipeline_rank survival_bytes "
        "allocator required_bytes usable_bytes fits fit_probability headroom_bytes"
    )
    return {
        "schema_version": SCHEMA_VERSION,
        "estimator_version": ESTIMATOR_VERSION,
        "calibration_id": None,
        **dict.fromkeys(names.split()),
        "phases": [],
        "components_at_peak": {},
        "ranks": [],
    }


def _families(allow: tuple[str, ...] | None) -> frozenset[str]:
    if allow is None:
        return DEFAULT_FAMILIES
    unknown = [name for name in allow if name not in FAMILIES]
    if unknown:
        raise JobError(
            [FieldProblem("constraints.allow", f"unknown family {unknown[0]!r}", f"one of {', '.join(FAMILIES)}")]
        )
    return frozenset(allow)


def _check_probability(value: float) -> None:
    if not 0.5 <= value < 1:
        raise JobError([FieldProblem("min_fit_probability", f"{value} is not possible", "from 0.5 to below 1")])


def _bounded(path: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise JobError([FieldProblem(path, f"{value} is not possible", f"{least} to {most}")])
    return value


__all__ = ["estimate_answer", "recommend_answer"]
