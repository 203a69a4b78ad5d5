"""Memory outside PyTorch's allocator: the CUDA context with loaded kernels, and NCCL's buffers.

Priors, not measurements of the user's cluster: mean and standard deviation. Context: a process with PyTorch, cuBLAS and
Transformer Engine loaded on H100 and H200 keeps 0.5 to 1.0 GiB outside the allocator. NCCL: each communicator of more
than one rank that has been used keeps its channels' buffers (NCCL_BUFFSIZE 4 MiB a channel and peer by default), seen
as
0.1 to 0.5 GiB. Collective libraries are replaced by nothing in a simulated rank, so these stay priors until real
multi-GPU runs are imported.
"""

from __future__ import annotations

from dataclasses import dataclass

from estimator.job.settings import Settings

MIB = 1024**2

CONTEXT_BYTES = {"ampere": 600 * MIB, "ada": 500 * MIB, "hopper": 700 * MIB, "blackwell": 900 * MIB}
CONTEXT_SIGMA_BYTES = 150 * MIB
COMMUNICATOR_BYTES = 220 * MIB
COMMUNICATOR_SIGMA_BYTES = 80 * MIB


@dataclass(frozen=True, slots=True)
class Overhead:
    """Bytes outside the allocator on one rank, and their standard deviation."""

    context_bytes: int
    nccl_bytes: int
    sigma_bytes: float
    communicators: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        return self.context_bytes + self.nccl_bytes


def communicators(settings: Settings) -> tuple[str, ...]:
    """Names of the communicators with more than one rank that a training step uses."""
    p = settings.parallel
    sizes = {
        "tensor": p.tensor_model_parallel_size,
        "pipeline": p.pipeline_model_parallel_size,
        "context": p.context_parallel_size,
        "data x context": p.data_context_parallel_size,
        "optimizer instances": settings.sharding.num_distributed_optimizer_instances,
    }
    return tuple(name for name, size in sizes.items() if size > 1)


def overhead_of(settings: Settings, gpu_family: str) -> Overhead:
    names = communicators(settings)
    sigma = (CONTEXT_SIGMA_BYTES**2 + len(names) * COMMUNICATOR_SIGMA_BYTES**2) ** 0.5
    context = CONTEXT_BYTES.get(gpu_family, CONTEXT_BYTES["hopper"])
    return Overhead(context, len(names) * COMMUNICATOR_BYTES, sigma, names)
