"""``oombudsman validate``: the estimate held against measured runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import track
from rich.table import Table

from app.cli.console import console, gib
from app.cli.inputs import refusal
from estimator.validation import QUANTITIES, RecordError, Row, Summary, compare_record, read_records


def rows_of(files: list[Path], progress: bool) -> list[Row]:
    """A row for each record. Raises Failure naming file and line."""
    rows = []
    for path in files:
        try:
            with path.open("rb") as lines:
                records = list(read_records(lines, str(path)))
        except OSError as error:
            raise refusal("FILE", f"{path} cannot be read: {error.strerror}") from None
        except RecordError as error:
            raise refusal("FILE", str(error), "JSON lines as the profiler writes them") from None
        for record in track(records, path.name, console=console(), transient=True, disable=not progress):
            try:
                rows.append(compare_record(record))
            except (ValueError, KeyError, TypeError) as error:
                raise refusal(
                    "FILE", f"{path}: run {str(record.get('run_id', record.get('id')))[:80]!r}: {error}"
                ) from None
    if not rows:
        raise refusal("FILE", "there is no record in these files", "JSON lines as the profiler writes them")
    return rows


def as_plain(rows: list[Row], summary: Summary) -> dict[str, Any]:
    """For ``--json``."""
    return {
        "num_rows": summary.num_rows,
        "groups": {q: {name: asdict(f) for name, f in groups.items()} for q, groups in summary.groups.items()},
        "refused": summary.refused,
        "rows": [asdict(row) for row in rows],
    }


def print_summary(summary: Summary) -> None:
    """Figures by quantity and group, then the rows that are furthest off."""
    out = console()
    table = Table(
        box=None, pad_edge=False, title="How far the estimate is off, as absolute values", title_justify="left"
    )
    for name in ("quantity", "group"):
        table.add_column(name)
    for name in ("runs", "median", "mean", "90 %", "worst"):
        table.add_column(name, justify="right")
    for quantity, groups in summary.groups.items():
        for name, f in groups.items():
            values = [f"{100 * value:.2f} %" for value in (f.median, f.mean, f.percentile_90, f.worst)]
            table.add_row(QUANTITIES[quantity], name, str(f.count), *values)
    out.print(table)
    for reason, count in summary.refused.items():
        out.print(f"not answered: {count} ({reason})")
    out.print("\nFurthest off, by peak")
    for row in summary.worst_rows:
        measured, predicted = row.measured["peak"], row.predicted["peak"]
        out.print(
            f"  {row.run_id}: {100 * row.error('peak'):+.2f} %, {gib(predicted)} against {gib(measured)} measured"
        )
        phases = ", ".join(f"{name} {100 * error:+.2f} %" for name, error in row.phase_errors.items())
        out.print(f"    {row.strategy}, {', '.join(row.tags)}; {phases}")
        largest = sorted(row.components_at_peak.items(), key=lambda item: -item[1])[:4]
        out.print("    predicted at the peak: " + ", ".join(f"{name} {gib(n)}" for name, n in largest))
