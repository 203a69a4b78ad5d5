"""Reads the profiler's records: JSON lines, one run each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

REQUIRED = ("run_id", "job", "phases", "outcome", "rank", "gpu")


class RecordError(ValueError):
    """A line that is no record; the message names the line and what would be right."""


def read_records(lines: Iterable[str | bytes], name: str) -> Iterator[dict[str, Any]]:
    """Records in order. Raises RecordError with the line number for a line that is not one."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:  # also bytes that are no text
            raise RecordError(f"{name}:{number}: is not JSON: {str(error)[:100]}") from None
        if not isinstance(record, dict):
            raise RecordError(f"{name}:{number}: is {type(record).__name__}, not an object of the profiler")
        absent = [field for field in REQUIRED if field not in record]
        if absent:
            raise RecordError(f"{name}:{number}: is no record of the profiler: it has no {', '.join(absent)}")
        yield record
