"""Actions of a pipeline schedule: passes through model chunks, and the life of the tensors that stages exchange.

A tensor lives as long as Python refers to it: from the schedule's lists and local variables, and from the model chunk
whose ``set_input_tensor`` was called with it last (megatron-core 0.19.2, models/gpt/gpt_model.py:300). The gradient of
an input is an attribute of the input (``retain_grad``, pipeline_parallel/schedules.py:554) and lives with it.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

FORWARD, BACKWARD = "F", "B"
RECEIVE, DROP, DROP_PREVIOUS = "receive", "drop", "drop_previous"
"""RECEIVE makes a buffer, DROP frees one, DROP_PREVIOUS frees one that the iteration before left (in the first: none).
A backward leaves its input and both gradients: local variables of backward_step_helper hold them."""

INPUT, INPUT_GRAD, OUTPUT, OUTPUT_GRAD = "input", "input_grad", "output", "output_grad"


class Action(NamedTuple):
    """One pass (FORWARD, BACKWARD) of ``microbatch`` through ``chunk``, or what happens to one of its buffers.

    ``is_last``: the last backward of this chunk in the step.
    """

    kind: str
    chunk: int
    microbatch: int
    buffer: str = ""
    is_last: bool = False


Key = tuple[str, int, int]
"""Name of a buffer, chunk, microbatch."""


class ActionLog:
    """Writes actions while counting the references to every exchanged buffer."""

    def __init__(self, is_first_stage: bool, is_last_stage: bool, num_chunks: int) -> None:
        self.actions: list[Action] = []
        self.first, self.last, self.num_chunks = is_first_stage, is_last_stage, num_chunks
        self._references: Counter[Key] = Counter()
        self._variables: dict[str, Key | None] = {}
        self._received: Counter[tuple[str, int]] = Counter()
        self._forwarded: set[int] = set()

    # -- references -----------------------------------------------------------------------------------------------
    def receive(self, buffer: str, chunk: int) -> Key:
        """A new buffer for the next microbatch of ``chunk``; the schedule's list refers to it until its backward."""
        key = (buffer, chunk, self._received[buffer, chunk])
        self._received[buffer, chunk] += 1
        self.actions.append(Action(RECEIVE, chunk, key[2], buffer))
        self._references[key] += 1
        return key

    def assign(self, variable: str, key: Key | None) -> None:
        """``variable`` now refers to ``key``, and no longer to what it referred to before."""
        if key is not None:
            self._references[key] += 1
        before = self._variables.get(variable)
        self._variables[variable] = key
        if before is not None:
            self._release(before)

    def _release(self, key: Key) -> None:
        self._references[key] -= 1
        if not self._references[key]:
            self.actions.append(Action(DROP, key[1], key[2], key[0]))
            if key[0] == INPUT:
                self._release_grad(key)

    def _release_grad(self, key: Key) -> None:
        grad = (INPUT_GRAD, key[1], key[2])
        if self._references[grad]:
            self._release(grad)

    # -- passes ---------------------------------------------------------------------------------------------------
    def has_input(self, chunk: int) -> bool:
        return not (self.first and chunk == 0)

    def sends(self, chunk: int) -> bool:
        return not (self.last and chunk == self.num_chunks - 1)

    def forward(self, chunk: int, microbatch: int) -> None:
        """The chunk now refers to this microbatch's input instead of the one before."""
        if self.has_input(chunk):
            if chunk not in self._forwarded:
                for buffer in (INPUT_GRAD, INPUT):
                    self.actions.append(Action(DROP_PREVIOUS, chunk, -1, buffer))
            self.assign(f"chunk {chunk}", (INPUT, chunk, microbatch))
        self._forwarded.add(chunk)
        self.actions.append(Action(FORWARD, chunk, microbatch))

    def drop_output(self, chunk: int, microbatch: int) -> None:
        """deallocate_output_tensor (schedules.py:166)."""
        if self.sends(chunk):
            self.actions.append(Action(DROP, chunk, microbatch, OUTPUT))

    def backward(self, chunk: int, microbatch: int) -> Key | None:
        """Runs a backward and lets go of the lists' references; the key of the gradient that it returns."""
        self.actions.append(Action(BACKWARD, chunk, microbatch))
        if self.sends(chunk):
            self._release((OUTPUT_GRAD, chunk, microbatch))
        if not self.has_input(chunk):
            self.assign("input_tensor_grad", None)
            return None
        key, grad = (INPUT, chunk, microbatch), (INPUT_GRAD, chunk, microbatch)
        self._references[grad] += 1
        before = self._variables.get("input_tensor_grad")
        self._variables["input_tensor_grad"] = grad
        self._references[grad] += 1
        self._release(key)
        if before is not None:
            self._release(before)
        return grad

    def finish(self) -> tuple[Action, ...]:
        """Local variables of the schedule end; what chunks refer to stays until the next iteration."""
        for variable in [name for name in self._variables if not name.startswith("chunk ")]:
            self.assign(variable, None)
        last_of: dict[int, int] = {a.chunk: i for i, a in enumerate(self.actions) if a.kind == BACKWARD}
        for i in last_of.values():
            self.actions[i] = self.actions[i]._replace(is_last=True)
        last_microbatch = {a.chunk: a.microbatch for a in self.actions if a.kind == FORWARD}
        return tuple(
            a._replace(microbatch=last_microbatch[a.chunk]) if a.kind == DROP_PREVIOUS else a for a in self.actions
        )
