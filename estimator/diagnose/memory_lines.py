"""Lines in which training programs report their memory, as a table of formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from estimator.diagnose.evidence import Fact, Reading, Span
from estimator.diagnose.units import BINARY, DECIMAL, quantity

_NUMBER = r"(\d{1,12}(?:\.\d{1,6})?)"


@dataclass(frozen=True, slots=True)
class Format:
    """``fields``: fact name -> pattern with the number (and the unit, if printed) as groups."""

    source: str
    needle: str
    fields: tuple[tuple[str, re.Pattern[str]], ...]
    unit: str | None
    units: Mapping[str, int]
    where: str


def _fields(**patterns: str) -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple((f"{name}_bytes", re.compile(pattern)) for name, pattern in patterns.items())


FORMATS: tuple[Format, ...] = (
    Format(
        "megatron",
        "memory (MB)",
        _fields(
            allocated=rf"\| ?allocated: {_NUMBER}",
            max_allocated=rf"\| ?max allocated: {_NUMBER}",
            reserved=rf"\| ?reserved: {_NUMBER}",
            max_reserved=rf"\| ?max reserved: {_NUMBER}",
            device_used=rf"total device memory used: {_NUMBER}",
        ),
        "MB",
        BINARY,
        "megatron-core 0.19.2 training/utils/common_utils.py:313-330: 2**20; printed by data-parallel rank 0",
    ),
    Format(
        "bridge",
        "memory (GB)",
        _fields(
            allocated=rf"mem-allocated-gigabytes: {_NUMBER}|current_allocated_mem: {_NUMBER}",
            reserved=rf"mem-reserved-gigabytes: {_NUMBER}|current_reserved_mem: {_NUMBER}",
            max_allocated=rf"mem-max-allocated-gigabytes: {_NUMBER}|peak_allocated_mem: {_NUMBER}",
            max_reserved=rf"mem-max-reserved-gigabytes: {_NUMBER}|peak_reserved_mem: {_NUMBER}",
        ),
        "GB",
        DECIMAL,
        "megatron-bridge 0.6.2 training/utils/train_utils.py:1225-1298: 1e9, five significant digits",
    ),
    Format(
        "theoretical",
        "Theoretical memory footprints",
        _fields(
            weight_and_optimizer=rf"weight and optimizer={_NUMBER} (MB|GB)",
            activation=rf"activation={_NUMBER} (MB|GB)",
            theoretical_total=rf"total={_NUMBER} (MB|GB)",
        ),
        None,
        BINARY,
        "megatron-core 0.19.2 training/theoretical_memory_usage.py:481-484: 2**20",
    ),
    Format(
        "torchtitan",
        "memory: ",
        _fields(max_reserved=rf"memory: {{1,3}}{_NUMBER} ?(GiB)"),
        None,
        BINARY,
        "torchtitan components/metrics.py: max reserved",
    ),
    Format(
        "deepspeed",
        "Max_MA",
        _fields(
            allocated=rf"\bMA {_NUMBER} (GB)",
            max_allocated=rf"Max_MA {_NUMBER} (GB)",
            reserved=rf"\bCA {_NUMBER} (GB)",
            max_reserved=rf"Max_CA {_NUMBER} (GB)",
        ),
        None,
        BINARY,
        "DeepSpeed runtime/utils.py see_memory_usage: 2**30, allocated and cached",
    ),
    Format(
        "deepspeed_host",
        "CPU Virtual Memory",
        _fields(host_used=rf"used = {_NUMBER} (GB)"),
        None,
        BINARY,
        "DeepSpeed runtime/utils.py see_memory_usage",
    ),
)

NEEDLES = tuple(dict.fromkeys(f.needle for f in FORMATS))
_RANK = re.compile(r"\[Rank (\d{1,7})\]")
_AFTER = re.compile(r"\(after (\d{1,9}) iterations\)")
_STEP = re.compile(r"\bstep: {1,6}(\d{1,9})")


def read_memory_line(
    text: str, rank: int | None, iteration: int | None, place: Callable[[int, int], Span]
) -> Reading | None:
    """The memory that a line reports, None if it reports none."""
    for form in FORMATS:
        if form.needle not in text:
            continue
        facts = []
        for name, pattern in form.fields:
            match = pattern.search(text)
            if match is None:
                continue
            groups = [group for group in match.groups() if group]
            amount = quantity(groups[0], form.unit or groups[-1], form.units)
            if amount is not None:
                span = place(match.start(), match.end())
                facts.append(Fact(name, amount.num_bytes, span, amount.resolution_bytes))
        if not facts:
            continue
        own = _RANK.search(text)
        after = _AFTER.search(text) or _STEP.search(text)
        return Reading(
            form.source,
            int(own[1]) if own else rank,
            int(after[1]) if after else iteration,
            tuple(facts),
        )
    return None
