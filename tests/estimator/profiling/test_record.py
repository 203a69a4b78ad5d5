"""Records: totals from phases, and what counts as running out of memory."""

from estimator.profiling.record import is_out_of_memory, new_record, phase_of, summarise

from .jobs import small_job


class OutOfMemoryError(RuntimeError):
    """As torch names it."""


def phase(name, allocated, peak, reserved=0, retries=0):
    return {
        "name": name,
        "allocated_bytes": allocated,
        "peak_allocated_bytes": peak,
        "reserved_bytes": reserved,
        "peak_reserved_bytes": reserved,
        "num_alloc_retries": retries,
    }


def test_out_of_memory_is_recognised_by_type_and_by_library_text():
    assert is_out_of_memory(OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_out_of_memory(RuntimeError("cuBLAS: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_totals():
    record = new_record(small_job())
    record["phases"] = [phase("model_build", 10, 12, 20)]
    record["iterations"] = [
        {"index": 0, "phases": [phase("forward_backward", 11, 30, 40), phase("optimizer_step", 15, 20, 40)]},
        {"index": 1, "phases": [phase("forward_backward", 16, 35, 41), phase("optimizer_step", 17, 21, 41, 2)]},
    ]
    summarise(record, 1)
    assert record["peak_allocated_bytes"] == 35
    assert record["peak_reserved_bytes"] == 41
    assert record["persistent_bytes"] == 17
    assert record["num_alloc_retries"] == 2
    assert [entry["name"] for entry in record["phases"]] == [
        "model_build",
        "first_forward_backward",
        "first_optimizer_step",
        "steady_forward_backward",
        "steady_optimizer_step",
    ]


def test_a_run_that_died_keeps_what_it_reached():
    record = new_record(small_job())
    record["phases"] = [phase("model_build", 10, 12)]
    record["iterations"] = [{"index": 0, "phases": []}]
    summarise(record, 1)
    assert record["peak_allocated_bytes"] == 12
    assert record["persistent_bytes"] is None
    assert phase_of(record, "steady_optimizer_step") is None
    summarise(new_record(small_job()), 1)
