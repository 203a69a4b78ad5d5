"""Data parallelism: persistent buffers, and what each strategy allocates around gathers, gradients and the optimizer.

One file a strategy family; :func:`strategy_for` is the table.
"""

from estimator.sharding.base import Strategy
from estimator.sharding.distributed_data_parallel import DistributedDataParallel
from estimator.sharding.megatron_fsdp import MegatronFsdp
from estimator.sharding.table import strategy_for

__all__ = ["DistributedDataParallel", "MegatronFsdp", "Strategy", "strategy_for"]
