"""Runs many jobs, one process each, several at a time where memory allows; what is finished survives a kill.

The runner is a function, so that the order, the resuming and the memory gate are tested without a GPU.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from estimator.profiling import configs, expected, record
from estimator.profiling.job import ProfileJob, job_from_dict, job_to_dict
from estimator.profiling.progress import Progress
from estimator.profiling.store import ResultFile
from estimator.profiling.survival import Probe, single_run, survival_search

Runner = Callable[[ProfileJob], dict[str, Any]]
_STDERR_CHARACTERS = 4000
_FREE = re.compile(r"Tried to allocate ([\d.]+) (\w+)\..*?of which ([\d.]+) (\w+) is free", re.DOTALL)
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def read_jobs(text: str, name: str) -> list[ProfileJob]:
    """Jobs of a sweep file, one JSON object a line. Raises ``ValueError`` naming the line; run_ids must differ."""
    jobs: list[ProfileJob] = []
    seen: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            job = job_from_dict(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: {error}") from None
        if job.run_id in seen:
            raise ValueError(f"{name}, line {number}: run_id {job.run_id!r} occurs twice")
        seen.add(job.run_id)
        jobs.append(job)
    return jobs


@dataclass(frozen=True, slots=True)
class ProcessRunner:
    """Runs one job in a process of its own through this module's command line."""

    device: str = "cuda"
    timeout_seconds: float = 300.0
    trace_directory: Path | None = None

    def __call__(self, job: ProfileJob) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="profile-") as folder:
            job_path, record_path, log_path = (Path(folder) / name for name in ("job.json", "record.json", "log"))
            job_path.write_text(json.dumps(job_to_dict(job)))
            command = [sys.executable, "-m", "estimator.profiling", str(job_path), "--record-to", str(record_path)]
            command += ["--device", self.device, "--parent", str(os.getpid())]
            if job.trace and self.trace_directory is not None:
                command += ["--trace", str(self.trace_directory)]
            with log_path.open("wb") as log:
                failure = self._wait(command, job, log)
            if record_path.exists():
                loaded: dict[str, Any] = json.loads(record_path.read_text())
                return loaded
            tail = log_path.read_text(errors="replace")[-_STDERR_CHARACTERS:]
            return {**record.new_record(job), "error": f"{failure}\n{tail}"}

    def _wait(self, command: list[str], job: ProfileJob, log: Any) -> str:
        """Run the child to its end; returns what happened should it leave no record."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        for name, value in configs.environment_variables(job).items():
            environment.pop(name, None)
            if value is not None:
                environment[name] = value
        root = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
        child = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            code = child.wait(self.timeout_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return f"no answer within {self.timeout_seconds:g} s"
        return f"the process ended with status {code} and left no record"


@dataclass(slots=True)
class _Task:
    """A job, or a bisection that asks for several runs one after the other."""

    probe: Probe
    job: ProfileJob
    """The run it waits for."""
    alone: bool = False
    shared: bool = False
    """Something else ran beside it on the card."""
    kind: str = "run"


@dataclass(slots=True)
class Sweep:
    """Where, how many at a time, and within how much memory."""

    results: ResultFile
    runner: Runner
    num_processes: int = 4
    memory_bytes: int = 2**63
    stop_after_seconds: float | None = None
    """Start nothing new after this long: for machines that are lent for a limited time."""
    retry_errors: bool = False
    show_progress: bool = True
    _running: dict[int, tuple[_Task, int]] = field(default_factory=dict)
    _done: queue.Queue[tuple[int, dict[str, Any]]] = field(default_factory=queue.Queue)
    _numbers: Iterator[int] = field(default_factory=lambda: iter(range(2**62)))

    def run(self, jobs: Iterable[ProfileJob], allocators: tuple[str, ...] = ()) -> dict[str, int]:
        """Run jobs (or, with ``allocators``, find each one's survival memory under them); counts by outcome.

        A run_id that the results hold is not run again, unless it is an error and ``retry_errors`` is set. A record is
        acknowledged, and counted, once it is on disk.
        """
        began, counts = time.monotonic(), {"ok": 0, "oom": 0, "error": 0, "skipped": 0, "left": 0}
        waiting = self._tasks(list(jobs), allocators, counts)
        with Progress(len(waiting), self.show_progress) as progress:
            while waiting or self._running:
                late = self.stop_after_seconds is not None and time.monotonic() - began > self.stop_after_seconds
                if not late:
                    self._start_what_fits(waiting)
                if not self._running:
                    break
                number, outcome = self._done.get()
                task, _ = self._running.pop(number)
                if self._must_run_alone(task, outcome):
                    task.alone = True
                    waiting.append(task)
                    continue
                self._finish(task, outcome, waiting, counts, progress)
        counts["left"] = len(waiting)
        return counts

    def _stored(self, run_id: str) -> dict[str, Any] | None:
        stored = self.results.records.get(run_id)
        if stored is not None and stored["outcome"] == "error" and self.retry_errors:
            return None
        return stored

    def _tasks(self, jobs: list[ProfileJob], allocators: tuple[str, ...], counts: dict[str, int]) -> list[_Task]:
        tasks: list[_Task] = []
        for job in jobs:
            for allocator in allocators or (None,):
                run_id = job.run_id if allocator is None else f"{job.run_id}/survival/{allocator}"
                if self._stored(run_id) is not None:
                    counts["skipped"] += 1
                    continue
                probe = single_run(job) if allocator is None else survival_search(job, allocator)
                first = next(probe)
                task = _Task(probe, first, first.exclusive, kind="run" if allocator is None else "survival")
                final = self._replay(task)
                if final is None:
                    tasks.append(task)
                else:
                    self.results.append(final)
                    counts[final["outcome"]] += 1
        return tasks

    def _replay(self, task: _Task) -> dict[str, Any] | None:
        """Answer a task's questions from the results as far as they go; its final record if they go to the end."""
        while (stored := self._stored(task.job.run_id)) is not None:
            final = self._answer(task, stored)
            if final is not None:
                return final
        return None

    def _answer(self, task: _Task, outcome: dict[str, Any]) -> dict[str, Any] | None:
        """Tell a task what its run gave; the final record if that was its last."""
        try:
            task.job = task.probe.send(outcome)
        except StopIteration as end:
            final: dict[str, Any] = end.value
            return final
        task.alone, task.shared = task.job.exclusive, False
        return None

    def _start_what_fits(self, waiting: list[_Task]) -> None:
        """Start the first waiting runs that fit beside those that run; one that needs the card alone waits for it."""
        for task in list(waiting):
            needed = min(expected.expected_bytes(task.job), self.memory_bytes)
            used = sum(bytes_ for _, bytes_ in self._running.values())
            if len(self._running) >= self.num_processes or any(t.alone for t, _ in self._running.values()):
                return
            if (task.alone and self._running) or (self._running and used + needed > self.memory_bytes):
                continue
            waiting.remove(task)
            number = next(self._numbers)
            self._running[number] = (task, needed)
            if len(self._running) > 1:
                for neighbour, _ in self._running.values():
                    neighbour.shared = True
            threading.Thread(target=self._work, args=(number, task.job), daemon=True).start()

    def _work(self, number: int, job: ProfileJob) -> None:
        try:
            outcome = self.runner(job)
        except Exception as error:  # a broken runner must not stop the sweep
            outcome = {**record.new_record(job), "error": repr(error)}
        self._done.put((number, outcome))

    def _must_run_alone(self, task: _Task, outcome: dict[str, Any]) -> bool:
        """Whether a neighbour on the card, rather than the job, may have made the run what it was."""
        if task.alone or not task.shared:
            return False
        if task.job.memory_cap_bytes is not None:
            return card_was_full(outcome)
        return outcome["outcome"] == "oom" or bool(outcome.get("num_alloc_retries"))

    def _finish(
        self,
        task: _Task,
        outcome: dict[str, Any],
        waiting: list[_Task],
        counts: dict[str, int],
        progress: Progress,
    ) -> None:
        """Store a record, and let a bisection ask for its next run."""
        self.results.append(outcome)
        final = self._answer(task, outcome) or self._replay(task)
        if final is None:
            waiting.insert(0, task)
            return
        if task.kind == "survival":
            self.results.append(final)
        counts[final["outcome"]] += 1
        progress.advance(final)


def card_was_full(outcome: dict[str, Any]) -> bool:
    """Whether an OOM text says that the card itself, not the cap, had too little left."""
    found = _FREE.search(outcome.get("out_of_memory") or "")
    if found is None:
        return False
    tried, tried_unit, free, free_unit = found.groups()
    return float(free) * _UNITS.get(free_unit, 1) < float(tried) * _UNITS.get(tried_unit, 1)
