"""Which layers full recompute groups. Source: megatron-core 0.19.2 transformer/transformer_block.py
_checkpointed_forward."""

from __future__ import annotations

from dataclasses import dataclass

from estimator.job.settings import RecomputeSettings


@dataclass(frozen=True, slots=True)
class Chunk:
    """Layers that are run, and if ``recomputed`` checkpointed, together: only the first one's input is saved."""

    layers: tuple[int, ...]
    recomputed: bool


def recompute_chunks(recompute: RecomputeSettings, num_layers: int) -> tuple[Chunk, ...]:
    """uniform: every ``recompute_num_layers`` layers share one saved input; block: the first n layers, each its own."""
    if recompute.recompute_granularity != "full":
        return tuple(Chunk((i,), False) for i in range(num_layers))
    size = recompute.recompute_num_layers or 1
    if recompute.recompute_method == "block":
        return tuple(Chunk((i,), i < size) for i in range(num_layers))
    return tuple(Chunk(tuple(range(i, min(i + size, num_layers))), True) for i in range(0, num_layers, size))
