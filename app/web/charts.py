"""Pictures as inline SVG, made of rectangles, lines and text with classes; colours are the style sheet's.

No style attributes and no scripts: the pages' Content-Security-Policy allows neither. All text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from app.web.groups import GROUPS, grouped

GIB = 1 << 30
BAR_WIDTH, BAR_HEIGHT = 1000.0, 22.0
PLOT_WIDTH, PLOT_HEIGHT = 960, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 28, 44


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of the bar chart."""

    label: str
    svg: Markup
    need: str
    verdict: str
    fits: bool | None
    sizes: dict[str, int]


def bars(rows: Sequence[tuple[str, Mapping[str, Any]]], usable: int) -> list[Bar]:
    """What each estimate needs, on one scale, against the usable memory of the card."""
    needs = [int(estimate.get("required_bytes") or 0) for _, estimate in rows]
    whole = 1.04 * max([usable, *needs, 1])
    found = []
    for (label, estimate), need in zip(rows, needs, strict=True):
        sizes = grouped(estimate)
        fits = estimate.get("fits")
        off = abs(usable - need) / GIB
        verdict = f"{off:.1f} GiB to spare" if need <= usable else f"{off:.1f} GiB too much"
        found.append(Bar(label, _bar(sizes, usable, whole), f"{need / GIB:.1f} GiB", verdict, fits, sizes))
    return found


def _bar(sizes: Mapping[str, int], usable: int, whole: float) -> Markup:
    parts, x = [], 0.0
    for group in GROUPS:
        width = BAR_WIDTH * sizes[group.key] / whole
        if width <= 0:
            continue
        title = f"{group.title}: {sizes[group.key] / GIB:.2f} GiB"
        parts.append(
            f'<rect class="g-{group.key}" x="{x:.2f}" y="0" width="{max(0.0, width - 1):.2f}" height="{BAR_HEIGHT:g}">'
            f"<title>{escape(title)}</title></rect>"
        )
        x += width
    line = BAR_WIDTH * usable / whole
    parts.append(f'<line class="limit" x1="{line:.2f}" x2="{line:.2f}" y1="-3" y2="{BAR_HEIGHT + 3:g}"/>')
    view = f"0 -3 {BAR_WIDTH:g} {BAR_HEIGHT + 6:g}"
    return Markup(
        f'<svg class="bar" viewBox="{view}" preserveAspectRatio="none" aria-hidden="true" focusable="false">'
        f"{''.join(parts)}</svg>"
    )


def _ticks(highest: float, wanted: int = 5) -> list[float]:
    """Round steps from 0 to just above ``highest``."""
    if highest <= 0:
        return [0.0]
    rough = highest / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    return [step * k for k in range(math.ceil(highest / step) + 1)]


def _frame(width: int, height: int, body: str, label: str) -> Markup:
    return Markup(
        f'<svg class="plot" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}" focusable="false">'
        f"{body}</svg>"
    )


def _text(x: float, y: float, text: str, cls: str = "tick", anchor: str = "middle") -> str:
    return f'<text class="{cls}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


PHASE_TITLES = {
    "model_build": "model",
    "optimizer_build": "optimizer",
    "first_forward_backward": "1st forward, backward",
    "first_optimizer_step": "1st step",
    "steady_forward_backward": "2nd forward, backward",
    "steady_optimizer_step": "2nd step",
}


def course_plot(points: Sequence[Mapping[str, Any]], room: int, room_title: str) -> Markup:
    """Allocated (area) and reserved (line) bytes over a step, its phases, and what the process may take (``room``)."""
    if len(points) < 2:
        return Markup("")
    first, last = float(points[0]["event"]), float(points[-1]["event"])
    highest = max(*(p["reserved_bytes"] for p in points), room) / GIB
    ticks = _ticks(highest)
    top = ticks[-1]

    def x(event: float) -> float:
        return LEFT + (PLOT_WIDTH - LEFT - RIGHT) * (event - first) / max(1, last - first)

    def y(gib: float) -> float:
        return PLOT_HEIGHT - BOTTOM - (PLOT_HEIGHT - TOP - BOTTOM) * gib / top

    body = [_grid(ticks, y)]
    body += _phase_marks(points, x)
    line = " ".join(f"{x(p['event']):.1f},{y(p['allocated_bytes'] / GIB):.1f}" for p in points)
    body.append(f'<polygon class="area" points="{x(first):.1f},{y(0):.1f} {line} {x(last):.1f},{y(0):.1f}"/>')
    body.append(f'<polyline class="allocated" points="{line}"/>')
    reserved = " ".join(f"{x(p['event']):.1f},{y(p['reserved_bytes'] / GIB):.1f}" for p in points)
    body.append(f'<polyline class="reserved" points="{reserved}"/>')
    level = y(room / GIB)
    body.append(f'<line class="limit" x1="{LEFT}" x2="{PLOT_WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>')
    body.append(_text(PLOT_WIDTH - RIGHT - 4, level - 6, room_title, "limit-label", "end"))
    peak = max(points, key=lambda p: p["allocated_bytes"])
    body.append(f'<circle class="peak" cx="{x(peak["event"]):.1f}" cy="{y(peak["allocated_bytes"] / GIB):.1f}" r="4"/>')
    label = f"Memory over one step: at most {peak['allocated_bytes'] / GIB:.1f} GiB allocated"
    return _frame(PLOT_WIDTH, PLOT_HEIGHT, "".join(body), label)


def _grid(ticks: Sequence[float], y: Any, right: int = PLOT_WIDTH - RIGHT) -> str:
    parts = []
    for tick in ticks:
        level = y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{level:.1f}" y2="{level:.1f}"/>')
        parts.append(_text(LEFT - 8, level + 4, f"{tick:g}", "tick", "end"))
    parts.append(_text(LEFT - 8, 14, "GiB", "tick", "end"))
    return "".join(parts)


def _phase_marks(points: Sequence[Mapping[str, Any]], x: Any) -> list[str]:
    """A line where a phase begins, its name below where there is room."""
    starts: list[tuple[str, float]] = []
    for point in points:
        if not starts or starts[-1][0] != point["phase"]:
            starts.append((point["phase"], x(point["event"])))
    marks = []
    ends = [start for _, start in starts[1:]] + [float(PLOT_WIDTH - RIGHT)]
    for (phase, start), end in zip(starts, ends, strict=True):
        marks.append(f'<line class="phase" x1="{start:.1f}" x2="{start:.1f}" y1="{TOP}" y2="{PLOT_HEIGHT - BOTTOM}"/>')
        title = PHASE_TITLES.get(phase, phase.replace("_", " "))
        if end - start > 6.2 * len(title):
            marks.append(_text((start + end) / 2, PLOT_HEIGHT - BOTTOM + 18, title))
    marks.append(_text((LEFT + PLOT_WIDTH - RIGHT) / 2, PLOT_HEIGHT - 8, "allocations and frees in order", "axis"))
    return marks


SCATTER_WIDTH, SCATTER_HEIGHT = 560, 320


def pareto_plot(rows: Sequence[Mapping[str, Any]], usable: int) -> Markup:
    """Step time against memory; points carry the numbers of the table beside the picture."""
    if not rows:
        return Markup("")
    times = [float(row["relative_step_time"]) for row in rows]
    needs = [row["required_bytes"] / GIB for row in rows]
    x_ticks = _span_ticks(min([*times, 1.0]), max([*times, 1.0]))
    y_ticks = _ticks(max([*needs, usable / GIB]))

    def x(value: float) -> float:
        low, high = x_ticks[0], x_ticks[-1]
        return LEFT + (SCATTER_WIDTH - LEFT - RIGHT) * (value - low) / max(1e-9, high - low)

    def y(gib: float) -> float:
        return SCATTER_HEIGHT - BOTTOM - (SCATTER_HEIGHT - TOP - BOTTOM) * gib / y_ticks[-1]

    body = [_grid(y_ticks, y, SCATTER_WIDTH - RIGHT)]
    body += [_text(x(tick), SCATTER_HEIGHT - BOTTOM + 18, f"{tick:g}x") for tick in x_ticks]
    body.append(_text((LEFT + SCATTER_WIDTH - RIGHT) / 2, SCATTER_HEIGHT - 8, "step time", "axis"))
    level = y(usable / GIB)
    body.append(f'<line class="limit" x1="{LEFT}" x2="{SCATTER_WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>')
    body.append(_text(SCATTER_WIDTH - RIGHT - 4, level - 6, "usable", "limit-label", "end"))
    for number, (row, time, need) in enumerate(zip(rows, times, needs, strict=True), 1):
        cls = {True: "fits", False: "over", None: "open"}[row.get("fits")]
        title = f"{row['title']}: {need:.1f} GiB, {time:.2f}x"
        body.append(
            f'<g class="point {cls}"><circle cx="{x(time):.1f}" cy="{y(need):.1f}" r="10"/>'
            f"{_text(x(time), y(need) + 4, str(number), 'number')}<title>{escape(title)}</title></g>"
        )
    return _frame(SCATTER_WIDTH, SCATTER_HEIGHT, "".join(body), "Memory against step time")


def _span_ticks(low: float, high: float) -> list[float]:
    step = next(s for s in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 50, 100, 1000, 1e9) if (high - low) / s <= 6)
    start = math.floor(low / step) * step
    return [round(start + step * k, 6) for k in range(math.ceil((high - start) / step + 1e-9) + 1)]


def scatter_plot(pairs: Sequence[tuple[float, float, str]]) -> Markup:
    """Measured (across) against predicted (up) GiB with the line on which they are equal."""
    if not pairs:
        return Markup("")
    ticks = _ticks(max(max(a, b) for a, b, _ in pairs))
    size, top = 420, ticks[-1]

    def x(value: float) -> float:
        return LEFT + (size - LEFT - RIGHT) * value / top

    def y(value: float) -> float:
        return size - BOTTOM - (size - TOP - BOTTOM) * value / top

    body = [_grid(ticks, y, size - RIGHT)]
    body += [_text(x(tick), size - BOTTOM + 18, f"{tick:g}") for tick in ticks]
    body.append(_text((LEFT + size - RIGHT) / 2, size - 8, "measured GiB", "axis"))
    body.append(_text(LEFT + 4, 14, "predicted", "axis", "start"))
    body.append(f'<line class="equal" x1="{x(0):.1f}" y1="{y(0):.1f}" x2="{x(top):.1f}" y2="{y(top):.1f}"/>')
    for measured, predicted, title in pairs:
        off = abs(predicted / measured - 1)
        cls = "near" if off < 0.01 else "far" if off > 0.05 else "off"
        body.append(
            f'<circle class="run {cls}" cx="{x(measured):.1f}" cy="{y(predicted):.1f}" r="4">'
            f"<title>{escape(title)}</title></circle>"
        )
    return _frame(size, size, "".join(body), "Predicted against measured peak of each run")
