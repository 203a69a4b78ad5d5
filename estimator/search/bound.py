"""A lower bound on the peak of each candidate, cheap enough for all of them: what certainly lives when forward ends.

States of the heavier of the first and last stage, plus what the microbatches in flight have saved. The peak of the
timeline is never below it, so a candidate whose bound exceeds the card is left out without being estimated.
"""

from __future__ import annotations

from functools import lru_cache

from estimator.job.settings import DTYPE_BYTES, ModelSettings, Settings
from estimator.layout import ChunkShare, StageShare, stage_shares
from estimator.model.head import cross_entropy_kind
from estimator.model.layer import layer_program
from estimator.model.parameters import Split, layer_parameters, stage_parameters
from estimator.model.shapes import Shapes, shapes_of
from estimator.schedule.interleaving import schedule_table
from estimator.sharding.base import state_bytes
from estimator.sharding.megatron_fsdp import MIN_COMMUNICATION_UNIT
from estimator.step.model_chunk import layers_with_experts

_LOGITS_FACTOR = {"te": 1, "native": 5, "unfused": 3}
"""Bytes live at once in the loss, in units of the logits in the compute dtype (2 bytes an element)."""


def lower_bound(settings: Settings) -> int:
    """Bytes: the heavier of the first and last stage, when forward has ended or the topmost layer's backward begins."""
    stages = settings.parallel.pipeline_model_parallel_size
    return max(stage_bound(settings, rank) for rank in {0, stages - 1})


def stage_bound(settings: Settings, pipeline_rank: int) -> int:
    """The bound for one stage, in bytes."""
    shares = stage_shares(settings.model, settings.parallel)
    share = shares[pipeline_rank]
    shapes = shapes_of(settings)
    saved = _saved(settings, share, len(shares))
    loss = _LOGITS_FACTOR[cross_entropy_kind(settings.model)] * shapes.logits if share.post_process else 0
    tensors = 2 if settings.model.gated_linear_unit or not shapes.fp8 else 1
    mlp = tensors * shapes.ffn if share.chunks[-1].num_layers and not settings.model.moe else 0
    moments = [saved + loss, saved + mlp]
    if settings.sharding.strategy == "optim_grads_params" and share.num_layers and not settings.model.moe:
        moments += _sharded_backward(settings, share, shapes, saved)
    return _states(settings, share) + max(moments)


def _sharded_backward(settings: Settings, share: StageShare, shapes: Shapes, saved: int) -> list[int]:
    """optim_grads_params: the topmost layer with its gathered units and bucket; a later one with the queue filled."""
    unit = sum(_layer_elements(settings.model, settings.parallel.weight_split, experts=False))
    capacity = settings.sharding.suggested_communication_unit_size or max(MIN_COMMUNICATION_UNIT, 2 * unit)
    units = min(share.num_layers, 1 + -(-(capacity // 2) // unit))
    sharding, params_dtype = settings.sharding, settings.runtime.params_dtype
    gathered = units * unit * DTYPE_BYTES[params_dtype]
    grad_bytes = DTYPE_BYTES[sharding.grad_comm_dtype or sharding.main_grads_dtype or params_dtype]
    if sharding.fsdp_double_buffer:
        return [saved + 2 * shapes.ffn]
    moments = [saved + 2 * shapes.ffn + gathered + unit * grad_bytes]
    filled = -(-capacity // unit) + 1
    if share.num_layers >= filled + units:
        layer = _layer_saved(settings, shapes, ()) if settings.recompute.recompute_granularity == "full" else 0
        moments.append(gathered + (filled - 2) * unit * grad_bytes + layer)
    return moments


def _states(settings: Settings, share: StageShare) -> int:
    dense, experts, outside = _elements(settings.model, settings.parallel.weight_split, share)
    parallel = settings.parallel
    states = _sharded_states(settings, dense, parallel.data_context_parallel_size)
    if experts:
        states += _sharded_states(settings, experts, parallel.expert_data_parallel_size)
    gathered = DTYPE_BYTES[settings.runtime.params_dtype] * outside
    return states + (gathered if settings.sharding.strategy == "optim_grads_params" else 0)


def _sharded_states(settings: Settings, total: int, ranks: int) -> int:
    """Bytes of states for ``total`` elements whose replicas are ``ranks`` ranks."""
    s = settings.sharding
    n = max(1, ranks // s.num_distributed_optimizer_instances)
    o_n = ranks if s.shards_states_over_instances else n
    w = DTYPE_BYTES[settings.runtime.params_dtype]
    o = sum(state_bytes(settings.optimizer).values())
    precise = settings.optimizer.use_precision_aware_optimizer
    if s.strategy in ("ddp", "distopt"):
        r = 4 if s.grad_reduce_in_fp32 else w
        shards = n if s.strategy == "distopt" else 1
        m = 2 if precise and s.strategy == "distopt" else 4
        return total * (w + r) + total * (m + o) // shards
    g = DTYPE_BYTES[s.main_grads_dtype] if s.main_grads_dtype else w
    m = DTYPE_BYTES[s.main_params_dtype] if s.main_params_dtype else 0
    over = {
        "no_shard": (1, 1, 1),
        "optim": (1, 1, n),
        "optim_grads": (1, n, n),
        "optim_grads_params": (n, n, o_n),
    }
    weights, grads, states = over[s.strategy]
    return total * w // weights + total * g // grads + total * (m + o) // states


@lru_cache(maxsize=4096)
def _layer_elements(model: ModelSettings, split: Split, experts: bool) -> tuple[int, int]:
    """Elements of one layer: dense ones, and of experts."""
    parameters = layer_parameters(model, split, 0, experts)
    routed = sum(p.num_elements for p in parameters if p.expert)
    return sum(p.num_elements for p in parameters) - routed, routed


@lru_cache(maxsize=4096)
def _elements(model: ModelSettings, split: Split, share: StageShare) -> tuple[int, int, int]:
    """Elements of a stage's parameters: dense, of experts, and those outside of decoder layers."""
    outside = sum(p.num_elements for p in stage_parameters(model, split, 0, share.pre_process, share.post_process))
    dense, routed = outside, 0
    with_experts = len(layers_with_experts(model, share))
    for count, kind in ((with_experts, True), (share.num_layers - with_experts, False)):
        if count:
            layer = _layer_elements(model, split, kind)
            dense, routed = dense + count * layer[0], routed + count * layer[1]
    return dense, routed, outside


def _saved(settings: Settings, share: StageShare, num_stages: int) -> int:
    """What the passes that are in flight when the first backward begins have saved."""
    parallel, microbatches = settings.parallel, settings.num_microbatches
    if len(share.chunks) == 1:
        in_flight = min(microbatches, num_stages - share.pipeline_rank)
        return in_flight * _saved_by_pass(settings, share.chunks[0])
    group = parallel.microbatch_group_size_per_vp_stage or num_stages
    warmup = 2 * (num_stages - share.pipeline_rank - 1) + (len(share.chunks) - 1) * group
    written = schedule_table(min(microbatches, 2 * group), len(share.chunks), group)
    return sum(_saved_by_pass(settings, share.chunks[chunk]) for _, chunk in written[: warmup + 1])


def _saved_by_pass(settings: Settings, chunk: ChunkShare) -> int:
    shapes = shapes_of(settings)
    recompute, layers, model = settings.recompute, chunk.num_layers, settings.model
    if model.moe and recompute.recompute_granularity != "full":
        modules = recompute.recompute_modules if recompute.recompute_granularity == "selective" else ()
        kinds = [model.has_experts(chunk.first_layer + i) for i in range(layers)]
        return sum(
            n * _layer_saved(settings, shapes, modules, kind) for kind in (False, True) if (n := kinds.count(kind))
        )
    if recompute.recompute_granularity == "full":
        if recompute.recompute_method == "block":
            kept = max(0, layers - (recompute.recompute_num_layers or 0))
            inputs = layers - kept
        else:
            kept, inputs = 0, -(-layers // (recompute.recompute_num_layers or 1))
        least = _layer_saved(settings, shapes, ()) if kept and not model.moe else shapes.hidden
        return inputs * shapes.hidden + kept * least
    modules = recompute.recompute_modules if recompute.recompute_granularity == "selective" else ()
    return layers * _layer_saved(settings, shapes, modules)


def _layer_saved(settings: Settings, shapes: Shapes, modules: tuple[str, ...], experts: bool = False) -> int:
    return _forward_delta(settings.model, shapes, modules, experts)


@lru_cache(maxsize=4096)
def _forward_delta(model: ModelSettings, shapes: Shapes, modules: tuple[str, ...], experts: bool) -> int:
    program = layer_program(
        model,
        shapes,
        modules=modules,
        experts=experts,
        fused_wgrad=True,
        out_of_place=False,
    )
    return program.forward.delta
