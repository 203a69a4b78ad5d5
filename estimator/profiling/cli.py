"""Command line of the profiler; ``oombudsman profile`` calls ``main`` too. Standard library only."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from estimator.profiling.job import GIB, ProfileJob
from estimator.profiling.progress import describe
from estimator.profiling.store import ResultFile
from estimator.profiling.sweep import ProcessRunner, Sweep, read_jobs

ALLOCATORS = ("default", "expandable_segments")
_BUDGET_SHARE = 0.92


def parser() -> argparse.ArgumentParser:
    """Arguments of ``oombudsman profile``."""
    result = argparse.ArgumentParser(prog="oombudsman profile", description="Measure the GPU memory of training jobs.")
    result.add_argument("job", nargs="?", type=Path, help="a job as JSON (a sweep file's line), or an estimate request")
    result.add_argument("--sweep", type=Path, metavar="FILE", help="many jobs, one JSON object a line")
    result.add_argument("--output", type=Path, metavar="FILE", help="JSON lines that results are appended to")
    result.add_argument("--simulate-world", type=int, metavar="N", help="this GPU is one rank of a world of N")
    result.add_argument("--rank", type=int, metavar="R", help="which rank of the simulated world")
    result.add_argument("--memory-cap", type=float, metavar="GIB", help="what the caching allocator may reserve")
    result.add_argument("--find-survival", action="store_true", help="bisect the smallest cap that survives")
    result.add_argument("--allocator", choices=(*ALLOCATORS, "both"), help="allocator setting; --find-survival: both")
    result.add_argument("--iterations", type=int, help="training steps (at least 2)")
    result.add_argument("--exclusive", action="store_true", help="alone on the card: device use and step time too")
    result.add_argument("--trace", type=Path, metavar="FOLDER", help="keep the allocator's history of each run there")
    result.add_argument("--jobs", type=int, default=4, metavar="N", help="processes at a time (sweep)")
    result.add_argument("--memory-budget", type=float, metavar="GIB", help="memory that a sweep shares out")
    result.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="limit of one process")
    result.add_argument("--stop-after", type=float, metavar="SECONDS", help="start nothing new after this long")
    result.add_argument("--retry-errors", action="store_true", help="run again what ended in an error")
    result.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal, measures nothing")
    result.add_argument("--record-to", type=Path, help=argparse.SUPPRESS)
    result.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 0 if everything ended in a measurement (an OOM is one), 1 if something failed, 2 for bad arguments."""
    arguments = parser().parse_args(argv)
    if (arguments.job is None) == (arguments.sweep is None):
        sys.stderr.write("give either a job or --sweep FILE\n")
        return 2
    try:
        jobs = _jobs(arguments)
        if arguments.sweep is None and not arguments.find_survival:
            return _run_here(arguments, jobs[0])
        return _run_sweep(arguments, jobs)
    except (ValueError, RuntimeError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _jobs(arguments: argparse.Namespace) -> list[ProfileJob]:
    path: Path = arguments.sweep or arguments.job
    text = sys.stdin.read() if str(path) == "-" else path.read_text()
    if arguments.sweep is not None:
        jobs = read_jobs(text, str(path))
    else:
        jobs = [_single_job(text, str(path), arguments.simulate_world)]
    return [_adjusted(job, arguments) for job in jobs]


def _single_job(text: str, name: str, world_size: int | None) -> ProfileJob:
    document = json.loads(text)
    if isinstance(document, dict) and isinstance(document.get("job"), dict):
        if "run_id" in document["job"]:  # a record: its job again
            return read_jobs(json.dumps(document["job"]), name)[0]
        from estimator.profiling.document import job_from_request

        return job_from_request(document, Path(name).stem, world_size)
    return read_jobs(json.dumps(document), name)[0]


def _adjusted(job: ProfileJob, arguments: argparse.Namespace) -> ProfileJob:
    """The job with what the command line says, which wins."""
    if arguments.simulate_world is not None:
        parallel = replace(job.settings.parallel, world_size=arguments.simulate_world)
        job = replace(job, settings=replace(job.settings, parallel=parallel), simulate=True)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        job = replace(job, simulate=False)
    if arguments.allocator in ALLOCATORS:
        job = job.with_allocator(arguments.allocator)
    cap = None if arguments.memory_cap is None else int(arguments.memory_cap * GIB)
    changes: dict[str, Any] = {"rank": arguments.rank, "memory_cap_bytes": cap, "iterations": arguments.iterations}
    job = replace(job, **{name: value for name, value in changes.items() if value is not None})
    if arguments.exclusive:
        job = replace(job, exclusive=True)
    return replace(job, trace=True) if arguments.trace is not None else job


def _run_here(arguments: argparse.Namespace, job: ProfileJob) -> int:
    """One job in this process: a child of a sweep, a rank under torchrun, or a user's single run."""
    from estimator.profiling.runner import run_one

    if arguments.parent is not None:
        _end_with(arguments.parent)
    name = job.run_id.replace("/", "_")
    trace = arguments.trace / f"{name}.json.gz" if arguments.trace is not None else None
    record = run_one(job, trace=trace, device=arguments.device)
    if not job.simulate:
        record["run_id"] = f"{job.run_id}/rank{record['rank']}"
    if arguments.record_to is not None:
        temporary = arguments.record_to.with_suffix(".part")
        temporary.write_text(json.dumps(record))
        temporary.replace(arguments.record_to)
    elif arguments.output is not None:
        with ResultFile(arguments.output, exclusive=False) as results:
            results.append(record)
        sys.stderr.write(describe(record) + "\n")
    else:
        sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    if arguments.record_to is not None or not job.simulate:
        os._exit(0 if record["outcome"] != "error" else 1)  # process groups and CUDA would take seconds to end in order
    return 0 if record["outcome"] != "error" else 1


def _end_with(parent: int) -> None:
    """End this process when the sweep that started it is gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run_sweep(arguments: argparse.Namespace, jobs: list[ProfileJob]) -> int:
    if arguments.output is None:
        raise ValueError("--output FILE is needed: results are kept there as they come")
    allocators: tuple[str, ...] = ()
    if arguments.find_survival:
        allocators = ALLOCATORS if arguments.allocator in (None, "both") else (arguments.allocator,)
    with ResultFile(arguments.output) as results:
        sweep = Sweep(
            results=results,
            runner=ProcessRunner(arguments.device, arguments.timeout, arguments.trace),
            num_processes=arguments.jobs,
            memory_bytes=_memory_budget(arguments),
            stop_after_seconds=arguments.stop_after,
            retry_errors=arguments.retry_errors,
        )
        counts = sweep.run(jobs, allocators)
    sys.stderr.write(" ".join(f"{name} {count}" for name, count in counts.items()) + "\n")
    return 1 if counts["error"] else 0


def _memory_budget(arguments: argparse.Namespace) -> int:
    """Bytes that runs may share: as said, or most of what the first card has free (all there is without a card)."""
    if arguments.memory_budget is not None:
        return int(arguments.memory_budget * GIB)
    if arguments.device == "cpu":
        return 2**63
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits", "--id=0"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return int(float(answer.stdout.split()[0]) * 2**20 * _BUDGET_SHARE)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        raise RuntimeError("nvidia-smi does not say how much memory is free: give --memory-budget") from None
