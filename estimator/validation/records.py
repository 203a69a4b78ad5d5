"""Reads records of the profiler and of Megatron-LM's tests: JSON lines, one run each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from estimator.validation import megatron_tests

REQUIRED = ("run_id", "job", "phases", "outcome", "rank", "gpu")


class RecordError(ValueError):
    """A line that is no record; the message names the line and what would be right."""


def read_records(lines: Iterable[str | bytes], name: str) -> Iterator[dict[str, Any]]:
    """Records in order. Raises RecordError with the line number for a line that is not one."""
    shared: dict[str, Any] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:  # also bytes that are no text
            raise RecordError(f"{name}:{number}: is not JSON: {str(error)[:100]}") from None
        if not isinstance(record, dict):
            raise RecordError(f"{name}:{number}: is {type(record).__name__}, not an object of the profiler")
        if isinstance(record.get(megatron_tests.SHARED), dict):
            shared = record[megatron_tests.SHARED]
            continue
        foreign = megatron_tests.MARK in record
        absent = [field for field in (megatron_tests.REQUIRED if foreign else REQUIRED) if field not in record]
        if absent:
            kind = "Megatron-LM's tests" if foreign else "the profiler"
            raise RecordError(f"{name}:{number}: is no record of {kind}: it has no {', '.join(absent)}")
        if foreign:
            if not isinstance(record["args"], dict):
                raise RecordError(f"{name}:{number}: args is no object of Megatron-LM's arguments")
            record["args"] = {**shared, **record["args"]}
        yield record
