"""Megatron-LM's own tests, as they recorded their memory, against the estimate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from estimator.step.first_use import torch_cublas_bytes
from estimator.validation import RecordError, compare_record, read_records, summarise

RECORDS = Path(__file__).resolve().parents[3] / "estimator" / "data" / "measured" / "megatron_tests.jsonl"


def test_the_tests_stay_as_close_as_they_were_measured() -> None:
    with RECORDS.open() as lines:
        rows = [compare_record(record) for record in read_records(lines, RECORDS.name)]
    summary = summarise(rows)
    assert summary.num_rows == 328
    assert summary.groups["peak"]["all"].count >= 152
    assert summary.groups["peak"]["all"].median < 0.02
    assert summary.groups["persistent"]["all"].median < 0.01
    assert "reserved" not in summary.groups, "the tests do not record it"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"platform": "v100"}, "platform: 'v100' is none of a100"),
        ({"world_size": None, "world_size_inferred": None}, "world_size: must be"),
    ],
)
def test_a_record_that_cannot_be_read_is_named(change: dict[str, object], message: str) -> None:
    with RECORDS.open() as lines:
        record = next(read_records(lines, RECORDS.name))
    with pytest.raises(ValueError, match=message):
        compare_record({**record, **change})


def test_arguments_must_be_an_object() -> None:
    record = {"id": "a", "platform": "a100", "args": [], "mem_allocated_bytes": 1, "mem_max_allocated_bytes": 2}
    with pytest.raises(RecordError, match="f:1: args is no object"):
        list(read_records([json.dumps(record)], "f"))


@pytest.mark.parametrize(
    ("family", "config", "size"),
    [
        ("hopper", None, 32 * 1024**2),
        ("ampere", None, 8_519_680),
        ("ampere", ":4096:8", 32 * 1024**2),
        ("hopper", ":16:8", 128 * 1024),
        ("ampere", ":4096:2:16:8", 8_519_680),
        ("ampere", "nonsense", 8_519_680),
    ],
)
def test_workspaces_of_cublas(family: str, config: str | None, size: int) -> None:
    assert torch_cublas_bytes(family, config) == size
