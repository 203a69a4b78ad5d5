"""Everything that the service recommends, held against the real Megatron-Bridge.

A case is a recipe as it is shipped, a number of GPUs and a kind of GPU. Each recommendation of its answer is applied by
Bridge's own code in its three forms; these must give equal configurations, without unknown fields, that Bridge accepts
on that many ranks, and that end, field by field, in the document that the estimate was made for.

As a command (everything, in as many processes as asked for): python tests/bridge/emitted.py --help
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from comparing import differences, ignored, missing_settings, silently_overwritten, unknown_fields  # noqa: E402

from estimator.answers import recommend_answer  # noqa: E402
from estimator.catalog import Recipe, find_gpu, list_recipes  # noqa: E402
from estimator.changes import Change, apply_changes  # noqa: E402
from estimator.errors import JobError, NotModelled  # noqa: E402
from estimator.job.effective import effective_document  # noqa: E402
from estimator.requests import ClusterRequest, JobRequest, RecommendRequest  # noqa: E402
from estimator.rules import check_rules  # noqa: E402

GPUS = ("h100-80gb", "h200-141gb", "b200", "gb200")
SEED = 20261201


@dataclass(frozen=True, slots=True)
class Case:
    recipe: str
    module: str
    num_gpus: int
    gpu: str

    def __str__(self) -> str:
        return f"{self.recipe} on {self.num_gpus} x {self.gpu}"


@dataclass(slots=True)
class Outcome:
    """What became of one case."""

    case: Case
    outcome: str = ""
    num_overrides: int = 0
    faults: list[str] = field(default_factory=list)


def cases() -> list[Case]:
    """Every recipe x {its own GPU count, double} x kinds of GPU."""
    return [
        Case(recipe.name, recipe.module, count * factor, gpu)
        for recipe in list_recipes()
        if (count := recipe.num_gpus or 8)
        for factor in (1, 2)
        for gpu in GPUS
    ]


def sample(bridge: Any, num_overrides: int) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Cases drawn by a fixed seed, with their answers, until these recommend so many overrides.

    Recipes that take their dimensions from a public model of which no ``config.json`` is here are passed over.
    """
    drawn = cases()
    random.Random(SEED).shuffle(drawn)
    found = 0
    for case in drawn:
        outcome, answer = ask(case)
        if outcome == "recommended" and answer is not None and is_buildable(bridge, case):
            yield case, answer
            found += len(answer["recommendations"])
            if found >= num_overrides:
                return


def is_buildable(bridge: Any, case: Case) -> bool:
    """Whether Bridge can build the recipe without asking a hub."""
    try:
        bridge.recipe(case.recipe, case.module)
    except (OSError, ValueError) as error:
        if "no config.json" in str(error):
            return False
        raise
    return True


def ask(case: Case) -> tuple[str, dict[str, Any] | None]:
    """The outcome and the answer; a recipe of a kind that is not modelled has none.

    A job that fits is asked about again with so much of the card reserved that only 70 % of what it needs is left.
    """
    cluster = ClusterRequest(gpu=case.gpu, num_gpus=case.num_gpus)
    job = JobRequest(recipe=case.recipe, module=case.module)
    try:
        answer = recommend_answer(RecommendRequest(job, cluster))
        if answer["outcome"] == "fits_already":
            total = find_gpu(case.gpu).total_bytes
            left = int(0.7 * answer["current"]["required_bytes"])
            answer = recommend_answer(RecommendRequest(job, replace(cluster, reserved_bytes=total - left)))
    except NotModelled:
        return "not modelled", None
    except JobError as error:
        return f"refused: {error}", None
    return answer["outcome"], answer


def faults_of(bridge: Any, case: Case, answer: Mapping[str, Any]) -> list[str]:
    """What is wrong with the recommendations of an answer; empty if nothing is."""
    from estimator.catalog import find_recipe

    recipe = find_recipe(case.recipe, case.module)
    faults = []
    for recommendation in answer["recommendations"]:
        where = f"{case}: {recommendation['title']}: "
        try:
            faults += [where + text for text in _faults(bridge, recipe, case, recommendation)]
        except Exception as error:  # whatever Bridge raises is a finding, and the next one is wanted too
            faults.append(f"{where}{type(error).__name__}: {str(error)[:300]}")
    return faults


def _faults(bridge: Any, recipe: Recipe, case: Case, recommendation: Mapping[str, Any]) -> Iterator[str]:
    values, override = recipe.document(), recommendation["override"]
    family = find_gpu(case.gpu).family
    changes = tuple(Change(c["path"], c["from"], c["to"], c["why"], c["family"]) for c in recommendation["changes"])
    forms = {"python": bridge.with_python(bridge.recipe(recipe.name, recipe.module), override["python"])}
    if override["cli"] is not None:
        arguments = override["cli_arguments"]
        forms["cli"] = bridge.with_cli(bridge.recipe(recipe.name, recipe.module), list(arguments))
    if override["yaml"] is not None:
        forms["yaml"] = bridge.with_yaml(bridge.recipe(recipe.name, recipe.module), override["yaml"])
    documents = {form: bridge.document(cfg) for form, cfg in forms.items()}
    for form in documents.keys() - {"python"}:
        yield from (f"{form} differs: {text}" for text in differences(documents["python"], documents[form]))
    yield from (f"unknown field {name}" for name in unknown_fields(forms["python"], override["python"] or ""))
    yield from (f"not written: {path}" for path in missing_settings(documents["python"], changes, values))
    changed = apply_changes(values, changes)
    predicted = effective_document(changed, case.num_gpus, family).values
    broken = [p for p in check_rules(changed, predicted, case.num_gpus, family) if p.severity == "error"]
    yield from (f"breaks rule {p.rule_id}: {p.message}" for p in broken)
    cfg, environment = bridge.validated(forms["python"], case.num_gpus, override["env"])
    got = bridge.document(cfg)
    yield from (f"not as estimated: {t}" for t in differences(got, predicted) if not ignored(t))
    yield from silently_overwritten(got, changes, values)
    for name, value in override["env"].items():
        if environment.get(name) != value:
            yield f"environment: {name} is {environment.get(name)!r}, not {value!r}"


def check(case: Case) -> Outcome:
    """One case in a process of its own pool."""
    outcome, answer = ask(case)
    result = Outcome(case, outcome)
    if answer is not None and answer["recommendations"]:
        if not is_buildable(_bridge(), case):
            result.outcome = "no config.json of the model"
            return result
        result.num_overrides = len(answer["recommendations"])
        result.faults = faults_of(_bridge(), case, answer)
    return result


_LOADED: list[Any] = []


def _bridge() -> Any:
    if not _LOADED:
        from conftest import load_bridge

        _LOADED.append(load_bridge(Path(tempfile.mkdtemp(prefix="bridge"))))
    return _LOADED[0]


def main() -> int:
    parser = argparse.ArgumentParser(description="Every override that the service emits, against the real Bridge.")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--recipes", default="", help="only recipes whose name contains this")
    parser.add_argument("--out", type=Path, help="one JSON line a case")
    options = parser.parse_args()
    wanted = [case for case in cases() if options.recipes in case.recipe]
    outcomes: collections.Counter[str] = collections.Counter()
    overrides = faulty = 0
    started = time.monotonic()
    lines = options.out.open("w") if options.out else None
    with ProcessPoolExecutor(options.processes) as pool:
        for done, result in enumerate(pool.map(check, wanted, chunksize=8), 1):
            outcomes[result.outcome.partition(":")[0]] += 1
            overrides += result.num_overrides
            faulty += bool(result.faults)
            for fault in result.faults[:3]:
                print(fault, flush=True)
            if lines:
                row = {"case": str(result.case), "outcome": result.outcome, "faults": result.faults}
                print(json.dumps(row), file=lines)
            if done % 100 == 0 or done == len(wanted):
                print(f"{done}/{len(wanted)} cases, {overrides} overrides, {faulty} cases with faults", flush=True)
    print(f"{dict(outcomes)}; {overrides} overrides in {time.monotonic() - started:.0f} s, {faulty} cases with faults")
    return int(faulty > 0)


if __name__ == "__main__":
    sys.exit(main())
