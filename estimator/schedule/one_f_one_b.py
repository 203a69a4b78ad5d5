"""Non-interleaved 1F1B. Source: megatron-core 0.19.2, pipeline_parallel/schedules.py
forward_backward_pipelining_without_interleaving and forward_backward_no_pipelining."""

from __future__ import annotations

from typing import NamedTuple

STEADY_ROUNDS = 2
"""Rounds of one forward and one backward that are written out. Later rounds repeat the second to the byte: every buffer
that a round makes, the next one frees. The first and last microbatch are always among those written out."""


class Pass(NamedTuple):
    """One forward ("F") or backward ("B") of a microbatch; ``is_last`` marks the last backward of the step."""

    kind: str
    microbatch: int
    is_last: bool = False


def stage_order(num_stages: int, stage: int, num_microbatches: int) -> tuple[Pass, ...]:
    """Passes of ``stage`` in order, repetitive steady rounds left out (microbatches are numbered as written out).

    Warm-up forwards: min(m, p - stage - 1); then one forward, one backward; then the remaining backwards.
    """
    warmup = min(num_microbatches, num_stages - stage - 1)
    total = min(num_microbatches, warmup + STEADY_ROUNDS)
    passes = [Pass("F", i) for i in range(warmup)]
    for i in range(total - warmup):
        passes.append(Pass("F", warmup + i))
        passes.append(Pass("B", i))
    done = total - warmup
    passes += [Pass("B", i) for i in range(done, total)]
    for i in range(len(passes) - 1, -1, -1):
        if passes[i].kind == "B":
            passes[i] = passes[i]._replace(is_last=True)
            break
    return tuple(passes)
