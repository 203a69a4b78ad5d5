"""How tokens reach the experts of other ranks and come back: all-to-all, DeepEP, HybridEP.

Read in megatron-core 0.19.2 transformer/moe: token_dispatcher.py:372-920 (all-to-all), 950-1250 (HybridEP), 1250-1460
(DeepEP), moe_utils.py:337-615 (permutation without fusion), fused_a2a.py; transformer_engine 2.12.0
pytorch/permutation.py:184-470, 701-790, triton/permutation.py (fused permutation); DeepEP, branch hybrid-ep of
2026-07-10, csrc/hybrid_ep/executor/executor.cu:36-175, hybrid_ep.cu (handles and outputs), branch main,
csrc/legacy/buffer.hpp. Not measured. What the libraries allocate beside torch is in :mod:`estimator.overhead`.

Letters as in :mod:`estimator.model.experts`; N tokens that this rank receives, each once.
"""

from __future__ import annotations

from functools import lru_cache
from math import comb

from estimator.components import ACTIVATION_GRADIENTS, EXPERTS, ROUTER
from estimator.job.settings import DTYPE_BYTES, ModelSettings, MoeSettings
from estimator.model.shapes import Shapes
from estimator.timeline import Block, Scribe

INDEX = 8
FP32 = 4


class Dispatcher:
    """Writes what comes between router and experts. ``keep``: backward follows.

    ``held``: buffers that the layer's frame refers to until its forward returns.
    """

    held: tuple[str, ...] = ()
    probability = FP32

    def __init__(self, model: ModelSettings, x: Shapes) -> None:
        assert model.moe is not None
        self.moe: MoeSettings = model.moe
        self.x = x
        self.width = self.moe.latent_size or x.hidden_size
        self.row = self.width * x.element_bytes
        self.local = self.moe.num_experts // x.expert_parallel
        self.ranks = x.expert_parallel * x.expert_tensor_parallel
        self.tokens = x.hidden_tokens
        self.received = x.expert_rows
        self.table = x.hidden_tokens * self.moe.num_experts
        self.router_bytes = DTYPE_BYTES[self.moe.router_dtype]

    def forward(self, s: Scribe) -> None:
        """From ``probs`` and ``routing_map`` to ``expert_input`` and ``expert_probs``."""
        raise NotImplementedError

    def combine(self, s: Scribe) -> None:
        """From ``expert_output`` to ``combined``."""
        raise NotImplementedError

    def backward_combine(self, s: Scribe) -> None:
        """Leaves ``rows_grad``, the gradient of the experts' output."""
        raise NotImplementedError

    def backward_dispatch(self, s: Scribe) -> None:
        """From ``rows_grad`` and ``probs_rows_grad`` to ``tokens_grad`` [T, h] and ``probs_grad`` [T, E]."""
        raise NotImplementedError

    def kept_bytes(self) -> tuple[int, ...]:
        """Tensors that the dispatcher object refers to until the layer's next forward, beyond the step."""
        return self.table * self.router_bytes, self.table

    def _map_bytes(self, tokens: int, experts: int, rows: int) -> tuple[int, ...]:
        return (tokens * (2 * experts + 1) * 4,) if self.moe.permute_fusion else (rows * INDEX,)

    def drop(self, s: Scribe) -> None:
        """Frees the maps that backward has read, or that nothing needs."""
        free_live(s, "probs", "routing_map", "row_map", "row_tokens", "sort_map", "unsort_map", "handle")

    def _finish(self, s: Scribe, rows: str) -> None:
        s.alloc("tokens_grad", self.tokens * self.row, ACTIVATION_GRADIENTS)
        s.alloc("probs_grad", self.table * self.router_bytes, ROUTER)
        s.free(rows, "probs_rows_grad")

    def _write_map(self, s: Scribe, tokens: int, experts: int, rows: int) -> None:
        """Fused: int32 [tokens, 2 experts + 1]. Else a sort of the transposed map, whose indices the probabilities'
        backward keeps, and the rows' token numbers."""
        if self.moe.permute_fusion:
            s.alloc("row_map", tokens * (2 * experts + 1) * 4, ROUTER)
            return
        s.alloc("map_transposed", tokens * experts, ROUTER)
        s.alloc("sorted_map", tokens * experts, ROUTER)
        s.alloc("row_map", tokens * experts * INDEX, ROUTER)
        s.free("sorted_map", "map_transposed")
        s.alloc("row_tokens", rows * INDEX, ROUTER)


def free_live(s: Scribe, *names: str) -> None:
    s.free(*(name for name in names if name in s.live))


def move(s: Scribe, happens: bool, name: str, num_bytes: int) -> None:
    """A copy to other rows or ranks, then the source goes."""
    if happens:
        s.alloc(f"{name}_moved", num_bytes, ACTIVATION_GRADIENTS)
        s.free(name)
        s.rename(f"{name}_moved", name)


class AllToAll(Dispatcher):
    """Permute, exchange, gather over expert tensor parallelism, sort by local expert; and all of it back."""

    held = ("sent", "arrived")

    def __init__(self, model: ModelSettings, x: Shapes) -> None:
        super().__init__(model, x)
        self.probability = self.router_bytes
        self.rows = self.tokens * self.moe.topk
        self.arrived = self.received // x.expert_tensor_parallel
        self.sorts = self.local > 1

    def kept_bytes(self) -> tuple[int, ...]:
        """Probabilities, map and permutation (token_dispatcher.py:560-600)."""
        return (*super().kept_bytes(), *self._map_bytes(self.tokens, self.moe.num_experts, self.rows))

    def forward(self, s: Scribe) -> None:
        x = self.x
        self._write_map(s, self.tokens, self.moe.num_experts, self.rows)
        s.alloc("sent", self.rows * self.row, EXPERTS)
        s.alloc("sent_probs", self.rows * self.probability, ROUTER)
        source = "sent"
        if x.expert_parallel > 1:
            s.alloc("arrived", self.arrived * self.row, EXPERTS)
            s.alloc("arrived_probs", self.arrived * self.probability, ROUTER)
            source = "arrived"
        if x.expert_tensor_parallel > 1:
            s.alloc("gathered_rows", self.received * self.row, EXPERTS)
            source = "gathered_rows"
        if self.sorts:
            if self.moe.permute_fusion:
                s.alloc("sort_map", self.received * 4, ROUTER)
            s.alloc("expert_input", self.received * self.row, EXPERTS)
            free_live(s, "gathered_rows")
        else:
            s.rename(source, "expert_input")
        s.alloc("expert_probs", self.received * self.probability, ROUTER)
        free_live(s, "sent_probs", "arrived_probs")

    def combine(self, s: Scribe) -> None:
        x, current = self.x, "expert_output"
        if self.sorts:
            if self.moe.permute_fusion:
                s.alloc("unsort_map", self.received * 4, ROUTER)
            s.alloc("unsorted", self.received * self.row, EXPERTS)
            current = "unsorted"
        if x.expert_tensor_parallel > 1:
            s.alloc("reduced", self.arrived * self.row, EXPERTS)
            free_live(s, "unsorted")
            current = "reduced"
        if current != "expert_output":
            s.free("expert_output")
        if x.expert_parallel > 1:
            s.alloc("returned", self.rows * self.row, EXPERTS)
            s.free(current)
            current = "returned"
        s.alloc("combined", self.tokens * self.row, EXPERTS)
        s.free(current)

    def backward_combine(self, s: Scribe) -> None:
        s.alloc("rows_grad", self.rows * self.row, ACTIVATION_GRADIENTS)
        free_live(s, "combined_grad")
        move(s, self.x.expert_parallel > 1, "rows_grad", self.arrived * self.row)
        move(s, self.x.expert_tensor_parallel > 1, "rows_grad", self.received * self.row)
        move(s, self.sorts, "rows_grad", self.received * self.row)

    def backward_dispatch(self, s: Scribe) -> None:
        move(s, self.sorts, "rows_grad", self.received * self.row)
        move(s, self.x.expert_tensor_parallel > 1, "rows_grad", self.arrived * self.row)
        move(s, self.x.expert_parallel > 1, "rows_grad", self.rows * self.row)
        self._finish(s, "rows_grad")


class HybridEp(Dispatcher):
    """Permutation and exchange in one step, through buffers of its own: the experts' input is its only output."""

    def kept_bytes(self) -> tuple[int, ...]:
        """Probabilities, map and what was dispatched of the former (token_dispatcher.py:1000-1130)."""
        return self.table * FP32, self.table, self.received * FP32

    def forward(self, s: Scribe) -> None:
        total = self.tokens * self.ranks
        if self.router_bytes != FP32:
            s.alloc("probs_wide", self.table * FP32, ROUTER)
        s.alloc("handle", total * (4 + self.local + 4 * self.local), ROUTER)
        s.transient("global_map", total * self.moe.num_experts * self.x.expert_tensor_parallel, ROUTER)
        s.alloc("expert_input", self.received * self.row, EXPERTS)
        s.alloc("expert_probs", self.received * FP32, ROUTER)
        free_live(s, "probs_wide")

    def combine(self, s: Scribe) -> None:
        s.alloc("combined", self.tokens * self.row, EXPERTS)
        s.free("expert_output")

    def backward_combine(self, s: Scribe) -> None:
        s.alloc("rows_grad", self.received * self.row, ACTIVATION_GRADIENTS)
        free_live(s, "combined_grad")

    def backward_dispatch(self, s: Scribe) -> None:
        if self.router_bytes != FP32:
            s.alloc("probs_wide_grad", self.table * FP32, ROUTER)
        self._finish(s, "rows_grad")
        free_live(s, "probs_wide_grad")


class DeepEp(Dispatcher):
    """Each rank receives a token once, then permutes it to its experts."""

    held = ("arrived", "arrived_choice")

    def __init__(self, model: ModelSettings, x: Shapes) -> None:
        super().__init__(model, x)
        self.arrived = distinct_rows(self.moe, self.local, self.tokens * self.ranks)
        balanced = self.tokens * self.moe.topk * x.expert_tensor_parallel
        self.arrived = min(self.tokens * self.ranks, self.arrived * self.received // balanced)

    def kept_bytes(self) -> tuple[int, ...]:
        """Choices of the tokens, map and permutation of those received (token_dispatcher.py:1250-1460)."""
        choices = self.tokens * self.moe.topk
        maps = self._map_bytes(self.arrived, self.local, self.received)
        return choices * INDEX, choices * FP32, self.arrived * self.local, *maps

    def forward(self, s: Scribe) -> None:
        k, n = self.moe.topk, self.arrived
        s.alloc("choice", self.tokens * k * (INDEX + FP32), ROUTER)
        s.alloc("handle", self.tokens * self.ranks * 5 + n * (4 + INDEX), ROUTER)
        s.alloc("arrived", n * self.row, EXPERTS)
        s.alloc("arrived_choice", n * k * (INDEX + FP32), ROUTER)
        s.alloc("map_of_longs", n * self.local * INDEX, ROUTER)
        s.alloc("arrived_probs", n * self.local * FP32, ROUTER)
        s.alloc("arrived_map", n * self.local, ROUTER)
        s.free("map_of_longs")
        self._write_map(s, n, self.local, self.received)
        s.alloc("expert_input", self.received * self.row, EXPERTS)
        s.alloc("expert_probs", self.received * FP32, ROUTER)
        s.free("arrived_map")

    def combine(self, s: Scribe) -> None:
        s.alloc("merged", self.arrived * self.row, EXPERTS)
        s.free("expert_output")
        s.alloc("combined", self.tokens * self.row, EXPERTS)
        s.free("merged")

    def backward_combine(self, s: Scribe) -> None:
        s.alloc("rows_grad", self.arrived * self.row, ACTIVATION_GRADIENTS)
        free_live(s, "combined_grad")
        move(s, True, "rows_grad", self.received * self.row)

    def backward_dispatch(self, s: Scribe) -> None:
        move(s, True, "rows_grad", self.arrived * self.row)
        s.transient("arrived_probs_grad", self.arrived * self.local * FP32, ROUTER)
        self._finish(s, "rows_grad")

    def drop(self, s: Scribe) -> None:
        super().drop(s)
        free_live(s, "choice", "arrived_probs")


def distinct_rows(moe: MoeSettings, local_experts: int, tokens: int) -> int:
    """Tokens of ``tokens`` that choose at least one of this rank's experts, in expectation when every choice is equally
    likely; with routing limited to groups, of the groups that a token chooses first."""
    experts, share = moe.num_experts, 1.0
    if moe.num_groups and moe.group_topk and local_experts <= experts // moe.num_groups:
        share = moe.group_topk / moe.num_groups
        experts = experts // moe.num_groups * moe.group_topk
    missed = comb(experts - local_experts, moe.topk) / comb(experts, moe.topk)
    return int(tokens * share * (1 - missed))


@lru_cache(maxsize=256)
def kept_blocks(model: ModelSettings, x: Shapes) -> tuple[Block, Block]:
    """What one layer's dispatcher keeps when the last microbatch has ended, and its end at the next forward."""
    assert model.moe is not None
    s = Scribe()
    for i, num_bytes in enumerate(DISPATCHERS[model.moe.dispatcher](model, x).kept_bytes()):
        s.alloc(f"kept{i}", num_bytes, ROUTER)
    made = s.cut("routing.kept")
    s.free(*list(s.live))
    return made, s.cut("routing.end")


DISPATCHERS: dict[str, type[Dispatcher]] = {"alltoall": AllToAll, "deepep": DeepEp, "hybridep": HybridEp}
