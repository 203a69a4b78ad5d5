"""Order of the forwards and backwards of one pipeline stage."""

from estimator.job.settings import ParallelSettings
from estimator.schedule.actions import Action
from estimator.schedule.interleaving import interleaved
from estimator.schedule.one_f_one_b import one_f_one_b

__all__ = ["Action", "interleaved", "pipeline_order"]


def pipeline_order(parallel: ParallelSettings, stage: int, num_microbatches: int) -> tuple[Action, ...]:
    """Actions of one stage in one step, repetitive steady rounds left out."""
    stages = parallel.pipeline_model_parallel_size
    if parallel.num_model_chunks == 1:
        return one_f_one_b(stages, stage, num_microbatches)
    return interleaved(
        stages,
        stage,
        num_microbatches,
        parallel.num_model_chunks,
        parallel.microbatch_group_size_per_vp_stage,
        parallel.overlap_p2p_comm,
    )
