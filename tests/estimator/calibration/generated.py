"""Runs drawn from a known truth, so that what a fit says can be held against it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from estimator.calibration.observations import Observation

GIB = 2**30
STRATEGIES = ("ddp", "distopt", "no_shard", "optim", "optim_grads", "optim_grads_params")
COMPONENTS = ("parameters", "optimizer_states", "activations_attention", "activations_mlp", "logits_and_loss")
COMPONENTS += ("gathered_parameters",)


def draw(
    num: int,
    *,
    seed: int = 1,
    truth: Mapping[str, float] | None = None,
    noise: float = 0.003,
    num_models: int = 20,
    strategies: tuple[str, ...] = STRATEGIES,
) -> list[Observation]:
    """Peaks are (1 + truth) times each component, with errors of a Student t with 5 degrees of freedom."""
    generator = np.random.default_rng(seed)
    factors = {name: 1 + (truth or {}).get(name, 0.0) for name in COMPONENTS}
    rows = []
    for i in range(num):
        sizes = generator.lognormal(1.5, 0.8, len(COMPONENTS)) * GIB
        components = {name: int(size) for name, size in zip(COMPONENTS, sizes, strict=True)}
        real = sum(factors[name] * size for name, size in components.items())
        states = components["parameters"] + components["optimizer_states"]
        peak = int(real * (1 + noise * generator.standard_t(5)))
        rows.append(
            Observation(
                run_id=f"run-{i:06d}",
                fingerprint=f"job-{i:06d}",
                model=f"model-{generator.integers(num_models)}",
                strategy=strategies[int(generator.integers(len(strategies)))],
                measured_peak=peak,
                predicted_peak=sum(components.values()),
                components=components,
                allocator="default",
                measured_persistent=int(states * (1 + 0.0005 * generator.standard_normal())),
                predicted_persistent=states,
                measured_reserved=int(peak * 1.02),
            )
        )
    return rows
