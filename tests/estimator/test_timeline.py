"""The timeline's arithmetic, small enough to check by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.timeline import Scribe, Timeline, rounded


@pytest.mark.parametrize(
    ("request_bytes", "counted"), [(0, 512), (1, 512), (512, 512), (513, 1024), (1 << 20, 1 << 20)]
)
def test_requests_are_counted_in_steps_of_512_bytes(request_bytes: int, counted: int) -> None:
    assert rounded(request_bytes) == counted


def test_a_block_knows_its_net_change_and_its_highest_point() -> None:
    s = Scribe()
    s.alloc("saved", 1024, "mlp")
    s.alloc("temporary", 2048, "mlp")
    s.free("temporary")
    block = s.cut("forward")
    assert (block.delta, block.peak, block.peak_index) == (1024, 3072, 2)
    s.free("saved")
    assert s.cut("backward").delta == -1024


def test_phases_and_components_at_the_peak() -> None:
    s = Scribe()
    timeline = Timeline()
    timeline.phase("build")
    s.alloc("weights", 4096, "parameters")
    timeline.run(s.cut("build"))
    timeline.phase("step")
    s.alloc("activation", 2048, "mlp")
    s.alloc("gradient", 1024, "grads")
    s.free("activation")
    timeline.run(s.cut("step"))
    build, step = timeline.phases()
    assert (build.allocated_bytes, build.peak_bytes) == (4096, 4096)
    assert (step.allocated_bytes, step.peak_bytes) == (5120, 7168)
    assert timeline.components_at_peak(step) == {"parameters": 4096, "mlp": 2048, "grads": 1024}


def test_the_same_name_cannot_be_allocated_twice() -> None:
    s = Scribe()
    s.alloc("x", 1, "mlp")
    with pytest.raises(ValueError, match="'x' is allocated twice"):
        s.alloc("x", 1, "mlp")


def test_rename_keeps_the_memory() -> None:
    s = Scribe()
    s.alloc("old", 512, "mlp")
    s.rename("old", "new")
    s.free("new")
    block = s.cut("renamed")
    assert block.delta == 0
    assert [op.name for op in block.ops] == ["old", "old>new", "new"]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10_000)), max_size=60))
def test_block_composition_equals_replaying_every_op(actions: list[tuple[int, int]]) -> None:
    s = Scribe()
    timeline = Timeline()
    timeline.phase("all")
    for key, size in actions:
        name = f"b{key}"
        if name in s.live:
            s.free(name)
        else:
            s.alloc(name, size, f"c{key % 3}")
        if size % 3 == 0:
            timeline.run(s.cut("part"))
    timeline.run(s.cut("rest"))
    running = peak = 0
    for _, _, op in timeline.ops():
        running += op.num_bytes
        peak = max(peak, running)
    (phase,) = timeline.phases()
    assert (phase.allocated_bytes, phase.peak_bytes) == (running, peak)
    assert sum(timeline.components_at_peak(phase).values()) == peak
