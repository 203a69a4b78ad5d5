"""The calibrations that come with this version, and the choice among them and those that a user activated."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from estimator.calibration.apply import Calibration, from_document
from estimator.calibration.priors import stack_key
from estimator.job.settings import Stack

FOLDER = Path(__file__).resolve().parents[1] / "data" / "calibrations"


@cache
def shipped() -> tuple[Calibration, ...]:
    """By GPU family; written by ``oombudsman calibrate --ship``."""
    return tuple(from_document(json.loads(path.read_text())) for path in sorted(FOLDER.glob("*.json")))


def choose(active: Iterable[Calibration], stack: Stack, gpu_family: str) -> Calibration:
    """The active one of this stack and family; else the shipped one of the family, whatever its stack; else Hopper's
    for its distributions (its context is another family's: :func:`estimator.overhead.overhead_of` does not take it)."""
    key = stack_key(stack)
    for calibration in active:
        if (calibration.stack, calibration.gpu_family) == (key, gpu_family):
            return calibration
    found = {c.gpu_family: c for c in shipped()}
    return found.get(gpu_family) or found["hopper"]


def describe(calibration: Calibration, stack: Stack, gpu_family: str) -> list[str]:
    """What an answer has to say about the calibration it used."""
    notes = []
    runs = calibration.num_runs
    fitted: Any = (calibration.document.get("provenance") or {}).get("num_fitted", runs)
    seen: Any = (calibration.document.get("provenance") or {}).get("num_seen_before", 0)
    if fitted - seen <= 0:
        notes.append("how far the estimate may be off is a prior: no run that was held out has been calibrated on")
    if calibration.gpu_family != gpu_family or (calibration.stack and calibration.stack != stack_key(stack)):
        notes.append(
            f"calibrated on {calibration.stack or 'any stack'}, {calibration.gpu_family} GPUs: not this stack and card"
        )
    return notes
