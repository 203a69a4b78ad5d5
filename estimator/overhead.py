"""Memory outside PyTorch's allocator: the CUDA context with loaded kernels, and NCCL's buffers.

Mean and standard deviation of one process, from the calibration: measured where runs had the card to themselves, else
priors (``estimator.calibration.priors``). Collective libraries are replaced by nothing in a simulated rank, so NCCL
stays a prior until real multi-GPU runs are imported.
"""

from __future__ import annotations

from dataclasses import dataclass

from estimator.calibration import Calibration
from estimator.job.settings import Settings
from estimator.model.dispatch_buffers import dispatch_buffer_bytes


@dataclass(frozen=True, slots=True)
class Overhead:
    """Bytes outside the allocator on one rank, and their standard deviation."""

    context_bytes: int
    nccl_bytes: int
    sigma_bytes: float
    communicators: tuple[str, ...]
    measured: bool = False
    """False: at least one of them is a prior."""
    dispatcher_bytes: int = 0
    """Buffers that the library which carries tokens to experts keeps (DeepEP, HybridEP)."""

    @property
    def total_bytes(self) -> int:
        return self.context_bytes + self.nccl_bytes + self.dispatcher_bytes


def communicators(settings: Settings) -> tuple[str, ...]:
    """Names of the communicators with more than one rank that a training step uses."""
    p = settings.parallel
    sizes = {
        "tensor": p.tensor_model_parallel_size,
        "pipeline": p.pipeline_model_parallel_size,
        "context": p.context_parallel_size,
        "data x context": p.data_context_parallel_size,
        "optimizer instances": settings.sharding.num_distributed_optimizer_instances,
        "experts": p.expert_model_parallel_size * p.expert_tensor_parallel_size,
        "expert data": p.expert_data_parallel_size if settings.model.moe else 1,
    }
    return tuple(name for name, size in sizes.items() if size > 1)


def overhead_of(settings: Settings, calibration: Calibration) -> Overhead:
    """Of one rank of the job."""
    names = communicators(settings)
    context, communicator = calibration.context, calibration.communicator
    dispatcher = dispatch_buffer_bytes(settings) if settings.model.moe else 0
    sigma = (context.sigma_bytes**2 + len(names) * communicator.sigma_bytes**2) ** 0.5
    measured = context.measured and (communicator.measured or not names)
    return Overhead(context.mean_bytes, len(names) * communicator.mean_bytes, sigma, names, measured, dispatcher)
