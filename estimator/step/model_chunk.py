"""One model chunk of a rank: its programs, and the blocks that move tensors between stages."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache

from estimator.components import ACTIVATION_GRADIENTS, BATCH, RESIDUAL
from estimator.job.settings import ModelSettings
from estimator.layout import ChunkShare, StageShare
from estimator.model.parameters import Parameter, Split, stage_parameters
from estimator.model.program import Program
from estimator.model.shapes import Shapes
from estimator.sharding.base import Stage
from estimator.step.recompute import Chunk
from estimator.timeline import Block, Scribe, rounded

_BATCH_BYTES_PER_TOKEN = 8 + 8 + 4 + 8
"""Tokens, labels and positions as int64, the loss mask as FP32."""


@dataclass(slots=True)
class ModelChunk:
    """What the composer runs for one chunk. ``groups`` number layers as the rank does, chunk after chunk."""

    share: ChunkShare
    groups: tuple[Chunk, ...]
    embedding: Program | None
    head: Program | None

    @property
    def input_layer(self) -> int:
        """Scope of the chunk's input: where a layer before its first would leave its output."""
        return self.share.first_local_layer - 1

    @property
    def last_layer(self) -> int:
        return self.share.first_local_layer + self.share.num_layers - 1

    @property
    def is_empty(self) -> bool:
        return not (self.share.num_layers or self.embedding or self.head)

    @property
    def loads_batch(self) -> bool:
        return self.share.pre_process or self.share.post_process


def in_this_rank(groups: tuple[Chunk, ...], share: ChunkShare) -> tuple[Chunk, ...]:
    """Recompute groups, counted within a chunk, with the layers' numbers on this rank."""
    return tuple(Chunk(tuple(share.first_local_layer + i for i in g.layers), g.recomputed) for g in groups)


def layers_in_fp8(model: ModelSettings, share: StageShare) -> frozenset[int]:
    """Numbers on this rank of the layers whose products run in FP8."""
    if not model.fp8:
        return frozenset()
    return frozenset(
        chunk.first_local_layer + i
        for chunk in share.chunks
        for i in range(chunk.num_layers)
        if model.fp8.applies_to(chunk.first_layer + i, model.num_layers)
    )


def layers_with_experts(model: ModelSettings, share: StageShare) -> frozenset[int]:
    """Numbers on this rank of the layers that are mixtures of experts."""
    if not model.moe:
        return frozenset()
    return frozenset(
        chunk.first_local_layer + i
        for chunk in share.chunks
        for i in range(chunk.num_layers)
        if model.has_experts(chunk.first_layer + i)
    )


@lru_cache(maxsize=1024)
def chunk_parameters(model: ModelSettings, split: Split, share: ChunkShare) -> tuple[Parameter, ...]:
    """Parameters of one chunk, layers numbered as on the rank."""
    parameters = stage_parameters(
        model, split, share.num_layers, share.pre_process, share.post_process, share.first_layer if model.moe else 0
    )
    if not share.first_local_layer:
        return parameters
    return tuple(p if p.layer is None else replace(p, layer=p.layer + share.first_local_layer) for p in parameters)


def parameters_by_chunk(model: ModelSettings, split: Split, share: StageShare) -> tuple[tuple[Parameter, ...], ...]:
    """Parameters of every chunk of a rank; a tied table is used by one chunk as embedding, by another as output."""
    return tuple(chunk_parameters(model, split, chunk) for chunk in share.chunks)


@lru_cache(maxsize=256)
def stage_of(model: ModelSettings, split: Split, share: StageShare, x: Shapes) -> Stage:
    """What the rank holds, for its strategy; the same object for all settings that do not move parameters."""
    by_chunk = parameters_by_chunk(model, split, share)
    primary = layers_in_fp8(model, share) if model.fp8 and model.fp8.primary_weights else frozenset()
    return Stage(
        tuple(itertools.chain.from_iterable(by_chunk)),
        share.pipeline_rank,
        x.element_bytes,
        tuple(map(len, by_chunk)),
        primary,
        x.fp8_transposes,
    )


@lru_cache(maxsize=256)
def by_name(stage: Stage) -> dict[tuple[int | None, str], Parameter]:
    """Parameters by layer and name; never changed."""
    return {(p.layer, p.name): p for p in stage.parameters}


@lru_cache(maxsize=512)
def transfer_blocks(x: Shapes) -> dict[str, Block]:
    """Blocks of one op, shared by all microbatches: the batch, and tensors exchanged with other stages.

    After a backward the schedule still refers to its input and both gradients, under the names ``^kept_...``.
    """
    hidden = rounded(x.hidden)
    blocks = {}
    for name, buffer, component, size in (
        ("batch", "batch", BATCH, x.full_tokens * _BATCH_BYTES_PER_TOKEN),
        ("receive_input", "output", RESIDUAL, hidden),
        ("receive_output_grad", "^grad", ACTIVATION_GRADIENTS, hidden),
        ("drop_output_grad", "^kept_output_grad", ACTIVATION_GRADIENTS, hidden),
        ("drop_input", "^kept_input", RESIDUAL, hidden),
        ("drop_input_grad", "^kept_input_grad", ACTIVATION_GRADIENTS, hidden),
    ):
        s = Scribe()
        s.alloc(buffer, size, component)
        blocks[name] = s.cut(name)
        s.free(buffer)
        blocks[f"{name}.end"] = s.cut(f"{name}.end")
    for name, old, new in (
        ("keep_input_grad", "^grad", "^kept_input_grad"),
        ("move_input", "output", "^kept_input"),
    ):
        s = Scribe()
        s.assume(old, hidden, RESIDUAL if old == "output" else ACTIVATION_GRADIENTS)
        s.rename(old, new)
        blocks[name] = s.cut(name)
    s = Scribe()
    s.assume("output", hidden, RESIDUAL)
    s.free("output")
    blocks["drop_output"] = s.cut("drop_output")
    s.alloc("output", hidden, RESIDUAL)
    blocks["clone"] = s.cut("clone")
    s.assume("^grad", hidden, ACTIVATION_GRADIENTS)
    s.alloc("^kept_output_grad", hidden, ACTIVATION_GRADIENTS)
    blocks["keep_output_grad"] = s.cut("keep_output_grad")
    return blocks
