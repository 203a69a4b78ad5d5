"""Amounts of memory as texts print them, to exact bytes.

A printed "15.25 GiB" stands for every number of bytes that rounds to it: :class:`Quantity` keeps the width of the last
printed digit, so that nothing downstream claims more digits than the text has. What "GB" means depends on who printed
it (PyTorch's GiB is binary, Megatron's "MB" is 2**20, Bridge's "GB" is 1e9): the caller says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

BINARY: Mapping[str, int] = {
    "b": 1,
    "byte": 1,
    "bytes": 1,
    **dict.fromkeys(("k", "kb", "kib"), KIB),
    **dict.fromkeys(("m", "mb", "mib"), MIB),
    **dict.fromkeys(("g", "gb", "gib"), GIB),
    **dict.fromkeys(("t", "tb", "tib"), TIB),
    **dict.fromkeys(("p", "pb", "pib"), 1 << 50),
    **dict.fromkeys(("e", "eb", "eib"), 1 << 60),
}
"""Units of programs that divide by powers of 1024 whatever they call it: PyTorch (c10/util's format_size), Megatron-LM
("MB", training/utils/common_utils.py), DeepSpeed ("GB", runtime/utils.py see_memory_usage), the kernel ("kB")."""

DECIMAL: Mapping[str, int] = {**BINARY, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
"""Units of programs that divide by powers of 1000: Megatron-Bridge's memory report (megatron-bridge 0.6.2,
training/utils/train_utils.py:1285-1294)."""

AMOUNT = r"(?<![\d.])(\d{1,24}(?:\.\d{1,9})?)\s{0,8}(bytes|byte|[KMGTPE]iB|[kKMGTPE]B|B)\b"
"""Two groups: number and unit. Bounded, so that no text can make it slow."""

AMOUNT_PATTERN = re.compile(AMOUNT)
MAX_BYTES = 1 << 70
"""Above any number that means an amount of memory; larger ones are unknown."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """An amount as printed. ``resolution_bytes`` is the width of its last digit (1 for plain bytes)."""

    num_bytes: int
    resolution_bytes: int


def quantity(number: str, unit: str, units: Mapping[str, int] = BINARY) -> Quantity | None:
    """Exact bytes of a printed number; None for an unknown unit or a number that is no amount of memory.

    >>> quantity("2.00", "GiB")
    Quantity(num_bytes=2147483648, resolution_bytes=10737418)
    """
    scale = units.get(unit.lower())
    if scale is None or len(number) > 40:
        return None
    whole, _, decimals = number.partition(".")
    if not (whole or decimals) or not (whole + decimals).isascii() or not (whole + decimals).isdigit():
        return None
    value = int(Decimal(number if whole else "0" + number) * scale + Decimal("0.5"))
    if value > MAX_BYTES:
        return None
    return Quantity(value, max(1, scale // 10 ** len(decimals)))
