"""Interleaved 1F1B: several model chunks a rank.

Source: megatron-core 0.19.2, pipeline_parallel/schedules.py:902-2085 get_pp_rank_microbatches, get_schedule_table,
forward_backward_pipelining_with_interleaving (warm-up, steady, cool-down; with and without overlap_p2p_comm; without
overlap_p2p_comm_warmup_flush).
"""

from __future__ import annotations

from functools import lru_cache

from estimator.schedule.actions import INPUT, OUTPUT_GRAD, Action, ActionLog, Key

STEADY_GROUPS = {False: 2, True: 4}
"""Groups of microbatches that are written out, by overlap_p2p_comm: later ones repeat their steady rounds to the byte
(with overlap a local variable keeps the last warm-up input, which shows only once that microbatch is through). The
remainder group, and with it the order of the last passes, is kept. Compared with all groups by a test."""


def schedule_table(num_microbatches: int, num_chunks: int, group: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) of each virtual microbatch: a group passes one chunk after another."""
    return [
        (microbatch, chunk)
        for start in range(0, num_microbatches, group)
        for chunk in range(num_chunks)
        for microbatch in range(start, min(start + group, num_microbatches))
    ]


@lru_cache(maxsize=512)
def interleaved(
    num_stages: int, stage: int, num_microbatches: int, num_chunks: int, group: int | None, overlap: bool
) -> tuple[Action, ...]:
    """Actions of ``stage``, repetitive groups left out (microbatches are numbered as written out).

    Warm-up forwards: 2 (p - stage - 1) + (v - 1) g, at most all v m.
    """
    group = group or num_stages
    written = min(num_microbatches, STEADY_GROUPS[overlap] * group + num_microbatches % group)
    return _Interleaved(num_stages, stage, written, num_chunks, group, overlap).run()


class _Interleaved:
    def __init__(self, stages: int, stage: int, microbatches: int, chunks: int, group: int, overlap: bool) -> None:
        self.stages, self.chunks, self.overlap = stages, chunks, overlap
        self.table = schedule_table(microbatches, chunks, group)
        self.total = len(self.table)
        self.warmup = min(self.total, 2 * (stages - stage - 1) + (chunks - 1) * group)
        self.log = ActionLog(stage == 0, stage == stages - 1, chunks)
        early = group - stages + 1
        self.forward_slots = max(1, early) if self.log.first else 1
        self.backward_slots = max(1, early) if self.log.last else 1
        self.next_backward = [0] * chunks
        self.pending_output: tuple[int, int] | None = None

    def _chunk(self, k: int, forward: bool) -> int:
        chunk = self.table[k % self.total][1]
        return chunk if forward else self.chunks - 1 - chunk

    def _incoming(self, k: int, forward: bool) -> int | None:
        """The chunk for which pass ``k`` lets a tensor be received, or None (recv_tensor_from_previous_stage)."""
        if not (self.log.first if forward else self.log.last):
            return self._chunk(k + 1, forward)
        ending = self.chunks - 1 if forward else 0
        if k < self.stages - 1:
            return None
        chunk = self._chunk(k - (self.stages - 1), forward)
        if chunk == ending:
            return None
        return chunk + 1 if forward else chunk - 1

    def _receive(self, buffer: str, chunk: int | None) -> Key | None:
        return None if chunk is None else self.log.receive(buffer, chunk)

    def _forward(self, k: int) -> None:
        microbatch, chunk = self.table[k]
        self.log.forward(chunk, microbatch)
        self.pending_output = (chunk, microbatch)

    def _drop_output(self) -> None:
        if self.pending_output is not None:
            self.log.drop_output(*self.pending_output)
        self.pending_output = None

    def _backward(self, k: int) -> None:
        chunk = self._chunk(k, forward=False)
        self.log.backward(chunk, self.next_backward[chunk])
        self.next_backward[chunk] += 1

    def run(self) -> tuple[Action, ...]:
        log = self.log
        if log.has_input(0):
            log.receive(INPUT, 0)
        for k in range(self.warmup):
            self._warm(k)
        steady = self.total - self.warmup
        for k in range(steady):
            if self.overlap:
                self._steady_overlapped(k, steady)
            else:
                self._steady(k, steady)
        self._drop_output()
        if not steady and not log.last:
            log.receive(OUTPUT_GRAD, self.chunks - 1)
        for k in range(steady, self.total):
            incoming = self._incoming(k, forward=False) if k < self.total - 1 else None
            self._backward(k)
            log.assign("output_tensor_grad", self._receive(OUTPUT_GRAD, incoming))
        return log.finish()

    def _warm(self, k: int) -> None:
        incoming = self._incoming(k, forward=True) if k < self.total - 1 else None
        self._forward(k)
        received = self._receive(INPUT, incoming)
        begins = k == self.warmup - 1 and self.warmup < self.total and not self.log.last
        first_grad = self.log.receive(OUTPUT_GRAD, self.chunks - 1) if begins and not self.overlap else None
        self.log.assign("input_tensor", received)
        if begins and not self.overlap:
            self.log.assign("output_tensor_grad", first_grad)
        self._drop_output()
        if begins and self.overlap:
            slot = self.backward_slots - 1
            self.log.assign(f"backward slot {slot}", self.log.receive(OUTPUT_GRAD, self.chunks - 1))

    def _steady(self, k: int, steady: int) -> None:
        """Forward and backward, then all sends and receives at once."""
        forward = k + self.warmup
        self._forward(forward)
        self._backward(k)
        received = self._receive(INPUT, self._incoming(forward, forward=True) if k < steady - 1 else None)
        received_grad = self._receive(OUTPUT_GRAD, self._incoming(k, forward=False) if k < self.total - 1 else None)
        self.log.assign("input_tensor", received)
        self.log.assign("output_tensor_grad", received_grad)
        self._drop_output()

    def _steady_overlapped(self, k: int, steady: int) -> None:
        """The next input is received before the backward, the next gradient after it."""
        forward = k + self.warmup
        self._drop_output()
        self._forward(forward)
        received = self._receive(INPUT, self._incoming(forward, forward=True) if k < steady - 1 else None)
        self._fill("forward", forward, self.forward_slots, received)
        self._backward(k)
        received_grad = self._receive(OUTPUT_GRAD, self._incoming(k, forward=False) if k < self.total - 1 else None)
        self._fill("backward", k, self.backward_slots, received_grad)

    def _fill(self, direction: str, k: int, slots: int, key: Key | None) -> None:
        self.log.assign(f"{direction} slot {k % slots}", key)
        if key is not None:
            self.log.assign(f"{direction} slot {(k + 1) % slots}", None)
