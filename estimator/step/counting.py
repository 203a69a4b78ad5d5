"""Running sum and peak of a rank's allocations without keeping them: what a search needs of thousands of candidates.

Stands in for the strategy's :class:`Scribe` and the :class:`Timeline` at once, so that the same composer and the same
strategies run: nothing is modelled twice. What a strategy writes counts at once instead of when it is cut, which
changes no sum at the composer's block boundaries (tests hold both against each other).
"""

from __future__ import annotations

from estimator.timeline import ALIGNMENT_BYTES, COMPUTE, EMPTY, Block, Scribe, Timeline

_ROUND_UP = ALIGNMENT_BYTES - 1


class Counter:
    """Bytes allocated now, the most since the iteration began, and how much there was to do for it.

    ``work`` counts blocks, buffers and gradients: the same on every machine, about a microsecond each.
    """

    __slots__ = ("peak", "running", "work")

    def __init__(self) -> None:
        self.running = self.peak = self.work = 0


class CountingScribe(Scribe):
    """Counts what a strategy writes; remembers sizes by name only."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter
        self._sizes: dict[str, int] = {}
        self.live = self._sizes  # type: ignore[assignment]  # strategies look names up, never ops

    def assume(self, name: str, num_bytes: int, component: str, stream: str = COMPUTE) -> None:
        self._sizes[name] = (num_bytes + _ROUND_UP) // ALIGNMENT_BYTES * ALIGNMENT_BYTES or ALIGNMENT_BYTES

    def alloc(self, name: str, num_bytes: int, component: str, stream: str = COMPUTE) -> None:
        size = (num_bytes + _ROUND_UP) // ALIGNMENT_BYTES * ALIGNMENT_BYTES if num_bytes > 0 else ALIGNMENT_BYTES
        self._sizes[name] = size
        counter = self._counter
        counter.work += 1
        counter.running += size
        if counter.running > counter.peak:
            counter.peak = counter.running

    def free(self, *names: str) -> None:
        for name in names:
            self._counter.running -= self._sizes.pop(name)

    def empty_cache(self) -> None:
        return

    def rename(self, old: str, new: str) -> None:
        self._sizes[new] = self._sizes.pop(old)

    def cut(self, name: str) -> Block:
        return EMPTY


class CountingTimeline(Timeline):
    """Counts the blocks that it is given to run."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    def phase(self, name: str) -> None:
        """An iteration begins with its forward and backward; its optimizer step counts with them."""
        if not name.endswith("optimizer_step"):
            self._counter.peak = self._counter.running

    def run(self, block: Block, scope: tuple[object, ...] = ()) -> None:
        counter = self._counter
        counter.work += 1
        if counter.running + block.peak > counter.peak:
            counter.peak = counter.running + block.peak
        counter.running += block.delta
