"""Which class models which strategy."""

from __future__ import annotations

from estimator.job.settings import Settings
from estimator.sharding.base import Stage, Strategy
from estimator.sharding.distributed_data_parallel import DistributedDataParallel
from estimator.sharding.megatron_fsdp import MegatronFsdp

STRATEGIES: dict[str, type[Strategy]] = {
    "ddp": DistributedDataParallel,
    "distopt": DistributedDataParallel,
    "no_shard": MegatronFsdp,
    "optim": MegatronFsdp,
    "optim_grads": MegatronFsdp,
    "optim_grads_params": MegatronFsdp,
}


def strategy_for(settings: Settings, stage: Stage) -> Strategy:
    return STRATEGIES[settings.sharding.strategy](settings, stage)
