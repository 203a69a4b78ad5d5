"""Errors of many rows by group: median, mean, 90th percentile and worst, as absolute values."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from estimator.validation.comparison import Row

QUANTITIES = {
    "peak": "peak allocated",
    "persistent": "persistent",
    "reserved": "peak reserved",
}


@dataclass(frozen=True, slots=True)
class Figures:
    """Absolute relative errors of one group."""

    count: int
    median: float
    mean: float
    percentile_90: float
    worst: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Of all rows: figures by quantity and group, what was refused and why, the rows with the largest peak errors."""

    num_rows: int
    groups: dict[str, dict[str, Figures]]
    """By quantity, then by group ("all" first)."""
    refused: dict[str, int]
    worst_rows: tuple[Row, ...]


def figures(errors: Sequence[float]) -> Figures:
    """``errors`` may have either sign; at least one."""
    ordered = sorted(abs(error) for error in errors)
    at_90 = ordered[max(0, math.ceil(0.9 * len(ordered)) - 1)]
    return Figures(len(ordered), statistics.median(ordered), statistics.fmean(ordered), at_90, ordered[-1])


def summarise(rows: Iterable[Row], num_worst: int = 10) -> Summary:
    """Groups are "all", the sharding strategies and those that a row names."""
    everything = list(rows)
    answered = [row for row in everything if row.refused is None]
    groups: dict[str, dict[str, Figures]] = {}
    for quantity in QUANTITIES:
        having = [row for row in answered if quantity in row.measured]
        by_group = {"all": [row.error(quantity) for row in having]}
        for row in having:
            for name in dict.fromkeys((row.strategy, *row.groups)):
                by_group.setdefault(name, []).append(row.error(quantity))
        found = {name: figures(errors) for name, errors in by_group.items() if errors}
        if found:
            groups[quantity] = found
    worst = sorted(answered, key=lambda row: -abs(row.error("peak")))[:num_worst]
    refused = Counter(row.refused for row in everything if row.refused is not None)
    return Summary(len(everything), groups, dict(refused.most_common()), tuple(worst))


def as_markdown(summary: Summary) -> str:
    """The table of a document."""
    lines = [
        "| quantity | runs | group | median | mean | 90th percentile | worst |",
        "|---|---|---|---|---|---|---|",
    ]
    for quantity, groups in summary.groups.items():
        for name, f in groups.items():
            values = (f.median, f.mean, f.percentile_90, f.worst)
            shown = " | ".join(f"{100 * value:.2f} %" for value in values)
            lines.append(f"| {QUANTITIES[quantity]} | {f.count} | {name} | {shown} |")
    lines.append("")
    lines += [f"Not answered: {count} ({reason})." for reason, count in summary.refused.items()]
    return "\n".join(lines)
