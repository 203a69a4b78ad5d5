"""How far the estimate is from what was measured: records in, errors by group out."""

from estimator.validation.comparison import Row
from estimator.validation.dispatch import compare_record
from estimator.validation.records import RecordError, read_records
from estimator.validation.summary import QUANTITIES, Summary, as_markdown, summarise

__all__ = [
    "QUANTITIES",
    "RecordError",
    "Row",
    "Summary",
    "as_markdown",
    "compare_record",
    "read_records",
    "summarise",
]
