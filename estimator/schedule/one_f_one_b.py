"""Non-interleaved 1F1B. Source: megatron-core 0.19.2, pipeline_parallel/schedules.py:2120-2420
forward_backward_pipelining_without_interleaving and forward_backward_no_pipelining."""

from __future__ import annotations

from estimator.schedule.actions import INPUT, OUTPUT_GRAD, Action, ActionLog, Key

STEADY_ROUNDS = 2
"""Rounds of one forward and one backward that are written out. Later rounds repeat the second to the byte: every buffer
that a round makes, the next one frees. The first and last microbatch are always among those written out."""


def one_f_one_b(num_stages: int, stage: int, num_microbatches: int) -> tuple[Action, ...]:
    """Actions of ``stage`` in order, repetitive steady rounds left out (microbatches are numbered as written out).

    Warm-up forwards: min(m, p - stage - 1); then one forward, one backward; then the remaining backwards.
    """
    warmup = min(num_microbatches, num_stages - stage - 1)
    total = min(num_microbatches, warmup + STEADY_ROUNDS)
    log = ActionLog(stage == 0, stage == num_stages - 1, 1)

    def receive(buffer: str) -> Key | None:
        wanted = log.has_input(0) if buffer == INPUT else log.sends(0)
        return log.receive(buffer, 0) if wanted else None

    for i in range(warmup):
        log.assign("input_tensor", receive(INPUT))
        log.forward(0, i)
        log.drop_output(0, i)
    if total > warmup:
        log.assign("input_tensor", receive(INPUT))
    for i in range(total - warmup):
        log.forward(0, warmup + i)
        log.assign("output_tensor_grad", receive(OUTPUT_GRAD))
        log.drop_output(0, warmup + i)
        log.assign("input_tensor", (INPUT, 0, i) if log.has_input(0) else None)
        log.backward(0, i)
        log.assign("input_tensor", receive(INPUT) if i < total - warmup - 1 else None)
    for i in range(total - warmup, total):
        log.assign("input_tensor", (INPUT, 0, i) if log.has_input(0) else None)
        log.assign("output_tensor_grad", receive(OUTPUT_GRAD))
        log.backward(0, i)
    return log.finish()
