"""Runs one job in this process and measures it. One job a process: Megatron-Core keeps references between runs."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from estimator.profiling import configs, record
from estimator.profiling.job import ProfileJob

_ERROR_CHARACTERS = 4000


class Meter:
    """Reads the caching allocator at the end of each phase; zeros on a machine without a GPU."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._began = time.perf_counter()
        self.marks: list[tuple[str, int]] = []
        """Name and time (microseconds since the epoch) of each phase end, for the trace."""

    def begin(self) -> None:
        """Start a phase: peaks are counted from here."""
        if self._device == "cuda":
            from torch import cuda

            cuda.synchronize()
            cuda.reset_peak_memory_stats()
        self._began = time.perf_counter()

    def end(self, name: str) -> dict[str, Any]:
        """End a phase and begin the next: bytes that tensors occupy now and at most, and bytes reserved for them."""
        phase: dict[str, Any] = {"name": name}
        if self._device != "cuda":
            names = ("allocated_bytes", "peak_allocated_bytes", "reserved_bytes", "peak_reserved_bytes")
            phase.update(dict.fromkeys((*names, "num_alloc_retries"), 0))
        else:
            from torch import cuda

            cuda.synchronize()
            statistics = cuda.memory_stats()
            phase["allocated_bytes"] = statistics["allocated_bytes.all.current"]
            phase["peak_allocated_bytes"] = statistics["allocated_bytes.all.peak"]
            phase["reserved_bytes"] = statistics["reserved_bytes.all.current"]
            phase["peak_reserved_bytes"] = statistics["reserved_bytes.all.peak"]
            phase["num_alloc_retries"] = statistics["num_alloc_retries"]
        phase["seconds"] = time.perf_counter() - self._began
        self.marks.append((name, time.time_ns() // 1000))
        self.begin()
        return phase


def run_one(
    job: ProfileJob,
    *,
    simulate_world: int | None = None,
    rank: int | None = None,
    memory_cap: int | None = None,
    iterations: int | None = None,
    exclusive: bool | None = None,
    trace: Path | None = None,
    device: str = "cuda",
) -> dict[str, Any]:
    """Run a job in this process and return its record; never raises for what the job itself does.

    ``simulate_world`` and ``rank`` make this GPU that rank of a world of that size; ``memory_cap`` (bytes) limits what
    the caching allocator may reserve; ``exclusive`` says that nothing else uses the card, so that device use and step
    time mean something; ``trace`` is where the allocator's history goes. ``device="cpu"`` is a rehearsal with tiny
    models: it finds errors of configuration and use, and measures nothing.

    The process must be fresh (no CUDA use yet): allocator settings are read from the environment when CUDA starts.
    """
    job = _with_overrides(job, simulate_world, rank, memory_cap, iterations, exclusive)
    _set_environment(job)
    result = record.new_record(job)
    began = time.perf_counter()
    history = None
    meter = Meter(device)
    try:
        with _device(device):
            if device == "cuda":
                _cap_memory(job.memory_cap_bytes)
            if trace is not None and device == "cuda":
                from estimator.profiling.trace import History

                history = History()
                history.start()
            _train(job, meter, result, device)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        if record.is_out_of_memory(error):
            result.update(outcome="oom", out_of_memory=str(error)[:_ERROR_CHARACTERS], at_failure=_at_failure(meter))
        else:
            result.update(outcome="error", error=traceback.format_exc()[-_ERROR_CHARACTERS:])
    else:
        result["outcome"] = "ok"
    _finish(job, result, device)
    if history is not None and trace is not None:
        history.write(trace, result, meter.marks)
    result["wall_seconds"] = round(time.perf_counter() - began, 3)
    return result


def _at_failure(meter: Meter) -> dict[str, Any] | None:
    """What was allocated and reserved when memory ran out, and at most since the phase began."""
    try:
        return meter.end("failure")
    except Exception:  # the context may be beyond use
        return None


def _with_overrides(
    job: ProfileJob,
    simulate_world: int | None,
    rank: int | None,
    memory_cap: int | None,
    iterations: int | None,
    exclusive: bool | None,
) -> ProfileJob:
    if simulate_world is not None:
        parallel = replace(job.settings.parallel, world_size=simulate_world)
        job = replace(job, simulate=True, settings=replace(job.settings, parallel=parallel))
    changes: dict[str, Any] = {
        "rank": rank,
        "memory_cap_bytes": memory_cap,
        "iterations": iterations,
        "exclusive": exclusive,
    }
    return replace(job, **{name: value for name, value in changes.items() if value is not None})


def _set_environment(job: ProfileJob) -> None:
    for name, value in configs.environment_variables(job).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _device(device: str) -> Iterator[None]:
    if device == "cpu":
        from estimator.profiling.rehearsal import cuda_on_cpu

        with cuda_on_cpu():
            yield
    else:
        yield


def _cap_memory(cap_bytes: int | None) -> None:
    """Limit what the caching allocator may reserve in this process (the CUDA context comes on top)."""
    import torch

    if cap_bytes is not None:
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (cap_bytes + 0.5) / total))


def _train(job: ProfileJob, meter: Meter, result: dict[str, Any], device: str) -> None:
    """Build, then run ``job.iterations`` training steps, writing each phase into ``result`` as it ends."""
    import torch

    from estimator.profiling import batch, megatron, stand_ins

    rank = stand_ins.initialise_process_group(job.simulate, job.rank, job.settings.parallel.world_size)
    result["rank"] = rank
    if job.settings.model.gradient_accumulation_fusion and stand_ins.provide_weight_gradient_extension():
        result["environment"]["fused_weight_gradient_mlp_cuda"] = "stand-in"
    if job.simulate:
        stand_ins.ignore_verdicts()
        stand_ins.keep_own_random_state()
    result["stack"], result["gpu"] = megatron.versions(), megatron.gpu_identity()

    config = megatron.transformer_config(job)
    if config.cuda_graph_impl == "transformer_engine" and device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())
    groups = megatron.initialise_parallel_state(job, config, rank)
    meter.begin()
    result["baseline_allocated_bytes"] = torch.cuda.memory_allocated() if device == "cuda" else 0
    training = megatron.build_training(job, config, groups, lambda name: result["phases"].append(meter.end(name)))
    result["parameters_on_rank"] = sum(p.numel() for model in training.models for p in model.parameters())

    forward_step = batch.forward_step_function(job, groups)
    data = [batch.batches(job) for _ in training.models]
    megatron.before_first_iteration(training)
    for index in range(max(job.iterations, 2, result_iterations(job, config))):
        phases: list[dict[str, Any]] = []
        result["iterations"].append({"index": index, "phases": phases})
        megatron.before_iteration(training, index)
        _step(job, training, forward_step, data, meter, phases)
        if index == 0:
            megatron.after_first_iteration(training)
    result["steady_iteration"] = configs.steady_iteration(job, config.cuda_graph_impl, config.cuda_graph_warmup_steps)


def result_iterations(job: ProfileJob, config: Any) -> int:
    """Steps needed until the steady one has run."""
    return 1 + configs.steady_iteration(job, config.cuda_graph_impl, config.cuda_graph_warmup_steps)


def _step(
    job: ProfileJob, training: Any, forward_step: Any, data: list[Any], meter: Meter, phases: list[dict[str, Any]]
) -> None:
    """One training step as Bridge's ``train_step`` (training/train.py:824-960) does it, in two phases."""
    import torch

    for model in training.models:
        model.zero_grad_buffer()
    training.optimizer.zero_grad()
    single = len(training.models) == 1
    losses = training.forward_backward(
        forward_step_func=forward_step,
        data_iterator=data[0] if single else data,
        model=training.models[0] if single and training.groups.pp.size() == 1 else training.models,
        num_microbatches=job.settings.num_microbatches,
        seq_length=job.settings.model.seq_length,
        micro_batch_size=job.settings.batch.micro_batch_size,
        decoder_seq_length=job.settings.model.seq_length,
        forward_only=False,
        p2p_communicator=training.communicator,
        pg_collection=training.groups,
    )
    phases.append(meter.end("forward_backward"))
    level = job.settings.runtime.empty_unused_memory_level
    if level >= 1:
        torch.cuda.empty_cache()
    training.optimizer.step()
    if level >= 2:
        torch.cuda.empty_cache()
    phases.append(meter.end("optimizer_step"))
    del losses


def _finish(job: ProfileJob, result: dict[str, Any], device: str) -> None:
    """Totals, environment, and what only a run alone on its card may say."""
    for name in configs.environment_variables(job):
        result["environment"][name] = os.environ.get(name)
    steady = result.pop("steady_iteration", 1)
    record.summarise(result, steady)
    if device != "cuda":
        _blank_measurements(result)
        return
    import torch

    if not job.exclusive:
        for phase in _all_phases(result):
            phase["seconds"] = None
        return
    free, total = torch.cuda.mem_get_info()
    result["device_used_bytes"] = total - free
    last = result["iterations"][-1]["phases"] if result["iterations"] else []
    if result["outcome"] == "ok":
        result["step_time_seconds"] = sum(phase["seconds"] for phase in last)


def _all_phases(result: dict[str, Any]) -> list[dict[str, Any]]:
    own: list[dict[str, Any]] = result["phases"] + ([result["at_failure"]] if result["at_failure"] else [])
    return own + [phase for iteration in result["iterations"] for phase in iteration["phases"]]


def _blank_measurements(result: dict[str, Any]) -> None:
    """A rehearsal on the CPU measures nothing: every number is null rather than zero."""
    result["method"] = "rehearsal"
    for phase in _all_phases(result):
        for name in list(phase):
            if name != "name":
                phase[name] = None
    for name in ("persistent_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "num_alloc_retries"):
        result[name] = None
    result["baseline_allocated_bytes"] = None
