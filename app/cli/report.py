"""Answers in words and tables for a tired person: readable without colour and at 80 columns."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from app.cli.console import bar, console, factor, gib, percent

BAR_WIDTH = 44
MAX_ASSUMPTIONS = 6
SMALL_SHARE = 0.01
OUTCOMES = {
    "recommended": "does not fit; what does is below",
    "fits_already": "fits already: look for another cause",
    "nothing_fits": "does not fit, and no change that was allowed makes it fit",
    "not_gpu_memory": "did not run out of GPU memory",
    "needs_input": "cannot be judged yet: something is missing",
}


def print_recommendation(answer: Mapping[str, Any], request: Mapping[str, Any], show: int = 1) -> None:
    """The whole answer of POST /recommend; ``show``: which recommendation in full, 0 = each."""
    outcome = str(answer.get("outcome"))
    _headline(f"{_title(request)}: {OUTCOMES.get(outcome, outcome)}", "green" if outcome == "fits_already" else "red")
    diagnosis = answer.get("diagnosis") or {}
    _paragraph(diagnosis.get("summary"))
    for cause in diagnosis.get("causes") or ():
        _bullet(_cause(cause))
    for missing in answer.get("missing") or ():
        likely = missing.get("likely")
        _bullet(f"Missing: {missing.get('path')}" + ("" if likely is None else f" (likely {likely})"))
    current = answer.get("current") or {}
    if _is_estimated(current):
        _memory(current)
        _components(current)
    _rule_problems(answer.get("problems") or ())
    _recommendations(answer.get("recommendations") or (), show)
    if show == 0:
        _alternatives(answer.get("alternatives") or ())
    _assumptions([*(current.get("assumptions") or ()), *(answer.get("assumptions") or ())], MAX_ASSUMPTIONS)


def print_estimate(answer: Mapping[str, Any], request: Mapping[str, Any]) -> None:
    """The whole answer of POST /estimate."""
    fits = bool(answer.get("fits"))
    verdict = ("fits" if fits else "does not fit") if _is_estimated(answer) else "cannot be laid out on these GPUs"
    _headline(f"{_title(request)}: {verdict}", "green" if fits else "red")
    if _is_estimated(answer):
        _memory(answer)
        _components(answer)
        _phases(answer.get("phases") or ())
        _ranks(answer.get("ranks") or ())
        _states(answer)
    _rule_problems(answer.get("problems") or ())
    _assumptions(answer.get("assumptions") or (), None)


def _is_estimated(estimate: Mapping[str, Any]) -> bool:
    """A job whose sizes do not divide has problems, and null for every figure."""
    return estimate.get("required_bytes") is not None


def _title(request: Mapping[str, Any]) -> str:
    job, cluster = request.get("job") or {}, request.get("cluster") or {}
    name = job.get("recipe") or "This job"
    changed = len(job.get("overrides") or ()) + bool(job.get("config"))
    with_changes = (
        f" with {changed} change{'s' if changed > 1 else ''} of yours" if job.get("recipe") and changed else ""
    )
    return f"{name}{with_changes} on {cluster.get('num_gpus')} x {cluster.get('gpu')}"


def _memory(estimate: Mapping[str, Any]) -> None:
    required, usable = int(estimate["required_bytes"]), int(estimate["usable_bytes"])
    whole = max(required, usable)
    over = required - usable
    spare = f"{gib(over)} too much" if over > 0 else f"{gib(-over)} to spare"
    rank = estimate.get("peak_pipeline_rank")
    where = f" on pipeline stage {rank}" if len(estimate.get("ranks") or ()) > 1 else ""
    _section(f"Memory of one GPU{where}")
    _line(f"needs   {gib(required):>10}  {bar(required, whole, BAR_WIDTH)}", "red" if over > 0 else "green")
    _line(f"has     {gib(usable):>10}  {bar(usable, whole, BAR_WIDTH)}")
    _line(f"        {spare}; fits with probability {percent(float(estimate.get('fit_probability') or 0))}")


def _components(estimate: Mapping[str, Any]) -> None:
    from estimator.components import CALIBRATION, MEANING

    found: Mapping[str, int] = estimate.get("components_at_peak") or {}
    peak = int(estimate["peak_allocated_bytes"])
    largest = max(found.values(), default=0)
    _section(f"What fills it at the peak, in {_words(estimate.get('peak_phase'))}")
    table = _table("component", "GiB", "", "what it is", right=("GiB",))
    small = 0
    for name, num_bytes in sorted(found.items(), key=lambda item: -item[1]):
        if num_bytes < SMALL_SHARE * peak and name != CALIBRATION:
            small += num_bytes
            continue
        table.add_row(_words(name), _figure(num_bytes), bar(num_bytes, largest, 12), MEANING.get(name, ""))
    if small:
        table.add_row("smaller ones", _figure(small), bar(small, largest, 12), "each under 1 % of the peak")
    table.add_row("allocated at the peak", _figure(peak), "", "", style="bold")
    rest = int(estimate["required_bytes"]) - peak
    table.add_row("around it", _figure(rest), "", "allocator's rounding and gaps, CUDA context, NCCL")
    _print(table)


def _phases(phases: Sequence[Mapping[str, Any]]) -> None:
    if not phases:
        return
    _section("Moment by moment")
    table = _table("phase", "peak GiB", "", "GiB at its end", right=("peak GiB", "GiB at its end"))
    whole = max(int(phase["peak_bytes"]) for phase in phases)
    for phase in phases:
        peak, end = int(phase["peak_bytes"]), int(phase["allocated_bytes"])
        table.add_row(_words(phase["name"]), _figure(peak), bar(peak, whole, 20), _figure(end))
    _print(table)


def _ranks(ranks: Sequence[Mapping[str, Any]]) -> None:
    if len(ranks) < 2:
        return
    _section("Pipeline stages")
    table = _table("stage", "needs GiB", "", "allocated at its peak, GiB", right=("stage", "needs GiB"))
    whole = max(int(rank["required_bytes"]) for rank in ranks)
    for rank in ranks:
        needs = int(rank["required_bytes"])
        peak = _figure(int(rank["peak_allocated_bytes"]))
        table.add_row(str(rank["pipeline_rank"]), _figure(needs), bar(needs, whole, 20), peak)
    _print(table)


def _states(estimate: Mapping[str, Any]) -> None:
    _section("Between steps")
    _line(f"{gib(int(estimate['resident_state_bytes'])):>10}  parameters, gradients and optimizer states")
    _line(f"{gib(int(estimate['persistent_bytes'])):>10}  allocated when the optimizer step returns")
    survival = estimate.get("survival_bytes") or {}
    for setting, num_bytes in survival.items():
        if isinstance(num_bytes, int):
            _line(f"{gib(num_bytes):>10}  least reserved memory in which the step runs, allocator {_words(setting)}")


def _recommendations(recommendations: Sequence[Mapping[str, Any]], show: int) -> None:
    if not recommendations:
        return
    _section("What fits, cheapest first" if len(recommendations) > 1 else "What fits")
    table = _table("", "change", "needs", "to spare", "fits", "step time", right=("needs", "to spare", "step time"))
    for place, item in enumerate(recommendations, start=1):
        table.add_row(
            str(item.get("rank", place)),
            str(item.get("title", "")),
            gib(int((item.get("estimate") or {}).get("required_bytes") or 0)),
            gib(int(item.get("headroom_bytes") or 0)),
            percent(float(item.get("fit_probability") or 0)),
            factor(item.get("relative_step_time")),
        )
    _print(table)
    for place, item in enumerate(recommendations, start=1):
        if show in (0, int(item.get("rank", place))):
            _recommendation(item, place)
    others = [str(item.get("rank", place)) for place, item in enumerate(recommendations, start=1)]
    others = [number for number in others if number != str(show)]
    if show != 0 and others:
        _blank()
        _paragraph(
            f"The others in full: --show {' or '.join(others)}, or --show 0. As YAML, for Slurm, for programs: --json."
        )


def _recommendation(item: Mapping[str, Any], place: int) -> None:
    _section(f"{item.get('rank', place)}. {item.get('title', '')}")
    changes = list(item.get("changes") or ())
    for number, change in enumerate(changes):
        _line(f"{change['path']}: {_value(change.get('from'))} -> {_value(change.get('to'))}", "bold")
        following = changes[number + 1].get("why") if number + 1 < len(changes) else None
        if change.get("why") != following:
            _paragraph(change.get("why"), indent=6)
    override = item.get("override") or {}
    _block("Paste into the recipe, after cfg is built:", override.get("python"), _reason(override, "python"))
    env = override.get("env") or {}
    exports = [f"unset {k}" if v is None else f"export {k}={shlex.quote(str(v))}" for k, v in env.items()]
    if exports:
        _block("Environment, on every node:", "\n".join(exports))
    _block("Or on the command line:", _cli(override.get("cli")), _reason(override, "cli"))
    _block("Launch:", (override.get("launch") or {}).get("torchrun"))
    _blank()
    _paragraph(_labelled("Checkpoints", (item.get("checkpoint") or {}).get("text")), indent=2)
    for warning in item.get("warnings") or ():
        _paragraph(_labelled("Mind", warning.get("text") if isinstance(warning, Mapping) else warning), indent=2)
    verify = item.get("verify") or {}
    commands = verify.get("commands")
    _block("Then verify:", commands if isinstance(commands, str) or not commands else "\n".join(map(str, commands)))
    for criterion in _list(verify.get("criteria")):
        _bullet(criterion)


def _alternatives(alternatives: Iterable[Mapping[str, Any]]) -> None:
    """The Pareto front: what memory costs in step time."""
    rows = list(alternatives)
    if not rows:
        return
    _section("Memory against step time, of all that was looked at")
    table = _table("change", "needs", "step time", "", right=("needs", "step time"))
    for row in rows:
        verdict = {True: "fits", False: "too much", None: "at least"}[row.get("fits")]
        table.add_row(row["title"], gib(row["required_bytes"]), factor(row["relative_step_time"]), verdict)
    console().print(Padding(table, (0, 0, 0, 2)))


def _rule_problems(problems: Iterable[Mapping[str, Any]]) -> None:
    problems = list(problems)
    if not problems:
        return
    _section("Apart from memory, Megatron-Bridge would refuse this job, or train wrongly")
    for problem in problems:
        _bullet(f"{problem.get('message')} [{problem.get('rule_id')}]")
        _paragraph(_labelled("Fix", problem.get("fix")), indent=6)


def _assumptions(assumptions: Iterable[Any], at_most: int | None) -> None:
    found = list(dict.fromkeys(map(str, assumptions)))
    if not found:
        return
    _section("Assumed")
    for assumption in found[:at_most]:
        _bullet(assumption)
    if at_most is not None and len(found) > at_most:
        _bullet(f"and {len(found) - at_most} more: oombudsman estimate lists them all")


def _cause(cause: Mapping[str, Any]) -> str:
    evidence = "; ".join(_list(cause.get("evidence")))
    return _words(cause.get("cause")) + (f": {evidence}" if evidence else "")


def _list(value: Any) -> list[str]:
    if not value:
        return []
    return [value] if isinstance(value, str) else [str(item) for item in value]


def _cli(value: Any) -> str | None:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value


def _reason(override: Mapping[str, Any], form: str) -> str | None:
    return (override.get("reasons") or {}).get(form)


def _value(value: Any) -> str:
    return "unset" if value is None else str(value)


def _labelled(label: str, text: Any) -> str | None:
    return f"{label}: {text}" if text else None


def _words(name: Any) -> str:
    return str(name).replace("_", " ")


def _figure(num_bytes: int) -> str:
    return gib(num_bytes).removesuffix(" GiB")


def _table(*headers: str, right: Iterable[str] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
    for header in headers:
        wraps = header in ("change", "what it is")
        table.add_column(header, justify="right" if header in right else "left", no_wrap=not wraps)
    return table


def _print(table: Table) -> None:
    console().print(Padding(table, (0, 0, 0, 2)))


def _headline(text: str, colour: str) -> None:
    console().print(Text(text, style=f"bold {colour}"))


def _section(text: str) -> None:
    _blank()
    console().print(Text(text, style="bold"))


def _line(text: str, style: str = "") -> None:
    console().print(Text(f"  {text}", style=style), soft_wrap=True)


def _paragraph(text: str | None, indent: int = 0) -> None:
    if text:
        _wrapped(str(text), " " * indent, " " * indent)


def _bullet(text: str) -> None:
    _wrapped(text, "  - ", "    ")


def _wrapped(text: str, first: str, later: str) -> None:
    lines = textwrap.wrap(
        text,
        console().width,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )
    console().print(Text("\n".join(lines)), soft_wrap=True)


def _block(label: str, text: str | None, reason: str | None = None) -> None:
    """Lines to copy: never wrapped, never indented, so that what is pasted is what was printed."""
    if text:
        _blank()
        _line(label)
        console().print(Text(text.rstrip("\n"), style="cyan"), soft_wrap=True)
    elif reason:
        _blank()
        _paragraph(f"{label} not possible: {reason}", indent=2)


def _blank() -> None:
    console().print()
