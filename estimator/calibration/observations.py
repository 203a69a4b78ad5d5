"""Measured runs beside their predictions, as the fit takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from estimator.calibration.priors import known

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Observation:
    """One measured run of one rank, and what the estimator says of it. All sizes in bytes."""

    run_id: str
    fingerprint: str
    """Equal for repeats of one job on one rank."""
    model: str
    """Which model was trained: runs of one model are held out together."""
    strategy: str
    measured_peak: int
    predicted_peak: int
    components: Mapping[str, int]
    """Predicted bytes at the peak by component."""
    allocator: str = "default"
    method: str = "simulated"
    measured_persistent: int | None = None
    predicted_persistent: int | None = None
    measured_reserved: int | None = None
    measured_survival: int | None = None
    predicted_survival: int | None = None
    device_used: int | None = None
    num_communicators: int = 0
    seen: bool = False
    """The estimator was changed after looking at this run: it says nothing about how far answers are off."""


@dataclass(frozen=True)
class Table:
    """Observations as arrays, one row a run."""

    rows: Sequence[Observation]
    names: tuple[str, ...] = field(default=())

    @classmethod
    def of(cls, rows: Sequence[Observation]) -> Table:
        return cls(rows, tuple(known({name for row in rows for name in row.components})))

    def only(self, keep: NDArray[np.bool_]) -> Table:
        """The rows that are kept, with the arrays of this table rather than new ones."""
        found = Table([row for row, wanted in zip(self.rows, keep, strict=True) if wanted], self.names)
        for name in ("shares", "errors", "persistent_errors", "strategies", "seen", "fingerprint_codes"):
            found.__dict__[name] = getattr(self, name)[keep]
        return found

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def shares(self) -> Floats:
        """Column k: component k over the predicted peak. Last column: 1 GiB over it, for bytes that all runs share."""
        place = {name: k for k, name in enumerate(self.names)}
        result = np.zeros((len(self.rows), len(self.names) + 1))
        for i, row in enumerate(self.rows):
            for name, num_bytes in row.components.items():
                column = place.get(name)
                if column is not None:
                    result[i, column] = num_bytes
            result[i, -1] = 2**30
        result /= np.array([row.predicted_peak for row in self.rows], dtype=float).reshape(-1, 1)
        return result

    @cached_property
    def errors(self) -> Floats:
        """Measured over predicted peak, less one."""
        return np.array([row.measured_peak / row.predicted_peak - 1 for row in self.rows], dtype=float)

    @cached_property
    def persistent_errors(self) -> Floats:
        """The same of persistent bytes; NaN where they are not known."""
        return np.array(
            [
                row.measured_persistent / row.predicted_persistent - 1
                if row.measured_persistent and row.predicted_persistent
                else np.nan
                for row in self.rows
            ],
            dtype=float,
        )

    @cached_property
    def weights(self) -> Floats:
        """Repeats of one job count together as one run."""
        if not self.rows:
            return np.zeros(0)
        return np.asarray(1.0 / np.bincount(self.fingerprint_codes)[self.fingerprint_codes], dtype=float)

    @cached_property
    def fingerprint_codes(self) -> Ints:
        """A small number for each fingerprint."""
        codes: dict[str, int] = {}
        return np.array([codes.setdefault(row.fingerprint, len(codes)) for row in self.rows], dtype=np.int64)

    @cached_property
    def strategies(self) -> NDArray[np.str_]:
        return np.array([row.strategy for row in self.rows], dtype=np.str_)

    @cached_property
    def seen(self) -> NDArray[np.bool_]:
        return np.array([row.seen for row in self.rows], dtype=bool)

    def folds(self, at_most: int = 10) -> Ints:
        """A fold for each row, so that all runs of a model are in one; largest models first into the emptiest fold."""
        names, index, counts = np.unique([row.model for row in self.rows], return_inverse=True, return_counts=True)
        number = min(at_most, len(names))
        load = np.zeros(max(1, number))
        fold_of = np.zeros(len(names), dtype=np.int64)
        for model in sorted(range(len(names)), key=lambda m: (-int(counts[m]), str(names[m]))):
            fold_of[model] = int(np.argmin(load))
            load[fold_of[model]] += counts[model]
        return np.asarray(fold_of[index], dtype=np.int64)

    @property
    def num_models(self) -> int:
        return len({row.model for row in self.rows})
