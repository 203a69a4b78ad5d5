"""Predicted step time of candidates, relative to one another: compute, recompute, communication, bubble, launches.

Per rank and step, in seconds, from peak rates of the GPU table. Shares of peak and of overlap are priors (marked so in
the answer): only ratios between candidates are used. Formulas: 6 P T for products with weights (Kaplan et al. 2020),
12 L h s T / 2 for causal attention; ring collectives move (n-1)/n of their buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from estimator.catalog.gpus import Gpu
from estimator.job.settings import ModelSettings, Settings
from estimator.model.parameters import Parameter, layer_parameters
from estimator.search.space import Point, Recompute, columns

COMPUTE_SHARE = 0.45
"""Of the peak BF16 rate that a training step reaches."""
LINK_SHARE = 0.7
OVERLAP_SHARE = 0.8
"""Of compute under which data-parallel communication hides."""
CONTEXT_OVERLAP_SHARE = 0.7
ELEMENTWISE_SHARE = 0.01
"""Of a forward pass's products that norms, or the experts' activation, take."""
LAUNCH_SECONDS_PER_LAYER = 0.35e-3
"""Host time to launch one layer's forward and backward."""
FSDP_HOOK_SHARE = 0.02
SMALL_UNIT_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds by term, one value a candidate."""

    terms: dict[str, np.ndarray]

    @property
    def total(self) -> np.ndarray:
        return np.asarray(np.sum(list(self.terms.values()), axis=0))


def recomputed_share(recompute: Recompute, settings: Settings) -> tuple[float, float]:
    """Share of (matrix products, attention) of a forward pass that backward computes again."""
    model = settings.model
    if recompute.granularity == "full":
        if recompute.method == "block":
            parallel = settings.parallel
            layers = model.num_layers // (parallel.pipeline_model_parallel_size * parallel.num_model_chunks)
            share = min(1.0, (recompute.layers or 0) / max(1, layers))
            return share, share
        return 1.0, 1.0
    if recompute.granularity != "selective":
        return 0.0, 0.0
    elementwise = ELEMENTWISE_SHARE * len({"moe_act", "layernorm"} & set(recompute.modules))
    return _recomputed_products(
        recompute.modules, model
    ) + elementwise, 1.0 if "core_attn" in recompute.modules else 0.0


_RECOMPUTED = {
    "mlp": ("linear_fc1", "linear_fc2"),
    "moe": ("router", "expert_", "shared_", "fc1_latent_proj", "fc2_latent_proj"),
    "shared_experts": ("shared_",),
    "mla_up_proj": ("linear_q_up_proj", "linear_q_proj", "linear_kv_up_proj"),
}
"""Weights, by the beginnings of their names, whose products a recomputed module runs again."""


def _recomputed_products(modules: tuple[str, ...], model: ModelSettings) -> float:
    names = tuple(name for module in modules for name in _RECOMPUTED.get(module, ()))
    total = again = 0.0
    for experts, layers in _layer_kinds(model):
        for p in layer_parameters(model, (1, 1, 1), 0, experts):
            total += layers * active_elements(model, p)
            again += layers * active_elements(model, p) if p.name.startswith(names) else 0
    return again / total if names else 0.0


def _layer_kinds(model: ModelSettings) -> tuple[tuple[bool, int], ...]:
    """(whether layers have experts, how many of those)."""
    with_experts = sum(model.moe.pattern) if model.moe else 0
    kinds = ((True, with_experts), (False, model.num_layers - with_experts))
    return tuple((experts, n) for experts, n in kinds if n)


def active_elements(model: ModelSettings, parameter: Parameter) -> float:
    """Elements of a weight that one token meets: k of E experts."""
    if model.moe and parameter.name.startswith("expert_"):
        return parameter.num_elements * model.moe.topk / model.moe.num_experts
    return parameter.num_elements


@lru_cache(maxsize=64)
def _weights(model: ModelSettings) -> tuple[float, int, int]:
    """Elements of all layers' weights: what one token meets, dense ones, those of experts."""
    active, dense, routed = 0.0, 0, 0
    for experts, layers in _layer_kinds(model):
        for p in layer_parameters(model, (1, 1, 1), 0, experts):
            active += layers * active_elements(model, p)
            if p.name.startswith("expert_"):
                routed += layers * p.num_elements
            else:
                dense += layers * p.num_elements
    return active, dense, routed


def step_cost(settings: Settings, candidates: list[Point], gpu: Gpu, gpus_per_node: int) -> Cost:
    """Cost of each candidate; the communication terms only count what is not hidden under compute."""
    m = settings.model
    world, s, h = settings.parallel.world_size, m.seq_length, m.hidden_size
    x = columns(candidates)
    t, p, c, b = x["t"], x["p"], x["c"], x["b"]
    dp = world // (t * p * c)
    micro = np.maximum(1, settings.batch.global_batch_size // (b * dp))
    active, dense, routed = _weights(m)
    head = m.vocab_size * h
    tokens = b * s // c
    shares = np.array([recomputed_share(q.recompute, settings) for q in candidates]).reshape(-1, 2)
    rate = gpu.bf16_flops_per_second * COMPUTE_SHARE
    product = 2 * tokens * active / (t * p) / rate
    attention = 2 * tokens * m.num_layers * m.num_attention_heads * m.kv_channels * s / (t * p) / rate
    logits = 2 * tokens * head / t / rate / np.where(p > 1, p, 1)
    once = 3 * (product + attention + logits)
    again = product * shares[:, 0] + attention * shares[:, 1]
    launch = LAUNCH_SECONDS_PER_LAYER * m.num_layers / p * (1 + shares[:, 0] / 3)
    one = np.maximum(once + again, launch)
    nvlink, network = gpu.nvlink_bytes_per_second * LINK_SHARE, gpu.inter_node_bytes_per_second * LINK_SHARE
    hidden = tokens * h * 2
    tensor = np.where(t > 1, (8 + 4 * shares[:, 0]) * m.num_layers / p * hidden * (t - 1) / t / nvlink, 0.0)
    kv = tokens * 2 * m.num_query_groups * m.kv_channels * 2 / t
    context_link = np.where(t * c <= gpus_per_node, nvlink, network)
    context = np.where(c > 1, 3 * m.num_layers / p * kv * (c - 1) / context_link * (1 - CONTEXT_OVERLAP_SHARE), 0.0)
    split = settings.parallel.expert_model_parallel_size * settings.parallel.expert_tensor_parallel_size
    local = (dense / p + 2 * head) / t + routed / p / split
    n = dp * c
    data_link = np.where(t * c * dp <= gpus_per_node, nvlink, network)
    ring = np.where(n > 1, (n - 1) / n / data_link, 0.0)
    grad_bytes = 4 if settings.sharding.grad_reduce_in_fp32 else 2
    strategies = np.array([q.strategy for q in candidates])
    every = np.where(strategies == "optim_grads_params", (4 + grad_bytes) * local, 0.0)
    every = np.where(strategies == "optim_grads", grad_bytes * local, every)
    last = np.where(np.isin(strategies, ("optim_grads_params", "optim_grads")), 0.0, (2 + grad_bytes) * local)
    last = np.where(strategies == "ddp", 2 * grad_bytes * local, last)
    exposed_every = np.maximum(0.0, every * ring - OVERLAP_SHARE * one) * micro
    exposed_last = np.maximum(0.0, last * ring - OVERLAP_SHARE * one)
    hooks = np.where(strategies == "optim_grads_params", FSDP_HOOK_SHARE + SMALL_UNIT_SHARE * x["small"], 0.0)
    busy = (one + tensor + context) * micro
    transfer = np.where(p > 1, 2 * hidden / np.where(t * c * p <= gpus_per_node, nvlink, network) * micro, 0.0)
    parallel = settings.parallel
    chunks = np.where(p == parallel.pipeline_model_parallel_size, parallel.num_model_chunks, 1)
    return Cost(
        {
            "compute": once * micro,
            "recompute": again * micro,
            "launch": np.maximum(0.0, launch - once - again) * micro,
            "tensor_parallel": tensor * micro,
            "context_parallel": context * micro,
            "data_parallel": exposed_every + exposed_last + hooks * busy,
            "pipeline_transfer": transfer,
            "pipeline_bubble": (p - 1) * (one + tensor + context) / chunks,
        }
    )
