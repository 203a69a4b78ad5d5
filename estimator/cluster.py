"""The cards a job runs on: what a request says, resolved against the GPU table."""

from __future__ import annotations

from dataclasses import dataclass

from estimator.calibration import Calibration, choose
from estimator.catalog.gpus import Gpu, find_gpu
from estimator.errors import FieldProblem, JobError
from estimator.job.settings import Stack
from estimator.requests import ClusterRequest

MAX_GPUS = 1_000_000


@dataclass(frozen=True, slots=True)
class Cluster:
    """GPUs of one kind. ``usable_bytes`` of each: total minus what others hold."""

    gpu: Gpu
    num_gpus: int
    gpus_per_node: int
    total_bytes: int
    reserved_bytes: int
    memory_limit_bytes: int | None
    calibrations: tuple[Calibration, ...] = ()

    def calibration(self, stack: Stack) -> Calibration:
        """What was learned from runs on such cards with this stack."""
        return choose(self.calibrations, stack, self.gpu.family)

    @property
    def usable_bytes(self) -> int:
        return self.total_bytes - self.reserved_bytes


def resolve_cluster(request: ClusterRequest) -> Cluster:
    """Raises JobError naming the field for an unknown GPU or an impossible number."""
    problems: list[FieldProblem] = []
    gpu: Gpu | None = None
    try:
        gpu = find_gpu(request.gpu)
    except JobError as error:
        problems += [FieldProblem("cluster.gpu", p.message, p.suggestion) for p in error.problems]
    _positive(problems, "cluster.num_gpus", request.num_gpus, MAX_GPUS)
    if request.gpus_per_node is not None:
        _positive(problems, "cluster.gpus_per_node", request.gpus_per_node, 1024)
    for name in ("memory_limit_bytes", "total_bytes"):
        value = getattr(request, name)
        if value is not None:
            _positive(problems, f"cluster.{name}", value, 1 << 50)
    reserved = request.reserved_bytes or 0
    if reserved < 0:
        problems.append(FieldProblem("cluster.reserved_bytes", f"{reserved} is negative", "0 or more bytes"))
    if gpu is not None and not problems:
        total = request.total_bytes or gpu.total_bytes
        if reserved >= total:
            problems.append(
                FieldProblem(
                    "cluster.reserved_bytes", f"{reserved} leaves nothing of {total} bytes", "less than the card has"
                )
            )
    if problems or gpu is None:
        raise JobError(problems)
    per_node = request.gpus_per_node or min(request.num_gpus, gpu.default_gpus_per_node)
    return Cluster(gpu, request.num_gpus, per_node, total, reserved, request.memory_limit_bytes, request.calibrations)


def _positive(problems: list[FieldProblem], path: str, value: int, most: int) -> None:
    if value < 1 or value > most:
        problems.append(FieldProblem(path, f"{value} is not possible", f"a whole number from 1 to {most}"))
