"""How far a sweep is: a bar where rich is installed and someone watches, a line a run otherwise."""

from __future__ import annotations

import importlib.util
import sys
import time
from typing import Any

_GIB = 2**30


def describe(result: dict[str, Any]) -> str:
    """One line about a finished run."""
    words = [str(result["outcome"]), str(result["run_id"])]
    if result.get("kind") == "survival" and result["outcome"] == "ok":
        words.append(f"survives with {result['survives_at_bytes'] / _GIB:.3f} GiB,")
        words.append(f"dies with {result['dies_at_bytes'] / _GIB:.3f} GiB")
    elif result.get("peak_allocated_bytes"):
        words.append(f"peak {result['peak_allocated_bytes'] / _GIB:.3f} GiB")
    if result["outcome"] == "error" and result.get("error"):
        words.append(str(result["error"]).strip().splitlines()[-1][:300])
    return " ".join(words)


class Progress:
    """Counts finished runs on standard error."""

    def __init__(self, total: int, shown: bool) -> None:
        self._total, self._shown, self._count, self._began = total, shown, 0, time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if self._shown and sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
            from rich.console import Console
            from rich.progress import MofNCompleteColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (*Bar.get_default_columns(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("profiling", total=self._total)
            self._bar.start()
        return self

    def __exit__(self, *_details: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, result: dict[str, Any]) -> None:
        """A run, or a bisection, is finished and on disk."""
        self._count += 1
        if self._bar is not None:
            self._bar.console.print(describe(result), markup=False, highlight=False)
            self._bar.advance(self._task)
        elif self._shown:
            elapsed = time.monotonic() - self._began
            sys.stderr.write(f"[{self._count}/{self._total} {elapsed:.0f} s] {describe(result)}\n")
            sys.stderr.flush()
