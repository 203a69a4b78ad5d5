"""Timelines as traces: buffers meet by scope and name, or the error says which does not."""

from __future__ import annotations

import pytest

from estimator.allocator import TraceError, compile_ops
from estimator.allocator.kernel import ALLOC, EMPTY_CACHE, FREE, FREE_COMPLETED, FREE_REQUESTED
from estimator.allocator.trace import with_delayed_frees
from estimator.timeline import EMPTY_CACHE_OP, Block, Op, Timeline


def op(name: str, num_bytes: int, stream: str = "default") -> Op:
    return Op(name, num_bytes, "component", stream)


def timeline(*runs: tuple[tuple[object, ...], list[Op]]) -> Timeline:
    result = Timeline()
    result.phase("only")
    for scope, ops in runs:
        result.run(Block("block", tuple(ops)), scope)
    return result


def test_buffers_meet_by_scope() -> None:
    trace = compile_ops(
        timeline(
            (("first", 0, 0), [op("output", 512), op("kept", 1024)]),
            (("first", 0, 1), [op("output", 1536), op("^grad_sum", 2048), op("^grad_sum>^grad", 0)]),
            (("first", 0, 1), [op("prev/output", -512), op("output", -1536)]),
            (("first", 0), [op("^grad", -2048)]),
            (("first", 0, 0), [op("kept", -1024)]),
            ((), [op("parameters", 4096, "side"), op(EMPTY_CACHE_OP, 0)]),
        )
    )
    assert trace.kinds.tolist() == [ALLOC] * 4 + [FREE] * 4 + [ALLOC, EMPTY_CACHE]
    assert trace.buffers.tolist()[:9] == [0, 1, 2, 3, 0, 2, 3, 1, 4]
    assert trace.sizes.tolist() == [512, 1024, 1536, 2048, 0, 0, 0, 0, 4096, 0]
    assert [trace.stream_names[i] for i in trace.streams.tolist()] == ["default"] * 8 + ["side", "default"]
    assert trace.phase_names == ("only",)


def test_a_block_runs_in_many_scopes() -> None:
    result = Timeline()
    result.phase("forward")
    block = Block("layer", (op("input", 512), op("output", 512), op("input", -512)))
    for layer in range(3):
        result.run(block, ("first", 0, layer))
    assert compile_ops(result).buffers.tolist() == [0, 1, 0, 2, 3, 2, 4, 5, 4]


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([((), [op("a", -512)])], "'a' is freed in scope .* but not allocated"),
        ([((), [op("a", 512)]), ((), [op("a", 512)])], "'a' is allocated in scope .* while it is live"),
        ([((), [op("a", 512), op("a", 512)])], "'a' is allocated twice"),
        ([((), [op("a", 512)]), ((), [op("a", -1024)])], "512 bytes, 1024 are freed"),
        ([((), [op("a", 512), op("a", -1024)])], "512 bytes, 1024 are freed"),
        ([((), [op("a>b", 0)])], "'a' is freed in scope"),
        ([((1, 0, 1), [op("a", 512)]), ((1, 0, 1), [op("prev/a", -512)])], "not allocated"),
    ],
)
def test_what_does_not_meet_is_named(runs: list[tuple[tuple[object, ...], list[Op]]], words: str) -> None:
    with pytest.raises(TraceError, match=words):
        compile_ops(timeline(*runs))


def test_nothing_is_a_trace_too() -> None:
    assert len(compile_ops(Timeline())) == 0


def test_delayed_frees() -> None:
    ops = [op("a", 512, "side"), op("b", 512), op("a", -512, "side"), op("b", -512), op("c", 512)]
    trace = with_delayed_frees(compile_ops(timeline(((), ops))), "side", 2)
    assert trace.kinds.tolist() == [ALLOC, ALLOC, FREE_REQUESTED, FREE, FREE_COMPLETED, ALLOC]
    assert trace.buffers.tolist() == [0, 1, 0, 1, 0, 2]
