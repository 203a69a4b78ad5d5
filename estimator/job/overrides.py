"""Overrides as people paste them: Hydra-style strings and Python ``cfg.… = …`` lines, told apart and read."""

from __future__ import annotations

import re
from collections.abc import Sequence

from estimator.errors import FieldProblem, JobError
from estimator.job.hydra_lines import read_hydra
from estimator.job.operations import MAX_OVERRIDE_CHARS, MAX_OVERRIDES, MAX_TOTAL_CHARS, Operation, Unreadable
from estimator.job.python_lines import read_python

_PYTHON = re.compile(r"\s*(?:(?:cfg|config)\s*[.\[]|import\s|from\s+[\w.]+\s+import\b|del\s|#|\"\"\"|''')")
_HYDRA_LINE = re.compile(r"\s*(?:\+\+|\+|~)?[A-Za-z_]\w*\.[\w.]+=")


def read_overrides(overrides: Sequence[str], prefix: str = "job.overrides") -> list[Operation]:
    """All operations in order. Raises JobError with every override that cannot be read."""
    problems: list[FieldProblem] = []
    operations: list[Operation] = []
    if isinstance(overrides, str) or not isinstance(overrides, (list, tuple)):
        raise JobError([FieldProblem(prefix, "must be a list of texts", '["train.micro_batch_size=1"]')])
    if len(overrides) > MAX_OVERRIDES:
        raise JobError([FieldProblem(prefix, f"has {len(overrides)} entries", f"at most {MAX_OVERRIDES}")])
    if sum(len(str(text)) for text in overrides) > MAX_TOTAL_CHARS:
        raise JobError([FieldProblem(prefix, f"is longer than {MAX_TOTAL_CHARS} characters in all")])
    for index, text in enumerate(overrides):
        where = f"{prefix}[{index}]"
        try:
            operations.extend(read_override(text, where))
        except Unreadable as error:
            problems.append(FieldProblem(where, str(error), error.suggestion))
    if problems:
        raise JobError(problems)
    return operations


def read_override(text: str, where: str) -> list[Operation]:
    """One entry: a Hydra string, or one or more lines of Python. Raises Unreadable."""
    if not isinstance(text, str):
        raise Unreadable(f"must be a text, not {type(text).__name__}")
    if len(text) > MAX_OVERRIDE_CHARS:
        raise Unreadable(f"is longer than {MAX_OVERRIDE_CHARS} characters")
    if "\x00" in text:
        raise Unreadable("contains a null byte")
    if not text.strip():
        raise Unreadable("is empty", "train.micro_batch_size=1")
    if _PYTHON.match(text):
        return read_python(text, where)
    lines = [line.strip().removesuffix("\\").strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if len(lines) > 1 and all(_HYDRA_LINE.match(line) for line in lines):
        return [read_hydra(line, where) for line in lines]
    if len(lines) > 1:
        return read_python(text, where)
    return [read_hydra(text.strip().removesuffix("\\"), where)]
