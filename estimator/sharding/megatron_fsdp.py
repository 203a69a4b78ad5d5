"""Megatron FSDP version 1: no_shard, optim, optim_grads, optim_grads_params.

Source: megatron-core 0.19.2 distributed/fsdp/src/megatron_fsdp/{megatron_fsdp,param_and_grad_buffer}.py: the all-gather
pipeline (AllGatherPipeline, :4270-4730), the reduce-scatter queue (GradReducePipeline, :3812-4255), the hooks
(megatron_fsdp.py:490-1140), update_main_grads (:3343-3400). Collectives are taken to end at once.
"""

from __future__ import annotations

from estimator.components import (
    GATHERED_PARAMETERS,
    GRADIENT_BUCKETS,
    MAIN_GRADIENTS,
    MAIN_PARAMETERS,
    OPTIMIZER_TEMPORARIES,
    PARAMETERS,
)
from estimator.job.settings import DTYPE_BYTES, Settings
from estimator.model.parameters import Parameter
from estimator.sharding.base import SIDE, Stage, Strategy, Unit
from estimator.sharding.fsdp_groups import Group, buckets_of
from estimator.timeline import COMPUTE, GATHER

MIN_COMMUNICATION_UNIT = 1_000_000_000
"""Elements; megatron_fsdp.py:438-440 says "cap" and takes the maximum."""

_VOCABULARY_TABLES = ("word_embeddings", "output_layer", "position_embeddings")


class MegatronFsdp(Strategy):
    def __init__(self, settings: Settings, stage: Stage) -> None:
        super().__init__(settings, stage)
        sharding = settings.sharding
        self.name = sharding.strategy
        ranks = settings.parallel.data_context_parallel_size
        self.shards = ranks // sharding.num_distributed_optimizer_instances
        self.state_shards = ranks if sharding.shards_states_over_instances else self.shards
        self.weights_sharded = self.name == "optim_grads_params"
        self.grads_sharded = self.name in ("optim_grads", "optim_grads_params")
        self.states_sharded = self.name != "no_shard"
        self.out_of_place_residual = self.weights_sharded
        self.acts_in_backward = self.grads_sharded
        buckets = buckets_of(
            stage,
            self.weights_sharded,
            sharding.bucket_size,
            self.state_shards,
            padded=self.states_sharded,
            expert_shards=max(1, settings.parallel.expert_data_parallel_size // (ranks // self.state_shards)),
        )
        self.groups, self.group_of = buckets.groups, buckets.group_of
        self.unit_groups, self.module_buckets = buckets.of_unit, buckets.of_module
        self.sizes = [g.size for g in self.groups]
        self.queued = 0
        self.queue_capacity = self._communication_unit()
        self.prefetch_size = self.queue_capacity // 2
        self.double_buffered = sharding.fsdp_double_buffer and self.weights_sharded
        self.ready: set[int] = set()
        self.releasable: set[int] = set()
        self.ready_params: dict[int, int] = {}
        self.queue: list[int] = []
        self.pools: dict[str, dict[str, str | None]] = {"weights": {}, "grads": {}}
        self.has_run_backward = False

    # -- sizes ----------------------------------------------------------------------------------------------------
    def _communication_unit(self) -> int:
        """Elements: the reduce-scatter queue's capacity, and twice the prefetch (megatron_fsdp.py:415-444)."""
        sharding = self.settings.sharding
        if sharding.suggested_communication_unit_size is not None:
            return sharding.suggested_communication_unit_size
        if self.weights_sharded:
            units = {p.layer for p in self.stage.parameters if p.layer is not None}
            total = sum(p.num_elements for p in self.stage.parameters if p.layer is not None)
            return max(MIN_COMMUNICATION_UNIT, total // max(1, len(units)) * 2)
        return max(MIN_COMMUNICATION_UNIT, sharding.bucket_size or 0)

    @property
    def gradient_dtype(self) -> str:
        return self.settings.sharding.main_grads_dtype or self.settings.runtime.params_dtype

    @property
    def _communication_bytes(self) -> int:
        return DTYPE_BYTES[self.settings.sharding.grad_comm_dtype or self.gradient_dtype]

    @property
    def _main_params_bytes(self) -> int:
        dtype = self.settings.sharding.main_params_dtype
        return DTYPE_BYTES[dtype] if dtype else 0

    def _share(self, group: Group, sharded: bool) -> int:
        return group.size // max(1, group.shards * self.shards // self.state_shards) if sharded else group.size

    def _state_share(self, group: Group) -> int:
        """Elements of main weights and optimizer states. With outer_dp_sharding_strategy optim they are sharded over
        all data-parallel ranks; weights and gradients only within an instance (param_and_grad_buffer.py:2343-2480)."""
        return group.size // group.shards if self.states_sharded else group.size

    # -- building -------------------------------------------------------------------------------------------------
    def build_model(self) -> None:
        """With meta-device init only the vocabulary tables exist before wrapping (they name their device)."""
        meta = self.settings.model.init_model_with_meta_device
        for p in self.stage.parameters:
            if not meta or p.name in _VOCABULARY_TABLES:
                self.s.alloc(f"module/{p.layer}/{p.name}", p.num_elements * self.stage.element_bytes, PARAMETERS)

    def wrap(self) -> None:
        w = self.stage.element_bytes
        for g in self.groups:
            if self.name != "no_shard":
                self.s.alloc(f"weights/{g.index}", self._share(g, self.weights_sharded) * w, PARAMETERS, SIDE)
            if self.weights_sharded:
                if self.double_buffered and g.unit is not None:
                    self._from_pool("weights", f"gathered/{g.index}", g.size * w, GATHERED_PARAMETERS, SIDE)
                else:
                    self.s.alloc(f"gathered/{g.index}", g.size * w, GATHERED_PARAMETERS, SIDE)
            if self._main_params_bytes:
                size = self._state_share(g) * self._main_params_bytes
                self.s.alloc(f"main/{g.index}", size, MAIN_PARAMETERS, SIDE)
            if self.name != "no_shard":
                for p in g.parameters:
                    name = f"module/{p.layer}/{p.name}"
                    if name in self.s.live:
                        self.s.free(name)
                    else:
                        self.s.transient(name, p.num_elements * w, PARAMETERS, SIDE)
            if self.weights_sharded:
                self._release_weights(g.index)
        grads = sum(self._share(g, self.grads_sharded) for g in self.groups)
        self.s.alloc("main_grads", grads * DTYPE_BYTES[self.gradient_dtype], MAIN_GRADIENTS, SIDE)
        self.s.empty_cache()  # param_and_grad_buffer.py:3119

    def build_optimizer(self) -> None:
        """FSDP's own main weights are what the optimizer steps over: nothing more is allocated."""

    def optimizer_shards(self) -> list[int]:
        """This rank's part of each parameter: data-parallel rank 0 holds the first 1/shards of each group."""
        if not self.states_sharded:
            return [p.num_elements for p in self.stage.parameters]
        shards = []
        for g in self.groups:
            left = self._state_share(g)
            for p in g.parameters:
                shards.append(min(left, p.num_elements))
                left -= shards[-1]
                if not left:
                    break
        return shards

    # -- all-gather -----------------------------------------------------------------------------------------------
    def _from_pool(self, kind: str, name: str, num_bytes: int, component: str, stream: str) -> None:
        """Double buffering: a unit takes one of at most two buffers, which stay allocated once made."""
        pool = self.pools[kind]
        if name in pool.values():
            return
        slot = next((slot for slot, user in pool.items() if user is None), None)
        if slot is None:
            slot = f"pool/{kind}/{len(pool)}"
            self.s.alloc(slot, num_bytes, component, stream)
        pool[slot] = name

    def _free_or_return(self, kind: str, name: str) -> None:
        if name in self.s.live:
            self.s.free(name)
        for slot, user in self.pools[kind].items():
            if user == name:
                self.pools[kind][slot] = None

    def _gather(self, index: int) -> None:
        for other in sorted(self.releasable):
            self._release_weights(other)
        self.releasable.clear()
        self.ready.add(index)
        name = f"gathered/{index}"
        if not self.weights_sharded or name in self.s.live:
            return
        group = self.groups[index]
        size = group.size * self.stage.element_bytes
        if self.double_buffered and group.unit is not None:
            self._from_pool("weights", name, size, GATHERED_PARAMETERS, GATHER)
        else:
            self.s.alloc(name, size, GATHERED_PARAMETERS, GATHER)

    def _release_weights(self, index: int) -> None:
        self.ready.discard(index)
        self._free_or_return("weights", f"gathered/{index}")

    def _all_gather(self, wanted: list[int], prefetch: int) -> None:
        """``prefetch``: 0 none, +1 towards higher bucket numbers, -1 towards lower."""
        if not wanted or not self.states_sharded:
            return
        buckets = set(wanted)
        self.releasable -= buckets
        units = {self.groups[i].unit for i in buckets} - {None}
        if prefetch and not (self.double_buffered and not units):
            prefetched = 0
            following = min(buckets) if prefetch > 0 else max(buckets)
            while prefetched < self.prefetch_size:
                while following in buckets:
                    following += prefetch
                if not 0 <= following < len(self.groups):
                    break
                unit = self.groups[following].unit
                if self.double_buffered and len(units | {unit}) > 2:
                    break
                units.add(unit)
                for index in [following] if unit is None else self.unit_groups[unit]:
                    if index not in buckets:
                        buckets.add(index)
                        prefetched += self.sizes[index]
        for index in sorted(buckets):
            if index not in self.ready:
                self._gather(index)

    def before_forward(self, unit: Unit) -> None:
        """Modules outside of units prefetch only before the first backward: afterwards nothing takes them out of the
        pre-backward state, in which forward prefetch is left out (megatron_fsdp.py:780-798, 939-948)."""
        prefetch = 0 if self.has_run_backward and not isinstance(unit, int) else 1
        for module in ("final_norm", "output_layer") if unit == "head" else (unit,):
            self._all_gather(self.module_buckets.get(module, []), prefetch)

    def after_forward(self, unit: Unit) -> None:
        if self.weights_sharded and isinstance(unit, int):
            for index in self.unit_groups[unit]:
                self._release_weights(index)

    def begin_backward(self) -> None:
        if self.weights_sharded:
            self.has_run_backward = True
            self.releasable |= {i for indices in self.unit_groups.values() for i in indices}

    def before_recompute(self, unit: Unit) -> None:
        self._all_gather(self.module_buckets.get(unit, []), prefetch=0)

    def after_recompute(self, unit: Unit) -> None:
        if self.weights_sharded and isinstance(unit, int):
            self.releasable |= set(self.unit_groups[unit])

    def before_backward(self, unit: Unit) -> None:
        if self.weights_sharded and isinstance(unit, int):
            self._all_gather(self.module_buckets.get(unit, []), prefetch=-1)

    def after_backward(self, unit: Unit) -> None:
        self.after_forward(unit)

    # -- gradients ------------------------------------------------------------------------------------------------
    def needs_main_grad(self, parameter: Parameter) -> None:
        if not self.grads_sharded:
            return
        group = self.group_of[parameter.layer, parameter.name]
        name = f"bucket/{group.index}"
        if name in self.s.live:
            return
        size = group.size * self._communication_bytes
        if self.double_buffered and group.unit is not None:
            self._enforce_double_buffer(group.index)
            self._from_pool("grads", name, size, GRADIENT_BUCKETS, COMPUTE)
        else:
            self.s.alloc(name, size, GRADIENT_BUCKETS, COMPUTE)

    def _enforce_double_buffer(self, index: int) -> None:
        units = {self.groups[index].unit}
        keep = 0
        for other in reversed(self.queue):
            units.add(self.groups[other].unit)
            if len(units - {None}) > 2:
                break
            keep += 1
        while len(self.queue) > keep:
            self._pop_queue()

    def grad_ready(self, parameter: Parameter) -> None:
        self.needs_main_grad(parameter)
        if not self.grads_sharded:
            return
        group = self.group_of[parameter.layer, parameter.name]
        self.ready_params[group.index] = self.ready_params.get(group.index, 0) + 1
        if self.ready_params[group.index] < len(group.parameters):
            return
        self.ready_params[group.index] = 0
        while self.queued > self.queue_capacity:
            self._pop_queue()
        self.queue.append(group.index)
        self.queued += group.size

    def _pop_queue(self) -> None:
        index = self.queue.pop(0)
        self.queued -= self.sizes[index]
        self._free_bucket(index)

    def _free_bucket(self, index: int) -> None:
        self._free_or_return("grads", f"bucket/{index}")

    def end_backward(self, is_last: bool) -> None:
        while self.queue:
            self._pop_queue()
        for g in self.groups:
            self._free_bucket(g.index)
        self.ready_params.clear()

    def finish_gradients(self) -> None:
        """Gradients of another dtype than the main weights are copied to it, shard by shard, until zero_grad."""
        sharding = self.settings.sharding
        if (
            self._main_params_bytes
            and not sharding.use_decoupled_grad
            and sharding.main_params_dtype != self.gradient_dtype
        ):
            for g in self.groups:
                size = self._state_share(g) * self._main_params_bytes
                self.s.alloc(f"grad_copy/{g.index}", size, OPTIMIZER_TEMPORARIES)
        if sharding.overlap_param_gather:
            self._reset_gathers()

    def _reset_gathers(self) -> None:
        for index in sorted(self.ready):
            if self.groups[index].unit is not None:
                self._release_weights(index)
        self.ready.clear()
        self.releasable.clear()

    def zero_grad(self) -> None:
        self.s.free(*[name for name in self.s.live if name.startswith("grad_copy/")])

    def after_step(self) -> None:
        """start_param_sync gathers the first bucket and prefetches (megatron_fsdp.py:1258-1297)."""
        if not self.states_sharded:
            return
        if self.settings.sharding.overlap_param_gather:
            self._all_gather([0], prefetch=1)
            return
        self._reset_gathers()
        for g in self.groups:
            self._gather(g.index)
