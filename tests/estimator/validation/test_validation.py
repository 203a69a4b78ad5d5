"""The repository's own measured runs against the estimate, and how records are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from estimator.validation import RecordError, compare_record, read_records, summarise
from estimator.validation.summary import figures

MEASURED = Path(__file__).resolve().parents[3] / "estimator" / "data" / "measured"


def test_the_check_split_of_dense_jobs_stays_as_close_as_it_was_measured() -> None:
    """Nothing was tuned to these runs: the bounds are what the first comparison gave."""
    with (MEASURED / "dense_check.jsonl").open() as lines:
        rows = [compare_record(record) for record in read_records(lines, "dense_check.jsonl")]
    summary = summarise(rows)
    assert summary.num_rows == 60
    assert summary.refused == {"not modelled: model.transformer_impl": 5}
    assert summary.groups["peak"]["all"].median < 0.001
    assert summary.groups["persistent"]["all"].median < 0.001
    within_one_percent = sum(abs(row.error("peak")) < 0.01 for row in rows if row.refused is None)
    assert within_one_percent >= 44


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "f:1: is not JSON"),
        (b"\xff\xfe{}", "f:1: is not JSON"),
        ("[]", "f:1: is list"),
        ('{"run_id": "a"}', "has no job, phases"),
    ],
)
def test_a_line_that_is_no_record_is_named(line: str | bytes, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        list(read_records([line], "f"))


def test_figures_of_a_group() -> None:
    found = figures([0.01, -0.02, 0.03, -0.1])
    assert (found.count, found.median, found.worst, found.percentile_90) == (4, 0.025, 0.1, 0.1)
    assert found.mean == pytest.approx(0.04)
