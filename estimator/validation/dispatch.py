"""Which kind of record it is decides how it is compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from estimator.validation import comparison, megatron_tests
from estimator.validation.comparison import Row


def compare_record(record: Mapping[str, Any], with_survival: bool = False) -> Row:
    """A record of the profiler or of Megatron-LM's tests beside the estimate of the same rank.

    ``with_survival``: predict "survival", too, of the profiler's. Raises ValueError naming the field if the record's
    job cannot be read.
    """
    if megatron_tests.MARK in record:
        return megatron_tests.compare_megatron_test(record)
    return comparison.compare_record(record, with_survival)
