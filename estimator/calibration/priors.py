"""What is assumed before anything is measured, each with its reason.

Coefficients are relative corrections of a component: 0 means that the timeline's bytes stand. Scales are relative to
the peak.
"""

from __future__ import annotations

from collections.abc import Iterable

from estimator import components as c
from estimator.job.settings import Stack

MIB = 1024**2

MAX_CORRECTION = 0.05
"""A component that wants more is a fault of the model, which is reported and never hidden by a coefficient."""

EXACT_SIGMA = 0.002
"""Counts times dtype sizes: only rounding of the allocator (512 bytes a buffer) is left."""
COUNTED_SIGMA = 0.01
"""Tensors that autograd saves: their sizes are known, which of them are alive is followed event by event."""
TRANSIENT_SIGMA = 0.02
"""Buffers whose life depends on the order of kernels, hooks and collectives."""

COMPONENT_SIGMA: dict[str, float] = {
    **dict.fromkeys((*c.STATES, c.BATCH, c.FP8_WEIGHTS), EXACT_SIGMA),
    **dict.fromkeys((*c.ACTIVATIONS, c.LOGITS), COUNTED_SIGMA),
}
"""Standard deviations of coefficients; TRANSIENT_SIGMA for every other component."""

UNACCOUNTED = "unaccounted"
"""Bytes that every rank has and no component holds."""
UNACCOUNTED_SIGMA_BYTES = 32 * MIB
MAX_UNACCOUNTED_BYTES = 128 * MIB

CONTEXT_BYTES = {"ampere": 600 * MIB, "ada": 500 * MIB, "hopper": 700 * MIB, "blackwell": 900 * MIB}
"""A process with PyTorch, cuBLAS and Transformer Engine loaded keeps 0.5 to 1.0 GiB outside of the allocator."""
CONTEXT_SIGMA_BYTES = 150 * MIB
COMMUNICATOR_BYTES = 220 * MIB
"""Buffers of a communicator that has been used (NCCL_BUFFSIZE 4 MiB a channel and peer): 0.1 to 0.5 GiB were seen."""
COMMUNICATOR_SIGMA_BYTES = 80 * MIB

PEAK_SCALE = 0.008
"""Scale of the peak's relative error before any run: most runs are within 0.1 %, a few off by several percent."""
ALLOCATOR_SCALE = 0.006
"""Scale of survival memory over peak: bisected to 0.25 %, and fragmentation depends on the order of events."""
DEGREES_OF_FREEDOM = 5.0
"""Of the Student t that stands for both: heavy tails, because a model that is wrong is wrong by percents."""


def component_sigma(name: str) -> float:
    """Standard deviation of a component's coefficient before any run."""
    return COMPONENT_SIGMA.get(name, TRANSIENT_SIGMA)


def stack_key(stack: Stack) -> str:
    """Versions that memory depends on, to the minor version: a calibration holds for all patches of it."""
    parts = (
        ("megatron_core", stack.megatron_core),
        ("transformer_engine", stack.transformer_engine),
        ("torch", stack.torch),
    )
    return ",".join(f"{name}={minor(version)}" for name, version in parts)


def minor(version: str) -> str:
    """ "2.11.0+cu130" as "2.11"."""
    return ".".join(version.partition("+")[0].split(".")[:2])


def known(names: Iterable[str]) -> list[str]:
    """Components in the order of the closed list."""
    wanted = set(names)
    return [name for name in c.MEANING if name in wanted and name != c.CALIBRATION]
