"""Errors for a person: what, where, what would be right; and exit codes for scripts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from typer import Exit

from app.problems import KINDS, Problem, of_estimator_error
from estimator.errors import EstimatorError

BAD_INPUT, NOT_MODELLED, FAULT = 2, 3, 1

OPTIONS = {
    "job.recipe": "--recipe",
    "job.module": "--module",
    "job.config": "--config",
    "job.overrides": "--override",
    "cluster.gpu": "--gpu",
    "cluster.num_gpus": "--num-gpus",
    "cluster.gpus_per_node": "--gpus-per-node",
    "cluster.memory_limit_bytes": "--memory-limit",
    "cluster.reserved_bytes": "--reserved",
    "cluster.total_bytes": "--total-memory",
    "constraints.allow": "--allow",
    "constraints.max_recommendations": "--max-recommendations",
    "min_fit_probability": "--min-fit-probability",
    "pipeline_rank": "--pipeline-rank",
    "stack": "--stack",
}

EXAMPLES = {"cluster.gpu": "--gpu h100-80gb", "cluster.num_gpus": "--num-gpus 8"}


class Failure(Exception):
    """The command cannot go on; carries the problem to show."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(problem.detail)


@contextmanager
def explained(as_json: bool) -> Iterator[None]:
    """Turn what goes wrong inside into words (or the API's problem document) and an exit code."""
    try:
        yield
    except Failure as failure:
        _end(failure.problem, as_json)
    except EstimatorError as error:
        _end(of_estimator_error(error), as_json)


def warn(text: str) -> None:
    """One line on standard error."""
    sys.stderr.write(f"warning: {text}\n")


def _end(problem: Problem, as_json: bool) -> None:
    if as_json:
        from app.services.answers import encode

        sys.stdout.write(encode(problem.as_dict()).decode() + "\n")
    else:
        sys.stderr.write(_words(problem))
    raise Exit({"not-modelled": NOT_MODELLED, "internal-error": FAULT}.get(problem.slug, BAD_INPUT))


def _words(problem: Problem) -> str:
    body = problem.as_dict()
    lines = [f"error: {KINDS[problem.slug].title}"]
    for error in body["errors"]:
        lines.append(f"  {_place(error['path'], problem.slug)}: {error['message']}")
        suggestion = error["suggestion"] or EXAMPLES.get(error["path"])
        if suggestion:
            lines.append(f"    try: {suggestion}")
    return "\n".join(lines or [body["detail"]]) + "\n"


def _place(path: str, slug: str) -> str:
    """The option that a path came from, and the path; what is not modelled may be a recipe's: the field alone."""
    if slug == "not-modelled":
        return path.removeprefix("job.config.")
    option = _option(path)
    return path if option is None else f"{option} ({path})"


def _option(path: str) -> str | None:
    for start, option in OPTIONS.items():
        if path == start or path.startswith((f"{start}.", f"{start}[")):
            return option
    return None
