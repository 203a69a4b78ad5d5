"""The bisection: bracket, tolerance, and runs that do not answer with a survival."""

import pytest

from estimator.profiling.survival import TOLERANCE, survival_search

from .jobs import GIB, measured, small_job


def bisect(true_bytes, peak_allocated, peak_reserved, allocator="default"):
    search = survival_search(small_job(), allocator)
    probes, answer, job = [], None, next(search)
    try:
        while True:
            probes.append(job)
            dies = job.memory_cap_bytes is not None and job.memory_cap_bytes < true_bytes
            answer = measured(
                job, "oom" if dies else "ok", peak_allocated_bytes=peak_allocated, peak_reserved_bytes=peak_reserved
            )
            job = search.send(answer)
    except StopIteration as end:
        return end.value, probes


@pytest.mark.parametrize("share", [0.0, 0.003, 0.2, 0.5, 0.77, 0.999, 1.0])
def test_the_bracket_holds_the_truth_and_is_narrow(share):
    low, high = 20 * GIB, 30 * GIB
    truth = int(low + share * (high - low))
    result, probes = bisect(truth, low, high)
    assert result["dies_at_bytes"] <= truth <= result["survives_at_bytes"] or truth == low
    assert result["survives_at_bytes"] - result["dies_at_bytes"] <= TOLERANCE * result["survives_at_bytes"]
    assert len(probes) <= 9
    assert all(probe.iterations == 4 for probe in probes)
    assert len({probe.run_id for probe in probes}) == len(probes)


def test_a_bracket_that_is_narrow_from_the_start_needs_one_run():
    result, probes = bisect(20 * GIB, 20 * GIB, 20 * GIB + 30 * 2**20)
    assert len(probes) == 1
    assert result["survives_at_bytes"] == 20 * GIB + 30 * 2**20
    assert not result["dies_at_tested"]
    assert not result["survives_at_tested"]


def test_the_allocator_setting_reaches_every_probe():
    result, probes = bisect(25 * GIB, 20 * GIB, 30 * GIB, "expandable_segments")
    assert all(probe.allocator == "expandable_segments" for probe in probes)
    assert result["run_id"] == "job/survival/expandable_segments"
    assert result["dies_at_tested"]
    assert result["survives_at_tested"]


@pytest.mark.parametrize("outcome", ["oom", "error"])
def test_a_job_that_never_runs_has_no_bracket(outcome):
    search = survival_search(small_job(), "default")
    job = next(search)
    with pytest.raises(StopIteration) as end:
        search.send(measured(job, outcome, error="text"))
    assert end.value.value["outcome"] == outcome
    assert "survives_at_bytes" not in end.value.value


def test_a_probe_that_fails_otherwise_ends_the_search():
    search = survival_search(small_job(), "default")
    job = next(search)
    job = search.send(measured(job, peak_allocated_bytes=20 * GIB, peak_reserved_bytes=30 * GIB))
    with pytest.raises(StopIteration) as end:
        search.send(measured(job, "error", error="CUDA error: an illegal memory access"))
    assert end.value.value["outcome"] == "error"
