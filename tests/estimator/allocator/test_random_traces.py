"""What holds for any trace, and what PyTorch's own allocator made of random ones."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimator.allocator import DEFAULT, EXPANDABLE_SEGMENTS, AllocatorSettings, parse_alloc_conf, replay, survival
from estimator.allocator.compiled import HAS_NUMBA
from estimator.allocator.kernel import ALLOC, FREE
from estimator.allocator.random_traces import NUM_STREAMS, random_trace
from estimator.allocator.recorded import FOLDER
from estimator.allocator.trace import Trace

MIB = 1 << 20
PAGE = 20 * MIB
MEASURED = FOLDER / "random_h200.jsonl"

any_settings = st.builds(
    AllocatorSettings,
    expandable_segments=st.booleans(),
    max_split_size_bytes=st.sampled_from([None, 20 * MIB, 64 * MIB, 512 * MIB]),
    roundup_power2_divisions=st.sampled_from([(0,) * 16, (4,) * 16]),
    garbage_collection_threshold=st.sampled_from([0.0, 0.6]),
)


def live_bytes(trace: Trace, allocator: AllocatorSettings) -> int:
    made = trace.kinds == ALLOC
    rounded = [allocator.rounded(n) for n in trace.sizes[made].tolist()]
    sizes = dict(zip(trace.buffers[made].tolist(), rounded, strict=True))
    live = peak = 0
    for kind, buffer in zip(trace.kinds.tolist(), trace.buffers.tolist(), strict=True):
        live += sizes[buffer] if kind == ALLOC else -sizes[buffer] if kind == FREE else 0
        peak = max(peak, live)
    return peak


@settings(max_examples=60 if HAS_NUMBA else 15, deadline=None)
@given(st.integers(1, 10_000), any_settings)
def test_reserved_holds_allocated(seed: int, allocator: AllocatorSettings) -> None:
    trace = random_trace(seed, num_events=200)
    result = replay(trace, allocator, keep_course=True)
    assert result.died is None
    assert (result.reserved_bytes >= result.allocated_bytes).all()
    assert result.peak_reserved_bytes == result.reserved_bytes.max()
    # Allocated bytes exceed the sum of what was asked for only by rests that were not split off.
    exact = live_bytes(trace, allocator)
    num_live = int(np.cumsum(np.where(trace.kinds == ALLOC, 1, np.where(trace.kinds == FREE, -1, 0))).max())
    rest = 0 if allocator.expandable_segments else max(MIB, allocator.max_non_split_rounding_bytes)
    assert exact <= result.peak_allocated_bytes <= exact + num_live * rest


@settings(max_examples=20 if HAS_NUMBA else 5, deadline=None)
@given(st.integers(1, 10_000), any_settings)
def test_survival_lies_between_peaks(seed: int, allocator: AllocatorSettings) -> None:
    trace = random_trace(seed, num_events=150)
    free = replay(trace, allocator)
    needed = survival(trace, allocator)
    assert free.peak_reserved_bytes <= free.max_granted_bytes + allocator.expandable_segments * 2 * PAGE * NUM_STREAMS
    assert needed <= free.max_granted_bytes
    if not allocator.expandable_segments:
        assert needed <= free.peak_reserved_bytes
    assert replay(trace, allocator, limit=needed).died is None
    # A memory fraction looks at the request, not at the pages mapped for it: one page of each pool may exceed it.
    assert needed + allocator.expandable_segments * 2 * PAGE * NUM_STREAMS >= live_bytes(trace, allocator)


@settings(max_examples=20 if HAS_NUMBA else 3, deadline=None)
@given(st.integers(1, 10_000), st.sampled_from([DEFAULT, EXPANDABLE_SEGMENTS]))
def test_a_full_gpu_holds_what_is_live(seed: int, allocator: AllocatorSettings) -> None:
    trace = random_trace(seed, num_events=150)
    needed = survival(trace, allocator, device_cap=True)
    result = replay(trace, allocator, limit=needed, device_cap=True)
    assert result.died is None
    assert live_bytes(trace, allocator) <= result.peak_reserved_bytes <= needed
    assert needed <= replay(trace, allocator).peak_reserved_bytes


@pytest.mark.parametrize("allocator", [DEFAULT, EXPANDABLE_SEGMENTS], ids=["default", "expandable"])
def test_anomalies_are_rare(allocator: AllocatorSettings) -> None:
    """A larger limit rarely dies where a smaller one survived: releasing later can leave a worse arrangement."""
    num_anomalies = num_limits = 0
    for seed in range(1, 21 if HAS_NUMBA else 4):
        trace = random_trace(seed, num_events=300)
        needed = survival(trace, allocator)
        for step in range(1, 11):
            limit = needed + step * needed // 100
            num_limits += 1
            num_anomalies += replay(trace, allocator, limit=limit).died is not None
    assert num_anomalies <= num_limits * 0.05


@pytest.mark.skipif(not HAS_NUMBA, reason="compares numba's code with the plain functions; needs numba")
def test_compiled_equals_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    from estimator.allocator import kernel

    traces = [random_trace(seed, num_events=120) for seed in range(1, 4)]
    cases = list(product(traces, (DEFAULT, EXPANDABLE_SEGMENTS), (None, 3 << 30)))
    compiled = [replay(*case).peak_reserved_bytes for case in cases]
    for name, value in vars(kernel).copy().items():
        if hasattr(value, "py_func"):
            monkeypatch.setattr(kernel, name, value.py_func)
    assert [replay(*case).peak_reserved_bytes for case in cases] == compiled


def test_the_same_seed_is_the_same_trace() -> None:
    trace = random_trace(7)
    assert (len(trace), trace.num_buffers) == (len(random_trace(7)), random_trace(7).num_buffers)
    assert int(trace.sizes.sum()) == int(random_trace(7).sizes.sum())


def measured(path: Path) -> list[dict[str, object]]:
    if not path.exists():
        pytest.skip("no random traces measured yet: python -m estimator.allocator.random_traces on a GPU")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("conf", ["expandable_segments:False", "expandable_segments:True"])
def test_peaks_match_the_real_allocator(conf: str) -> None:
    records = [r for r in measured(MEASURED) if r["settings"] == conf]
    assert len(records) >= 50
    errors = []
    for record in records:
        result = replay(random_trace(int(str(record["seed"]))), parse_alloc_conf(conf))
        errors.append(abs(result.peak_reserved_bytes / int(str(record["peak_reserved_bytes"])) - 1))
    assert sum(error <= 0.01 for error in errors) >= 0.95 * len(errors)


@pytest.mark.parametrize("conf", ["expandable_segments:False", "expandable_segments:True"])
def test_survival_matches_the_real_allocator(conf: str) -> None:
    records = [r for r in measured(MEASURED) if r["settings"] == conf and "died_at_bytes" in r]
    errors = []
    for record in records:
        needed = survival(random_trace(int(str(record["seed"]))), parse_alloc_conf(conf))
        died_at, survived_at = int(str(record["died_at_bytes"])), int(str(record["survived_at_bytes"]))
        errors.append(max(died_at - needed, needed - survived_at, 0) / survived_at)
    assert float(np.median(errors)) <= 0.01
    assert max(errors) <= 0.05
