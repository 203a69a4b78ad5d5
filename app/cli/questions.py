"""``oombudsman capacity``, ``diff`` and ``explain``: inputs and words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.padding import Padding
from rich.table import Table

from app.cli.console import console, factor, gib, percent
from app.cli.failures import Failure
from app.cli.inputs import read_config, refusal
from app.problems import of_validation_error
from app.schemas import CompareBody

COST_WORDS = {
    "compute": "arithmetic, recomputation included",
    "tensor": "communication of tensor parallelism",
    "context": "communication of context parallelism",
    "data": "communication of data parallelism, as far as nothing hides it",
    "pipeline": "waiting in the pipeline",
    "bubble": "waiting in the pipeline",
    "launch": "launching kernels",
    "offload": "traffic to the host",
}


def compare_body(
    job_a: str,
    job_b: str,
    gpu: str | None,
    num_gpus: int | None,
    num_gpus_b: int | None,
    overrides_a: Sequence[str],
    overrides_b: Sequence[str],
) -> CompareBody:
    """Raises Failure that names the option."""
    if not gpu or not num_gpus:
        raise refusal("--gpu", "and --num-gpus say where the jobs run", "--gpu h100-80gb --num-gpus 16")
    sides = {
        name: {"job": {**_job(job), "overrides": list(overrides)}, "cluster": {"gpu": gpu, "num_gpus": count}}
        for name, job, overrides, count in (
            ("a", job_a, overrides_a, num_gpus),
            ("b", job_b, overrides_b, num_gpus_b or num_gpus),
        )
    }
    try:
        return CompareBody.model_validate(sides)
    except ValidationError as error:
        raise Failure(of_validation_error(error, CompareBody)) from error


def _job(text: str) -> dict[str, Any]:
    """A file where one of that name exists, else a recipe."""
    path = Path(text)
    if path.suffix in (".yaml", ".yml", ".json") or path.is_file():
        return {"config": read_config(path)}
    return {"recipe": text}


def print_capacity(answer: Mapping[str, Any]) -> None:
    out = console()
    out.print(str(answer["summary"]))
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for column in (str(answer["question"]).replace("_", " "), "needs", "to spare", "fits"):
        table.add_column(column, justify="right")
    for row in answer["tried"]:
        if row.get("required_bytes") is None:
            table.add_row(str(row["value"]), "", "", str(row.get("refused"))[:60])
        else:
            fits = percent(row["fit_probability"])
            table.add_row(str(row["value"]), gib(row["required_bytes"]), gib(row["headroom_bytes"]), fits)
    out.print(Padding(table, (1, 0, 0, 0)))


def print_difference(answer: Mapping[str, Any]) -> None:
    out = console()
    out.print(str(answer["summary"]))
    out.print("\nWhich settings did it (the peak of the first job, with only this changed)", style="bold")
    for row in answer["fields"]:
        change = f"{row['from']} -> {row['to']}"
        effect = row.get("note") or _signed(row["difference_bytes"])
        out.print(f"  {row['path']}: {change[:70]}")
        out.print(f"      {effect}")
    out.print("\nBy component, at each one's peak", style="bold")
    out.print(_table(answer["components"], "a_bytes", "b_bytes"))
    out.print("\nBy phase", style="bold")
    out.print(_table(answer["phases"], "a_peak_bytes", "b_peak_bytes"))


def _table(rows: Sequence[Mapping[str, Any]], first: str, second: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column("")
    for column in ("first", "second", "difference"):
        table.add_column(column, justify="right")
    for row in rows:
        if row[first] or row[second]:
            name = str(row["name"]).replace("_", " ")
            table.add_row(name, gib(row[first]), gib(row[second]), _signed(row["difference_bytes"]))
    return table


def _signed(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "not known"
    return "no difference" if num_bytes == 0 else f"{num_bytes / (1 << 30):+.2f} GiB"


def print_explanation(answer: Mapping[str, Any]) -> None:
    out = console()
    out.print(str((answer.get("diagnosis") or {}).get("summary") or answer["outcome"]))
    for recommendation in answer.get("recommendations") or ():
        out.print(f"\n{recommendation['rank']}. {recommendation['title']}", style="bold")
        for change in recommendation["changes"]:
            out.print(f"  {change['path']} = {change['to']}")
            out.print(Padding(str(change["why"]), (0, 0, 0, 6)))
        estimate = recommendation["estimate"]
        sure, pace = percent(recommendation["fit_probability"]), factor(recommendation["relative_step_time"])
        need, room = gib(estimate["required_bytes"]), gib(estimate["usable_bytes"])
        out.print(f"  It needs {need} of {room} and fits with probability {sure}, at {pace} step time:")
        for name, share in (recommendation.get("cost_terms") or {}).items():
            if share:
                out.print(f"      {factor(share)} {COST_WORDS.get(name, name.replace('_', ' '))}")
        out.print(f"  {recommendation['checkpoint']['text']}")
        for warning in recommendation["warnings"]:
            out.print(f"  Mind: {warning['text']}")
