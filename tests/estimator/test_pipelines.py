"""Pipeline splits, layouts written out, the interleaved schedule, and measured ranks of interleaved pipelines."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from estimator.job.settings import (
    BatchSettings,
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    RecomputeSettings,
    Settings,
    ShardingSettings,
)
from estimator.layout import parse_layout, stage_shares
from estimator.schedule import interleaved, interleaving, pipeline_order
from estimator.schedule.actions import DROP, DROP_PREVIOUS, FORWARD, INPUT, OUTPUT, RECEIVE, Action
from estimator.step import step_timeline

SOURCE = (
    "one H200, fake process group, Bridge's _ddp_wrap, 2026; 8 layers of h 2048, f 7168, 16 heads, 8 groups, V 32000"
)

MEASURED = [
    # stages, chunks, stage, microbatches; allocated after wrap, first forward-backward peak, allocated after the first
    # step, second forward-backward peak, allocated after the second
    (2, 2, 0, 4, 1753302016, 5304259584, 2815030784, 5888361472, 2815030784),
    (2, 2, 1, 4, 1753310208, 4488518144, 3047066112, 5072611840, 3047066112),
    (4, 2, 1, 8, 679527424, 3869880832, 1577160192, 4322898432, 1577160192),
    (2, 4, 0, 8, 1753311232, 5047080448, 2885300736, 5631170048, 2885300736),
]


def job(stages: int, chunks: int | None, microbatches: int, **parallel: object) -> Settings:
    return Settings(
        ModelSettings(8, 2048, 7168, 16, 8, 128, 32000, 4096, cross_entropy_fusion_impl="te"),
        ParallelSettings(
            8,
            pipeline_model_parallel_size=stages,
            virtual_pipeline_model_parallel_size=chunks,
            **parallel,  # type: ignore[arg-type]
        ),
        ShardingSettings("distopt", bucket_size=40_000_000),
        OptimizerSettings(clipping_active=False),
        RecomputeSettings(),
        BatchSettings(1, 8 // stages * microbatches),
    )


@pytest.mark.parametrize("row", MEASURED)
def test_interleaved_ranks_as_measured(row: tuple[int, ...]) -> None:
    stages, chunks, stage, microbatches, wrapped, first, after_first, second, after_second = row
    phases = {p.name: p for p in step_timeline(job(stages, chunks, microbatches), stage).timeline.phases()}
    assert phases["model_build"].allocated_bytes == pytest.approx(wrapped, rel=0.001)
    assert phases["first_forward_backward"].peak_bytes == pytest.approx(first, rel=0.001)
    assert phases["first_optimizer_step"].allocated_bytes == pytest.approx(after_first, rel=0.001)
    assert phases["steady_forward_backward"].peak_bytes == pytest.approx(second, rel=0.001)
    assert phases["steady_optimizer_step"].allocated_bytes == pytest.approx(after_second, rel=0.001)


# layout, stages; source: docstrings of pipeline_parallel_layer_layout.py:282-312
LAYOUTS = [
    ("Ettt|(tt|)*29,m|L", ("Ettt", *["tt"] * 29, "m", "L")),
    ("Et*3|(tt|)*2,t*2L", ("Ettt", "tt", "tt", "ttL")),
    ("E(|t)*3|L", ("E", "t", "t", "t", "L")),
    ([["embedding", "decoder"], ["decoder", "loss"]], ("Et", "tL")),
    ([["LayerType.embedding"], ["decoder", "mtp", "loss"]], ("E", "tmL")),
]


@pytest.mark.parametrize(("layout", "stages"), LAYOUTS)
def test_layouts_are_parsed(layout: object, stages: tuple[str, ...]) -> None:
    assert parse_layout(layout) == stages  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["Etx|L", [["norm"]]])
def test_unknown_layers_are_refused(layout: object) -> None:
    with pytest.raises(ValueError, match="unknown layer"):
        parse_layout(layout)  # type: ignore[arg-type]


# parallel settings, layers by rank and virtual stage; source: transformer_block.py:70-197
SPLITS = [
    ({"chunks": 2}, ((2, 2), (2, 2))),
    ({"chunks": 2, "num_layers_in_first_pipeline_stage": 2}, ((1, 1), (3, 3))),
    ({"chunks": 2, "pipeline_model_parallel_layout": "E|tttt|tt|ttL"}, ((0, 2), (4, 2))),
    ({"chunks": None, "pipeline_model_parallel_layout": "Et*3|t*5,L"}, ((3,), (5,))),
]


@pytest.mark.parametrize(("given", "layers"), SPLITS)
def test_splits(given: dict[str, object], layers: tuple[tuple[int, ...], ...]) -> None:
    given = dict(given)
    settings = job(2, given.pop("chunks"), 4, **given)  # type: ignore[arg-type]
    shares = stage_shares(settings.model, settings.parallel)
    assert tuple(tuple(c.num_layers for c in share.chunks) for share in shares) == layers
    firsts = sorted((c.first_layer, c.num_layers) for share in shares for c in share.chunks)
    assert firsts[0][0] == 0
    assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(firsts))


def test_embedding_and_loss_stand_for_a_layer_of_their_chunk() -> None:
    model = replace(job(2, 2, 4).model, num_layers=6)
    parallel = ParallelSettings(
        8,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    )
    assert [[c.num_layers for c in s.chunks] for s in stage_shares(model, parallel)] == [[1, 2], [2, 1]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pipeline_model_parallel_layout": "Et*8|L"}, "2 stages, not 2 x 2"),
        ({"pipeline_model_parallel_layout": "Ett|tt|tt|tL"}, "7 decoder layers"),
        ({"pipeline_model_parallel_layout": "tt|Ett|tt|ttL"}, "begin with the only embedding"),
        ({"num_layers_in_first_pipeline_stage": 3}, "do not divide by 2 virtual stages"),
    ],
)
def test_impossible_splits(given: dict[str, object], message: str) -> None:
    settings = job(2, 2, 4, **given)
    with pytest.raises(ValueError, match=message):
        stage_shares(settings.model, settings.parallel)


SCHEDULES = [
    (p, v, m, n, overlap)
    for p, v, n in ((2, 2, None), (2, 3, 3), (3, 2, 4), (4, 2, None), (4, 3, 8))
    for m in ((n or p), 2 * (n or p), 2 * (n or p) + p)
    for overlap in (False, True)
    if m % (n or p) in (0, p)
]


@pytest.mark.parametrize(("stages", "chunks", "microbatches", "group", "overlap"), SCHEDULES)
def test_stages_exchange_what_they_send(
    stages: int, chunks: int, microbatches: int, group: int | None, overlap: bool
) -> None:
    """Every microbatch passes every chunk once each way, with its tensors received before and dropped after."""
    for stage in range(stages):
        actions = interleaved(stages, stage, microbatches, chunks, group, overlap)
        live: set[tuple[str, int, int]] = set()
        seen = set()
        for kind, chunk, microbatch, buffer, _ in actions:
            key = (buffer, chunk, microbatch)
            if kind == RECEIVE:
                assert key not in live
                live.add(key)
            elif kind == FORWARD:
                assert (stage == chunk == 0) or (INPUT, chunk, microbatch) in live
                seen.add(("F", chunk, microbatch))
            elif kind == "B":
                assert ("F", chunk, microbatch) in seen
                assert ("B", chunk, microbatch) not in seen
                assert (stage == stages - 1 and chunk == chunks - 1) or ("output_grad", chunk, microbatch) in live
                seen.add(("B", chunk, microbatch))
            elif kind == DROP and buffer in (INPUT, "output_grad"):
                live.remove(key)
        written = 1 + max(a.microbatch for a in actions)
        assert written <= microbatches
        assert len(seen) == 2 * chunks * written


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("stages", "chunks", "group"), [(2, 2, None), (3, 3, None), (4, 2, 5), (2, 4, 4), (4, 3, None)]
)
def test_groups_that_are_left_out_change_nothing(
    monkeypatch: pytest.MonkeyPatch, stages: int, chunks: int, group: int | None, overlap: bool
) -> None:
    microbatches = 7 * (group or stages)
    model = ModelSettings(stages * chunks, 1024, 2816, 16, 4, 64, 32000, 2048)
    settings = Settings(
        model,
        ParallelSettings(
            stages,
            pipeline_model_parallel_size=stages,
            virtual_pipeline_model_parallel_size=chunks,
            microbatch_group_size_per_vp_stage=group,
            overlap_p2p_comm=overlap,
        ),
        ShardingSettings("distopt"),
        OptimizerSettings(),
        RecomputeSettings(),
        BatchSettings(1, microbatches),
    )

    def phases() -> list[list[tuple[int, int]]]:
        timelines = [step_timeline(settings, stage).timeline for stage in range(stages)]
        return [[(p.allocated_bytes, p.peak_bytes) for p in timeline.phases()] for timeline in timelines]

    short = phases()
    monkeypatch.setitem(interleaving.STEADY_GROUPS, overlap, 100)
    interleaved.cache_clear()
    assert phases() == short
    interleaved.cache_clear()


def test_one_f_one_b_holds_at_most_one_microbatch_a_later_stage() -> None:
    for stage in range(4):
        actions = pipeline_order(job(4, None, 9).parallel, stage, 9)
        flight, most = 0, 0
        for action in actions:
            flight += (action.kind == FORWARD) - (action.kind == "B")
            most = max(most, flight)
        assert most == 4 - stage
        assert [a for a in actions if a.is_last] == [a for a in actions if a.kind == "B"][-1:]


def test_outputs_are_dropped_once_and_inputs_of_the_step_before_too() -> None:
    actions = pipeline_order(job(2, 2, 4).parallel, 1, 4)
    outputs = [a for a in actions if a.kind == DROP and a.buffer == OUTPUT]
    assert {(a.chunk, a.microbatch) for a in outputs} == {(0, m) for m in range(4)}
    assert Action(DROP_PREVIOUS, 0, 3, INPUT) in actions
