"""A calibration as answers use it: correction of a peak, overheads, and the distribution of what is left."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from estimator.calibration import priors
from estimator.calibration.quantiles import LEVELS, QuantileTable

ALL = "all"
CONTENT_VERSION = "1"


@dataclass(frozen=True, slots=True)
class Constant:
    """Bytes outside of the allocator, mean and standard deviation of one process."""

    mean_bytes: int
    sigma_bytes: float
    measured: bool
    """False: a prior."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """One immutable version. Equal ids are equal content."""

    calibration_id: str
    stack: str
    """``priors.stack_key``; "" = any."""
    gpu_family: str
    coefficients: Mapping[str, float]
    """Relative correction by component, as applied."""
    unaccounted_bytes: int
    context: Constant
    communicator: Constant
    """One NCCL communicator."""
    peak: Mapping[str, QuantileTable]
    """Relative error of the corrected peak by sharding strategy; "all" for the others."""
    survival: Mapping[str, QuantileTable]
    """The same of the corrected survival memory, by "strategy/allocator setting"; "all/setting" for the others."""
    num_runs: int = 0
    document: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """Everything that ``GET /calibrations/{id}`` says."""

    def correction_bytes(self, components: Mapping[str, int]) -> int:
        """Bytes to add to a peak that consists of these components."""
        relative = sum(self.coefficients.get(name, 0.0) * num_bytes for name, num_bytes in components.items())
        return round(relative) + self.unaccounted_bytes

    def least_factor(self) -> tuple[float, int]:
        """(f, b): the corrected bytes of anything are at least f times its bytes plus b."""
        return min(1.0, 1.0 + min(self.coefficients.values(), default=0.0)), min(0, self.unaccounted_bytes)

    def peak_errors(self, strategy: str) -> QuantileTable:
        return self.peak.get(strategy) or self.peak[ALL]

    def survival_errors(self, strategy: str, allocator: str) -> QuantileTable:
        return self.survival.get(f"{strategy}/{allocator}") or self.survival[f"{ALL}/{allocator}"]

    def __hash__(self) -> int:
        return hash(self.calibration_id)


def from_document(document: Mapping[str, Any]) -> Calibration:
    """The inverse of what ``fit`` writes. Raises ValueError for a document of another kind."""
    try:
        if document["content_version"] != CONTENT_VERSION or tuple(document["levels"]) != LEVELS:
            raise ValueError("the calibration was written by another version")
        overhead = document["overhead"]
        return Calibration(
            calibration_id=document["calibration_id"],
            stack=document["stack"],
            gpu_family=document["gpu_family"],
            coefficients={row["name"]: row["applied"] for row in document["coefficients"] if row["applied"]},
            unaccounted_bytes=document["unaccounted"]["applied_bytes"],
            context=_constant(overhead["context"]),
            communicator=_constant(overhead["communicator"]),
            peak=_tables(document["errors"]["peak"]),
            survival=_tables(document["errors"]["survival"]),
            num_runs=document["provenance"]["num_runs"],
            document=document,
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"is no calibration: {error}") from error


def _constant(plain: Mapping[str, Any]) -> Constant:
    return Constant(int(plain["mean_bytes"]), float(plain["sigma_bytes"]), plain["source"] == "measured")


def _tables(plain: Mapping[str, Any]) -> dict[str, QuantileTable]:
    return {name: QuantileTable(tuple(row["quantiles"])) for name, row in plain.items()}


def canonical(document: Mapping[str, Any]) -> bytes:
    """The bytes that an id is made of: the same content in the same order, without id and time."""
    content = {k: v for k, v in document.items() if k not in ("calibration_id", "created_at")}
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def context_prior(gpu_family: str) -> Constant:
    mean = priors.CONTEXT_BYTES.get(gpu_family, priors.CONTEXT_BYTES["hopper"])
    return Constant(mean, priors.CONTEXT_SIGMA_BYTES, False)


def communicator_prior() -> Constant:
    return Constant(priors.COMMUNICATOR_BYTES, priors.COMMUNICATOR_SIGMA_BYTES, False)
