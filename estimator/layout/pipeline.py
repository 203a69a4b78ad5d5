"""How decoder layers are dealt to pipeline stages, and to the model chunks of a stage when the pipeline is interleaved.

Source: megatron-core 0.19.2, transformer/transformer_block.py:70-197 get_num_layers_to_build,
transformer/pipeline_parallel_layer_layout.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from estimator.job.settings import ModelSettings, ParallelSettings
from estimator.layout.layout_string import parse_layout


@dataclass(frozen=True, slots=True)
class ChunkShare:
    """One model chunk (virtual stage) of a rank: its decoder layers, and whether it embeds tokens or computes the
    loss."""

    index: int
    num_layers: int
    pre_process: bool
    post_process: bool
    first_local_layer: int
    """Index of its first layer among the layers of this rank, chunk after chunk."""
    first_layer: int
    """Index of its first layer in the whole model."""

    @property
    def local_layers(self) -> range:
        return range(self.first_local_layer, self.first_local_layer + self.num_layers)


@dataclass(frozen=True, slots=True)
class StageShare:
    """One pipeline stage: its decoder layers, and whether it embeds tokens and computes the loss."""

    pipeline_rank: int
    num_layers: int
    pre_process: bool
    post_process: bool
    chunks: tuple[ChunkShare, ...]
    """In the order of virtual stages; one without interleaving."""


def layers_by_stage(model: ModelSettings, parallel: ParallelSettings) -> tuple[int, ...]:
    """Decoder layers of each stage; raises ValueError where Megatron-Core would refuse the split."""
    return tuple(share.num_layers for share in stage_shares(model, parallel))


def layers_by_chunk(model: ModelSettings, parallel: ParallelSettings) -> tuple[tuple[int, ...], ...]:
    """Decoder layers by pipeline rank and virtual stage; raises ValueError where Megatron-Core would refuse."""
    stages, layers = parallel.pipeline_model_parallel_size, model.num_layers
    chunks = parallel.num_model_chunks
    if stages == 1:
        return ((layers,),)
    if parallel.pipeline_model_parallel_layout is not None:
        return _written_out(parallel.pipeline_model_parallel_layout, layers, stages, chunks)
    counts = _layers_of_ranks(layers, parallel)
    if any(n % chunks for n in counts):
        raise ValueError(f"{max(counts)} layers of a stage do not divide by {chunks} virtual stages")
    table = [[n // chunks] * chunks for n in counts]
    table[0][0] -= parallel.account_for_embedding_in_pipeline_split
    table[-1][-1] -= parallel.account_for_loss_in_pipeline_split
    if min(table[0][0], table[-1][-1]) < 0:
        raise ValueError("a virtual stage has no layer that its embedding or loss could stand for")
    return tuple(map(tuple, table))


def _written_out(
    layout: str | tuple[tuple[str, ...], ...], layers: int, stages: int, chunks: int
) -> tuple[tuple[int, ...], ...]:
    letters = parse_layout(layout)
    if len(letters) != stages * chunks:
        raise ValueError(f"the pipeline layout has {len(letters)} stages, not {stages} x {chunks}")
    text = "".join(letters)
    if text[:1] != "E" or text[-1:] != "L" or text.count("E") != 1 or text.count("L") != 1:
        raise ValueError("a pipeline layout must begin with the only embedding and end with the only loss")
    if text.count("t") != layers:
        raise ValueError(f"the pipeline layout has {text.count('t')} decoder layers, the model {layers}")
    return tuple(tuple(letters[v * stages + p].count("t") for v in range(chunks)) for p in range(stages))


def _layers_of_ranks(layers: int, parallel: ParallelSettings) -> list[int]:
    """Slots of each rank over all its chunks; embedding and loss are counted as layers where the job says so."""
    stages = parallel.pipeline_model_parallel_size
    first, last = parallel.num_layers_in_first_pipeline_stage, parallel.num_layers_in_last_pipeline_stage
    if first is not None or last is not None:
        fixed = [n for n in (first, last) if n is not None]
        middle_stages = stages - len(fixed)
        middle_layers = layers - sum(fixed)
        if (
            middle_layers < 0
            or (middle_stages and middle_layers % middle_stages)
            or (not middle_stages and middle_layers)
        ):
            raise ValueError(f"{layers} layers cannot be split over {stages} stages with {first} first and {last} last")
        middle = [middle_layers // middle_stages] * middle_stages if middle_stages else []
        return ([first] if first is not None else []) + middle + ([last] if last is not None else [])
    slots = layers
    slots += parallel.account_for_embedding_in_pipeline_split
    slots += parallel.account_for_loss_in_pipeline_split
    if slots % stages:
        raise ValueError(f"{slots} layers (embedding and loss counted as set) do not divide by {stages} stages")
    return [slots // stages] * stages


def stage_shares(model: ModelSettings, parallel: ParallelSettings) -> tuple[StageShare, ...]:
    """Every pipeline stage, with its model chunks. Raises ValueError as :func:`layers_by_chunk`."""
    table = layers_by_chunk(model, parallel)
    stages, num_chunks = len(table), len(table[0])
    chunks: list[list[ChunkShare]] = [[] for _ in range(stages)]
    first_layer = 0
    for v in range(num_chunks):
        for p in range(stages):
            n = table[p][v]
            pre, post = p == v == 0, p == stages - 1 and v == num_chunks - 1
            chunks[p].append(ChunkShare(v, n, pre, post, sum(table[p][:v]), first_layer))
            first_layer += n
    return tuple(
        StageShare(p, sum(table[p]), chunks[p][0].pre_process, chunks[p][-1].post_process, tuple(chunks[p]))
        for p in range(stages)
    )
