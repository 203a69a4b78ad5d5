"""Numba where it is installed: the simulator's loops run some hundred times faster, to the same numbers.

Without numba the same functions run as they stand, on numpy arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_F = TypeVar("_F", bound=Callable[..., object])

HAS_NUMBA = find_spec("numba") is not None


def compiled(function: _F) -> _F:
    """``numba.njit`` with its cache on disk, or ``function`` itself.

    Without numba's own memory management: nothing here allocates, and counting references of the arrays that are
    handed from function to function took half of the time.
    """
    if not HAS_NUMBA:
        return function
    import numba

    options = {"nogil": True, "_nrt": False, "error_model": "numpy"}
    try:
        jitted: _F = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # nowhere to keep the cache: a read-only installation and no home
        jitted = numba.njit(**options)(function)
    return jitted


_ONE = np.uint64(1)


def _close_gap(row: Ints, at: int, end: int) -> None:
    # Unsigned indices need no test for negative ones, so that the loop becomes vector moves (10 times faster).
    for i in range(np.uint64(at), np.uint64(end - 1)):
        row[i] = row[i + _ONE]


def _open_gap(row: Ints, at: int, end: int) -> None:
    last = np.uint64(end)
    for i in range(np.uint64(end - at)):
        row[last - i] = row[last - i - _ONE]


def _close_gap_by_slice(row: Ints, at: int, end: int) -> None:
    row[at : end - 1] = row[at + 1 : end]


def _open_gap_by_slice(row: Ints, at: int, end: int) -> None:
    row[at + 1 : end + 1] = row[at:end]


close_gap = compiled(_close_gap if HAS_NUMBA else _close_gap_by_slice)
"""Takes entry ``at`` out of the first ``end`` entries of a row: those behind it move down."""

open_gap = compiled(_open_gap if HAS_NUMBA else _open_gap_by_slice)
"""Makes room at entry ``at`` among the first ``end`` entries of a row: those from there on move up."""
