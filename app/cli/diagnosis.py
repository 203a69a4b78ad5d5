"""``oombudsman diagnose``: files in, causes out."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from app.cli.console import bar, console, gib, percent
from app.cli.failures import Failure
from app.cli.inputs import read_config, refusal
from app.problems import of_validation_error
from app.schemas import DiagnoseBody

OUTCOMES = {
    "gpu_memory": ("ran out of GPU memory", "red"),
    "not_gpu_memory": ("did not run out of GPU memory", "yellow"),
    "needs_input": ("shows no failure", "yellow"),
}
SHOWN_CAUSES, SHOWN_COMPONENTS, SHOWN_GAPS = 5, 10, 12
SERIES_WIDTH = 60


def known_body(
    recipe: str | None,
    module: str | None,
    config: Path | None,
    overrides: Sequence[str] | None,
    stack: Sequence[str] | None,
    gpu: str | None,
    num_gpus: int | None,
    gpus_per_node: int | None,
) -> DiagnoseBody:
    """What the user says of the job and the cluster; both may be left to the log."""
    document: dict[str, Any] = {"stack": _pairs(stack or ())}
    if recipe or config:
        job = {"recipe": recipe, "module": module, "overrides": list(overrides or ())}
        document["job"] = job | {"config": read_config(config) if config else None}
    elif overrides:
        raise refusal("--override", "changes a job, but none is named", "--recipe or --config beside it")
    if gpu or num_gpus:
        if not (gpu and num_gpus):
            raise refusal("--gpu", "and --num-gpus belong together", "--gpu h100-80gb --num-gpus 8")
        document["cluster"] = {"gpu": gpu, "num_gpus": num_gpus, "gpus_per_node": gpus_per_node}
    try:
        return DiagnoseBody.model_validate(document)
    except ValidationError as error:
        raise Failure(of_validation_error(error, DiagnoseBody)) from error


def _pairs(items: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals:
            raise refusal("--stack", f"{item!r} is not name=version", "megatron_core=0.19.2")
        pairs[name] = value
    return pairs


def answer_of(path: Path, known: DiagnoseBody) -> dict[str, Any]:
    """The answer for one file. Raises Failure for a file that cannot be read, JobError for a snapshot that is none."""
    from app.services.diagnosis import of_file

    job = known.job.to_request() if known.job else None
    cluster = known.cluster.to_request() if known.cluster else None
    try:
        return of_file(path, job, cluster, known.stack)
    except OSError as error:
        raise refusal("FILE", f"{path}: {error.strerror}") from error


def print_diagnosis(name: str, answer: Mapping[str, Any]) -> None:
    """The whole answer, readable without colour."""
    out = console()
    if "snapshot" in answer:
        _print_snapshot(name, answer)
        return
    words, colour = OUTCOMES.get(str(answer["outcome"]), (str(answer["outcome"]), "yellow"))
    out.print(Text(f"{name}: {words}", style=f"bold {colour}"))
    out.print(str(answer["summary"]))
    causes = list(answer["causes"])[:SHOWN_CAUSES]
    if causes:
        out.print("\nLikely causes", style="bold")
        for cause in causes:
            out.print(f"  {percent(cause['confidence']):>7}  {cause['cause'].replace('_', ' ')}")
            out.print(Padding(str(cause["evidence"]), (0, 0, 0, 11)))
    if answer["facts"]:
        out.print("\nRead in the text", style="bold")
        out.print(_facts(answer["facts"]))
    for row in answer["prediction"]:
        out.print(f"  {_comparison(row)}")
    actions = answer["advice"].get("actions") or ()
    if actions:
        out.print("\nWhat to do", style="bold")
        for action in actions:
            out.print(f"  - {action}")
    for missing in answer["missing"]:
        likely = missing["likely"]
        out.print(f"  missing: {missing['path']}" + ("" if likely is None else f" (likely {likely})"))
    for note in answer["notes"]:
        out.print(f"  note: {note}")
    _print_next(answer, name)


def _facts(facts: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
    for fact in facts[:16]:
        value = fact["value"]
        shown = "not known" if value is None else gib(value) if str(fact["name"]).endswith("_bytes") else str(value)
        table.add_row(
            "", str(fact["name"]).removesuffix("_bytes").replace("_", " "), shown[:60], f"line {fact['line']}"
        )
    return table


def _comparison(row: Mapping[str, Any]) -> str:
    """ "in steady forward backward: at least 78.1 GiB by the log, 72.1 GiB by the estimate"."""
    least = "at least " if row.get("is_lower_bound") else ""
    observed, predicted = row.get("observed_bytes"), row.get("predicted_bytes")
    where = str(row.get("phase") or row.get("quantity") or "").replace("_", " ")
    shown = [f"{least}{gib(observed)} by the log" if isinstance(observed, int) else ""]
    shown.append(f"{gib(predicted)} by the estimate" if isinstance(predicted, int) else "")
    return f"{where}: " + ", ".join(part for part in shown if part)


def _print_next(answer: Mapping[str, Any], name: str) -> None:
    job, cluster = answer["job"], answer["cluster"]
    if answer["outcome"] != "gpu_memory" or not answer["advice"].get("search", True):
        return
    if job and cluster and job.get("recipe"):
        words = ["oombudsman", "recommend", "--recipe", str(job["recipe"])]
        for override in job.get("overrides") or ():
            words += ["--override", str(override)]
        words += ["--gpu", str(cluster["gpu"]), "--num-gpus", str(cluster["num_gpus"]), "--log", name]
        console().print("\nThen: " + shlex.join(words))


def _print_snapshot(name: str, answer: Mapping[str, Any]) -> None:
    out, snapshot = console(), answer["snapshot"]
    out.print(Text(f"{name}: memory snapshot of device {snapshot['device']}", style="bold"))
    out.print(str(answer["summary"]))
    peak = max(1, int(snapshot["peak_allocated_bytes"]))
    out.print("\nAt the peak", style="bold")
    components = sorted(snapshot["components_at_peak"].items(), key=lambda item: -item[1])[:SHOWN_COMPONENTS]
    for component, size in components:
        out.print(f"  {component.replace('_', ' '):24} {gib(size):>10}  {bar(size, peak, 30)}")
    out.print("\nAllocated over time", style="bold")
    series = snapshot["series"]
    step = max(1, len(series) // SERIES_WIDTH)
    highest = max((point["allocated_bytes"] for point in series), default=1) or 1
    levels = " ▁▂▃▄▅▆▇█"
    shown = [max(p["allocated_bytes"] for p in series[i : i + step]) for i in range(0, len(series), step)]
    out.print("  " + "".join(levels[round(value / highest * (len(levels) - 1))] for value in shown))
    out.print(f"  0 to {gib(highest)}, {snapshot['num_events']} events from left to right")
    if answer.get("differences"):
        out.print("\nBeside the estimate's peak", style="bold")
        table = Table(box=None, pad_edge=False, padding=(0, 2))
        for column in ("component", "observed", "predicted", "gap"):
            table.add_column(column, justify="left" if column == "component" else "right")
        for row in answer["differences"][:SHOWN_GAPS]:
            sizes = [gib(row[f"{key}_bytes"]) for key in ("observed", "predicted", "gap")]
            table.add_row(str(row["component"]).replace("_", " "), *sizes)
        out.print(table)
