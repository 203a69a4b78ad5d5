"""Megatron-Core's DistributedDataParallel, with or without the distributed optimizer.

Source: megatron-core 0.19.2 distributed/param_and_grad_buffer.py:1150-1300 (flat parameter and gradient buffers; the
module's own storages are freed after both exist), optimizer/distrib_optimizer.py:347-470 and 2760-2790,
optimizer/optimizer.py:986-1110.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from estimator.components import MAIN_GRADIENTS, MAIN_PARAMETERS, OPTIMIZER_TEMPORARIES, PARAMETERS
from estimator.job.settings import DTYPE_BYTES, Settings
from estimator.model.parameters import Parameter
from estimator.sharding.base import SIDE, Stage, Strategy

_PARAMETER_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class FlatBucket:
    """A contiguous part of the flat buffers: [start, end) elements, and where each parameter lies."""

    start: int
    end: int
    spans: tuple[tuple[Parameter, int, int], ...]


def flat_buckets(
    parameters: tuple[Parameter, ...], bucket_size: int | None, ranks: int, sharded: bool
) -> list[FlatBucket]:
    """Parameters in reverse order, cut where a bucket has reached ``bucket_size`` elements.

    With the distributed optimizer parameters start at multiples of 64 elements, buckets end at multiples of
    lcm(ranks, 128), and a shared embedding has a bucket of its own.
    """
    buckets: list[FlatBucket] = []
    spans: list[tuple[Parameter, int, int]] = []
    bucket_start = position = 0

    def close() -> None:
        nonlocal spans, bucket_start, position
        if not spans:
            return
        if sharded:
            position = _round_up(position, math.lcm(ranks, _BUCKET_ALIGNMENT))
        buckets.append(FlatBucket(bucket_start, position, tuple(spans)))
        spans, bucket_start = [], position

    for parameter in reversed(parameters):
        if sharded:
            position = _round_up(position, _PARAMETER_ALIGNMENT)
            if parameter.shared_embedding:
                close()
        spans.append((parameter, position, position + parameter.num_elements))
        position += parameter.num_elements
        full = bucket_size is not None and position - bucket_start >= bucket_size
        if full or (sharded and parameter.shared_embedding):
            close()
    close()
    return buckets


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """Parameters of one model chunk, dtype and data-parallel group, flat: FP8 weights have a buffer of bytes apart,
    experts one that is sharded over expert data parallelism (distributed/distributed_data_parallel.py:126-290)."""

    parameters: tuple[Parameter, ...]
    buckets: list[FlatBucket]
    is_fp8: bool
    ranks: int


class DistributedDataParallel(Strategy):
    """``ddp`` (nothing sharded) or ``distopt`` (main weights and optimizer states sharded over DP x CP)."""

    def __init__(self, settings: Settings, stage: Stage) -> None:
        super().__init__(settings, stage)
        self.sharded = settings.sharding.strategy == "distopt"
        instances, parallel = settings.sharding.num_distributed_optimizer_instances, settings.parallel
        ranks = {False: 1, True: 1}
        if self.sharded:
            ranks[False] = parallel.data_context_parallel_size // instances
            ranks[True] = max(1, parallel.expert_data_parallel_size // instances)
        experts = (False, True) if settings.model.moe else (False,)
        self.buffers = [
            FlatBuffer(part, self._buckets(part, chunk, ranks[expert]), is_fp8, ranks[expert])
            for expert in experts
            for chunk, parameters in enumerate(stage.chunks)
            for is_fp8 in (False, True)
            if (part := tuple(p for p in parameters if stage.is_fp8(p) == is_fp8 and p.expert == expert))
        ]

    def _buckets(self, parameters: tuple[Parameter, ...], chunk: int, ranks: int) -> list[FlatBucket]:
        return flat_buckets(parameters, self._bucket_size(chunk), ranks, self.sharded)

    def _bucket_size(self, chunk: int) -> int | None:
        """Buckets are cut in the first chunk of the first stage alone (distributed/distributed_data_parallel.py:105,
        megatron/training/models/dist_utils.py:312-333)."""
        return self.settings.sharding.bucket_size if chunk == self.stage.pipeline_rank == 0 else None

    @property
    def gradient_dtype(self) -> str:
        return "float32" if self.settings.sharding.grad_reduce_in_fp32 else self.settings.runtime.params_dtype

    @property
    def _precision_aware(self) -> bool:
        return self.sharded and self.settings.optimizer.use_precision_aware_optimizer

    def wrap(self) -> None:
        for i, buffer in enumerate(self.buffers):
            total = buffer.buckets[-1].end
            if self.sharded:
                width = 1 if buffer.is_fp8 else self.stage.element_bytes
                self.s.alloc(f"param_data/{i}", total * width, PARAMETERS, SIDE)
            self.s.alloc(f"grad_data/{i}", total * DTYPE_BYTES[self.gradient_dtype], MAIN_GRADIENTS, SIDE)
            if self.sharded:
                for p in reversed(buffer.parameters):
                    self.s.free(f"module/{p.layer}/{p.name}")

    def build_optimizer(self) -> None:
        if self._precision_aware:
            return
        for i, n in enumerate(self.optimizer_shards()):
            self.s.alloc("copy", n * self.stage.element_bytes, OPTIMIZER_TEMPORARIES)
            self.s.alloc(f"main/{i}", n * 4, MAIN_PARAMETERS)
            self.s.free("copy")

    def optimizer_shards(self) -> list[int]:
        """Elements of this rank's part of each parameter: data-parallel rank 0 holds the first 1/ranks of each
        bucket."""
        if not self.sharded:
            return [p.num_elements for p in self.stage.parameters]
        return [n for buffer in self.buffers for n in self._shards(buffer)]

    def _shards(self, buffer: FlatBuffer) -> list[int]:
        shards = []
        for bucket in buffer.buckets:
            limit = bucket.start + (bucket.end - bucket.start) // buffer.ranks
            shards += [min(end, limit) - start for _, start, end in bucket.spans if start < limit]
        return shards

    def after_step(self) -> None:
        """FP8 weights are quantized from copies of all main shards in the compute dtype, shard by shard (TE 2.12
        pytorch/tensor/utils.py:60-160 cast_master_weights_to_fp8)."""
        shards = [n for buffer in self.buffers if buffer.is_fp8 for n in self._shards(buffer)]
        for i, n in enumerate(shards):
            self.s.alloc(f"cast/{i}", n * self.stage.element_bytes, OPTIMIZER_TEMPORARIES)
        for n in shards:
            self.s.transient("quantized", n, OPTIMIZER_TEMPORARIES)
        self.s.free(*(f"cast/{i}" for i in range(len(shards))))

    @property
    def master_weight_bytes(self) -> int:
        if not self._precision_aware:
            return 0
        optimizer = self.settings.optimizer
        if optimizer.store_param_remainders and optimizer.main_params_dtype == "float32":
            return 2
        return DTYPE_BYTES[optimizer.main_params_dtype]

    def copy_gradients(self, shards: list[int]) -> None:
        if self._precision_aware or self.gradient_dtype == "float32":
            return
        for i, n in enumerate(shards):
            self.s.alloc(f"grad_copy/{i}", n * 4, OPTIMIZER_TEMPORARIES)

    def zero_grad(self) -> None:
        self.s.free(*[name for name in self.s.live if name.startswith("grad_copy/")])
