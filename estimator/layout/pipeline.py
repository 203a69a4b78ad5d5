"""How decoder layers are dealt to pipeline stages.

Source: megatron-core 0.19.2, transformer/transformer_block.py get_num_layers_to_build.
"""

from __future__ import annotations

from dataclasses import dataclass

from estimator.job.settings import ModelSettings, ParallelSettings


@dataclass(frozen=True, slots=True)
class StageShare:
    """One pipeline stage: its decoder layers, and whether it embeds tokens and computes the loss."""

    pipeline_rank: int
    num_layers: int
    pre_process: bool
    post_process: bool


def layers_by_stage(model: ModelSettings, parallel: ParallelSettings) -> tuple[int, ...]:
    """Decoder layers of each stage; raises ValueError where Megatron-Core would refuse the split."""
    stages, layers = parallel.pipeline_model_parallel_size, model.num_layers
    if stages == 1:
        return (layers,)
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
        return tuple(([first] if first is not None else []) + middle + ([last] if last is not None else []))
    slots = layers
    slots += parallel.account_for_embedding_in_pipeline_split
    slots += parallel.account_for_loss_in_pipeline_split
    if slots % stages:
        raise ValueError(f"{slots} layers (embedding and loss counted as set) do not divide by {stages} stages")
    counts = [slots // stages] * stages
    counts[0] -= parallel.account_for_embedding_in_pipeline_split
    counts[-1] -= parallel.account_for_loss_in_pipeline_split
    return tuple(counts)


def stage_shares(model: ModelSettings, parallel: ParallelSettings) -> tuple[StageShare, ...]:
    counts = layers_by_stage(model, parallel)
    return tuple(
        StageShare(rank, n, pre_process=rank == 0, post_process=rank == len(counts) - 1)
        for rank, n in enumerate(counts)
    )
