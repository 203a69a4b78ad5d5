"""Memory outside of the allocator, from runs that had the card to themselves.

A simulated rank has a context and no communicator; communicators are learned from real runs alone, and stay priors
until there are some.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from estimator.calibration import priors
from estimator.calibration.observations import Observation

REPEATABILITY_BYTES = 16 * priors.MIB


def overheads(rows: Sequence[Observation], gpu_family: str) -> dict[str, Any]:
    """Mean and standard deviation of the context and of one communicator."""
    outside = [
        (row, row.device_used - row.measured_reserved)
        for row in rows
        if row.device_used is not None and row.measured_reserved is not None
    ]
    prior = priors.CONTEXT_BYTES.get(gpu_family, priors.CONTEXT_BYTES["hopper"])
    alone = [num_bytes for row, num_bytes in outside if row.method == "simulated" or not row.num_communicators]
    context = _updated(alone, prior, priors.CONTEXT_SIGMA_BYTES)
    real = [
        (num_bytes - context["mean_bytes"]) / row.num_communicators
        for row, num_bytes in outside
        if row.method == "real" and row.num_communicators
    ]
    communicator = _updated(real, priors.COMMUNICATOR_BYTES, priors.COMMUNICATOR_SIGMA_BYTES)
    return {"context": context, "communicator": communicator}


def _updated(samples: Sequence[float], prior: float, sigma: float) -> dict[str, Any]:
    """A normal mean with a normal prior; the deviation is that of one more process."""
    n = len(samples)
    values = np.asarray(samples, dtype=float)
    spread = max(REPEATABILITY_BYTES, float(values.std(ddof=1)) if n > 1 else sigma / 2)
    precision = 1 / sigma**2 + n / spread**2
    mean = (prior / sigma**2 + float(values.sum()) / spread**2) / precision
    return {
        "mean_bytes": round(mean),
        "sigma_bytes": round(math.hypot(precision**-0.5, spread) if n else sigma),
        "num_runs": n,
        "source": "measured" if n else "prior",
    }
