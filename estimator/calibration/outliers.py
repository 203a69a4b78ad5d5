"""Runs that do not measure the job that they name: found by what gives them away, listed, left out of the fit.

A large error alone is no reason: it may be the model's, and then it belongs into the interval. What counts is evidence
that the run itself is wrong: memory on the card that the process does not hold, states that contradict the job,
repeats that disagree. A simulated run is laid out by the profiler itself, so that only states that another world size
explains speak against it. If many runs of a group contradict their job, the model is wrong and they stay.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from estimator import components as c
from estimator.calibration import priors
from estimator.calibration.observations import Observation, Table

GIB = 2**30
FOREIGN_BYTES = 4 * GIB
"""Beyond context and communicators: no library of the job itself keeps as much outside of the allocator."""
REPEAT_TOLERANCE = 0.02
STATES_TOLERANCE = 0.05
FAR = 0.25
"""Without persistent bytes: no error of the model was ever as large."""
ROBUST_Z = 8.0
EXPLAINED = 0.02
OTHER_WORLDS = tuple(2.0**k for k in range(-6, 7) if k)
"""Sizes of a rank's shard, relative to that in the world that the run names."""
_STATES = (c.OPTIMIZER_STATES, c.MAIN_PARAMETERS)
SHARDED = {
    "distopt": _STATES,
    "optim": _STATES,
    "optim_grads": (*_STATES, c.MAIN_GRADIENTS),
    "optim_grads_params": (*_STATES, c.MAIN_GRADIENTS, c.PARAMETERS),
}
"""What shrinks with the world size."""
MAX_SHARE = 0.05
"""If more runs of a strategy look wrong, it is the model."""


@dataclass(frozen=True, slots=True)
class Outlier:
    run_id: str
    reason: str
    error: float
    """Measured over predicted peak, less one."""

    def as_dict(self) -> dict[str, object]:
        return {"run_id": self.run_id, "reason": self.reason, "error": round(self.error, 6)}


@dataclass(frozen=True, slots=True)
class Screened:
    keep: NDArray[np.bool_]
    outliers: tuple[Outlier, ...]
    suspicious: tuple[str, ...]
    """Strategies with so many contradicting runs that these were kept."""


def screen(table: Table, gpu_family: str) -> Screened:
    """Which rows to fit to, and why not the others."""
    reasons: dict[int, str] = {}
    _shared_cards(table, gpu_family, reasons)
    _repeats(table, reasons)
    suspicious = _contradictions(table, reasons)
    keep = np.ones(len(table), dtype=bool)
    keep[list(reasons)] = False
    found = tuple(Outlier(table.rows[i].run_id, reasons[i], float(table.errors[i])) for i in sorted(reasons))
    return Screened(keep, found, suspicious)


def _shared_cards(table: Table, gpu_family: str, reasons: dict[int, str]) -> None:
    context = priors.CONTEXT_BYTES.get(gpu_family, priors.CONTEXT_BYTES["hopper"])
    for i, row in enumerate(table.rows):
        if row.device_used is None or row.measured_reserved is None:
            continue
        own = row.measured_reserved + context + row.num_communicators * priors.COMMUNICATOR_BYTES
        foreign = row.device_used - own
        if foreign > FOREIGN_BYTES:
            reasons[i] = f"another process held the card: {foreign / GIB:.1f} GiB are in use beyond this process"


def _repeats(table: Table, reasons: dict[int, str]) -> None:
    groups: dict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(table.rows):
        if i not in reasons:
            groups[row.fingerprint].append(i)
    for members in groups.values():
        if len(members) < 3:
            continue
        peaks = np.array([table.rows[i].measured_peak for i in members], dtype=float)
        middle = float(np.median(peaks))
        for i, peak in zip(members, peaks, strict=True):
            if abs(peak / middle - 1) > REPEAT_TOLERANCE:
                reasons[i] = f"differs by {100 * (peak / middle - 1):+.1f} % from {len(members) - 1} repeats of it"


def _contradictions(table: Table, reasons: dict[int, str]) -> tuple[str, ...]:
    """States that contradict the job (another world size, another model), strategy by strategy."""
    suspicious = []
    alive = np.array([i not in reasons for i in range(len(table))], dtype=bool)
    for strategy in np.unique(table.strategies[alive]) if alive.any() else ():
        members = np.flatnonzero(alive & (table.strategies == strategy))
        found: dict[int, str] = {}
        found |= _far(table.persistent_errors, members, STATES_TOLERANCE, "persistent bytes")
        found = {i: why for i, why in found.items() if _may_be_another_job(table.rows[i])}
        unknown = members[np.isnan(table.persistent_errors[members])]
        found |= _far(table.errors, unknown, FAR, "the peak")
        if len(found) > max(1, int(MAX_SHARE * len(members))):
            suspicious.append(str(strategy))
        else:
            reasons |= found
    return tuple(suspicious)


def _may_be_another_job(row: Observation) -> bool:
    """Whether the states can be those of another job: a simulated one differs in its world size or not at all."""
    if row.method != "simulated":
        return True
    measured, predicted = row.measured_persistent, row.predicted_persistent
    sharded = sum(row.components.get(name, 0) for name in SHARDED.get(row.strategy, ()))
    if not measured or not predicted or not sharded:
        return False
    return any(abs(measured / (predicted + sharded * (factor - 1)) - 1) < EXPLAINED for factor in OTHER_WORLDS)


def _far(errors: NDArray[np.float64], members: NDArray[np.int64], tolerance: float, what: str) -> dict[int, str]:
    members = members[~np.isnan(errors[members])]
    if not len(members):
        return {}
    middle = float(np.median(errors[members])) if len(members) >= 8 else 0.0
    spread = 1.4826 * float(np.median(np.abs(errors[members] - middle))) if len(members) >= 8 else 0.0
    limit = max(tolerance if len(members) >= 8 else FAR, ROBUST_Z * spread)
    return {
        int(i): f"{what} {100 * errors[i]:+.1f} % off: another world size or another job than it says"
        for i in members
        if abs(errors[i] - middle) > limit
    }
