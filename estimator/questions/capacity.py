"""How much fits: the largest micro batch or sequence length, the fewest GPUs, everything else as it is.

Memory grows with each of the first two and falls with the number of data-parallel ranks, so that the border is found by
doubling and halving; both sides of it are estimated in full and shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from estimator import ESTIMATOR_VERSION, SCHEMA_VERSION
from estimator.cluster import resolve_cluster
from estimator.errors import FieldProblem, JobError, NotModelled
from estimator.estimate import Estimate, estimate
from estimator.job.settings import Settings
from estimator.reading import ReadJob, read_job, read_stack
from estimator.requests import EstimateRequest

CAPACITY_QUESTIONS = ("micro_batch_size", "seq_length", "num_gpus")
MAX_SEQ_LENGTH = 1 << 22
MAX_GPUS = 16_384
SEQUENCE_STEP = 256


@dataclass(frozen=True, slots=True)
class Tried:
    """One value, and what became of it."""

    value: int
    estimate: Estimate | None
    refused: str | None = None

    @property
    def fits(self) -> bool:
        return self.estimate is not None and self.estimate.verdict.fits

    def as_dict(self) -> dict[str, Any]:
        if self.estimate is None:
            return {"value": self.value, "fits": False, "refused": self.refused}
        verdict = self.estimate.verdict
        return {
            "value": self.value,
            "fits": verdict.fits,
            "fit_probability": round(verdict.probability, 6),
            "required_bytes": self.estimate.required_bytes(),
            "headroom_bytes": verdict.headroom_bytes,
        }


def capacity_answer(request: EstimateRequest, question: str) -> dict[str, Any]:
    """The border for one of CAPACITY_QUESTIONS. Raises JobError, NotModelled as an estimate does."""
    if question not in CAPACITY_QUESTIONS:
        message = f"unknown question {question[:40]!r}"
        raise JobError([FieldProblem("question", message, f"one of {', '.join(CAPACITY_QUESTIONS)}")])
    job = _read(request)
    if not job.laid_out:
        raise JobError([FieldProblem(f"job.config.{p.fields[0]}", p.message, p.fix) for p in job.errors[:5]])
    values = {"micro_batch_size": _micro_batches, "seq_length": _sequences, "num_gpus": _gpu_counts}[question](
        job.settings
    )
    ask = _asker(request, question)
    now = {
        "micro_batch_size": job.settings.batch.micro_batch_size,
        "seq_length": job.settings.model.seq_length,
        "num_gpus": request.cluster.num_gpus,
    }[question]
    tried = _fewest(values, ask) if question == "num_gpus" else _largest(values, ask)
    fitting = [t for t in tried if t.fits]
    best = (min if question == "num_gpus" else max)(fitting, key=lambda t: t.value, default=None)
    return {
        "question": question,
        "value": best.value if best else None,
        "current_value": now,
        "estimate": {**best.estimate.as_dict(), "problems": []} if best and best.estimate else None,
        "tried": [t.as_dict() for t in sorted(tried, key=lambda t: t.value)],
        "summary": _summary(question, best, tried, now),
        "assumptions": list(job.assumptions),
        "estimator_version": ESTIMATOR_VERSION,
        "schema_version": SCHEMA_VERSION,
    }


def _read(request: EstimateRequest) -> ReadJob:
    return read_job(request.job, resolve_cluster(request.cluster), read_stack(request.stack))


def _asker(request: EstimateRequest, question: str) -> Callable[[int], Tried]:
    def ask(value: int) -> Tried:
        changed = request
        if question == "num_gpus":
            changed = replace(request, cluster=replace(request.cluster, num_gpus=value))
        else:
            more = [f"train.micro_batch_size={value}"]
            if question == "seq_length":
                more = [f"model.seq_length={value}", f"dataset.seq_length={value}"]
            job = replace(request.job, overrides=(*request.job.overrides, *more))
            changed = replace(request, job=job)
        try:
            job_read = _read(changed)
        except (JobError, NotModelled) as error:
            return Tried(value, None, str(error)[:300])
        if job_read.errors or not job_read.laid_out:
            return Tried(value, None, " ".join(p.message for p in job_read.errors[:2]))
        cluster = resolve_cluster(changed.cluster)
        return Tried(
            value, estimate(job_read.settings, cluster, request.min_fit_probability, exact_ranks=1, both_settings=False)
        )

    return ask


def _micro_batches(settings: Settings) -> list[int]:
    """Sizes with which the global batch still divides."""
    share = settings.batch.global_batch_size // settings.parallel.data_parallel_size
    return [b for b in range(1, min(share, 4096) + 1) if share % b == 0]


def _sequences(settings: Settings) -> list[int]:
    """Multiples that context and tensor parallelism can split."""
    parallel = settings.parallel
    step = SEQUENCE_STEP
    unit = 2 * parallel.context_parallel_size * parallel.tensor_model_parallel_size
    while step % unit:
        step += SEQUENCE_STEP
    return list(range(step, MAX_SEQ_LENGTH + 1, step))


def _gpu_counts(settings: Settings) -> list[int]:
    """Counts with which the global batch divides, model parallelism as it is."""
    parallel, batch = settings.parallel, settings.batch
    width = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    microbatches = batch.global_batch_size // batch.micro_batch_size
    counts = [width * d for d in range(1, MAX_GPUS // width + 1) if microbatches % d == 0]
    return counts or [parallel.world_size]


def _largest(values: Sequence[int], ask: Callable[[int], Tried]) -> list[Tried]:
    """Doubles until something does not fit, then halves the stretch between."""
    tried = {0: ask(values[0])}
    if not tried[0].fits:
        return list(tried.values())
    low, step = 0, 1
    high = len(values)
    while low + step < len(values):
        at = low + step
        tried[at] = ask(values[at])
        if not tried[at].fits:
            high = at
            break
        low, step = at, step * 2
    else:
        at = len(values) - 1
        tried.setdefault(at, ask(values[at]))
        if tried[at].fits:
            return list(tried.values())
        high = at
    while high - low > 1:
        at = (low + high) // 2
        tried[at] = ask(values[at])
        low, high = (at, high) if tried[at].fits else (low, at)
    return list(tried.values())


def _fewest(values: Sequence[int], ask: Callable[[int], Tried]) -> list[Tried]:
    """Halves between a count that does not fit and the largest, which may."""
    top = len(values) - 1
    tried = {top: ask(values[top])}
    if not tried[top].fits:
        return list(tried.values())
    low, high = -1, top
    while high - low > 1:
        at = (low + high) // 2
        tried[at] = ask(values[at])
        low, high = (low, at) if tried[at].fits else (at, high)
    return list(tried.values())


_WORDS = {
    "micro_batch_size": ("The largest micro batch that fits is {}", "Not even a micro batch of {} fits"),
    "seq_length": ("The longest sequence that fits is {}", "Not even a sequence of {} fits"),
    "num_gpus": ("The fewest GPUs with which the job fits are {}", "Not even {} GPUs of this kind suffice"),
}


def _summary(question: str, best: Tried | None, tried: Sequence[Tried], now: int) -> str:
    yes, no = _WORDS[question]
    if best is None:
        return no.format(tried[0].value) + ", with everything else as it is."
    beyond = [t for t in tried if not t.fits and (t.value < best.value) == (question == "num_gpus")]
    if not beyond:
        return f"{yes.format(best.value)}: nothing beyond it was tried. The job has {now}."
    nearest = (max if question == "num_gpus" else min)(beyond, key=lambda t: t.value)
    if nearest.estimate is None:
        return f"{yes.format(best.value)}; {nearest.value} is refused: {nearest.refused}. The job has {now}."
    over = -nearest.estimate.verdict.headroom_bytes / (1 << 30)
    gap = f"lacks {over:.1f} GiB" if over > 0 else "is too close to the limit"
    return f"{yes.format(best.value)}; {nearest.value} {gap}. The job has {now}."
