"""How unevenly tokens fall on expert-parallel ranks: an assumption, since no configuration says it.

``moe_load_imbalance`` is the tokens of the fullest rank over the mean. A router that is forced to balance (random
logits, ``moe_router_force_load_balancing``) has 1; one that learns with a balancing loss or a bias comes near it in the
first hundreds of steps and is far above it before. So the default is a prior, and the answer says from which imbalance
on the job no longer fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from estimator.errors import FieldProblem, JobError
from estimator.job.settings import Settings

DEFAULT_LOAD_IMBALANCE = 1.2
LOAD_IMBALANCE_INTERVAL = (1.0, 2.0)
"""Where the imbalance of a trained router is expected; the default lies in it."""
_STEPS = 7


def with_load_imbalance(settings: Settings, given: float | None) -> Settings:
    """The settings with the imbalance asked for, or the default of their kind.

    Raises JobError where it is below 1 or more than all tokens on one rank.
    """
    moe, ranks = settings.model.moe, settings.parallel.expert_model_parallel_size
    if given is not None and not 1 <= given <= 4096:
        message = f"{given} is not possible"
        raise JobError(
            [FieldProblem("job.moe_load_imbalance", message, "from 1 (balanced) to the expert-parallel size")]
        )
    if moe is None or ranks == 1:
        return settings
    default = 1.0 if moe.force_load_balancing else DEFAULT_LOAD_IMBALANCE
    return replace(settings, moe_load_imbalance=min(default if given is None else given, float(ranks)))


def stops_fitting_at(settings: Settings, fits: Callable[[Settings], bool]) -> float | None:
    """The smallest imbalance, to a percent of the way, at which ``fits`` is false; None if none is.

    ``fits`` must not become true again as the imbalance grows.
    """
    low, high = 1.0, float(settings.parallel.expert_model_parallel_size)
    if settings.model.moe is None or high == 1 or fits(replace(settings, moe_load_imbalance=high)):
        return None
    if not fits(replace(settings, moe_load_imbalance=low)):
        return low
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if fits(replace(settings, moe_load_imbalance=middle)):
            low = middle
        else:
            high = middle
    return round(high, 2)
