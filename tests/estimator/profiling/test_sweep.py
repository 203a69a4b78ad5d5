"""Sweeps with a fake runner: memory gate, resuming, a real kill, out-of-memory records, bisections."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from estimator.profiling import expected, job_to_dict
from estimator.profiling.store import ResultFile
from estimator.profiling.sweep import ProcessRunner, Sweep, card_was_full, read_jobs

from .jobs import GIB, measured, small_job

ROOT = Path(__file__).resolve().parents[3]
OOM_BY_CAP = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 57.12 GiB is "
    "free. 20.00 GiB allowed; Of the allocated memory 18.70 GiB is allocated by PyTorch"
)
OOM_BY_NEIGHBOURS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 112.00 MiB is "
    "free. Including non-PyTorch memory, this process has 30.00 GiB memory in use."
)


def jobs(count):
    return [small_job(f"job-{number}") for number in range(count)]


def run(path, runner, work, allocators=(), **options):
    with ResultFile(path) as results:
        return Sweep(results, runner, show_progress=False, **options).run(work, allocators)


def test_every_job_is_run_once_and_kept(tmp_path):
    path, ran = tmp_path / "r.jsonl", []
    counts = run(path, lambda job: ran.append(job.run_id) or measured(job), jobs(5))
    assert counts["ok"] == 5
    assert sorted(ran) == [f"job-{n}" for n in range(5)]
    counts = run(path, lambda job: pytest.fail("run twice"), jobs(5))
    assert counts["skipped"] == 5


def test_an_out_of_memory_record_is_kept_with_its_text(tmp_path):
    path = tmp_path / "r.jsonl"
    job = small_job("capped", memory_cap_bytes=GIB)
    counts = run(path, lambda job: measured(job, "oom", out_of_memory=OOM_BY_CAP), [job])
    assert counts["oom"] == 1
    assert json.loads(path.read_text())["out_of_memory"] == OOM_BY_CAP
    assert run(path, lambda job: pytest.fail("an OOM is a result"), [job])["skipped"] == 1


def test_errors_are_run_again_only_when_asked(tmp_path):
    path = tmp_path / "r.jsonl"
    run(path, lambda job: measured(job, "error", error="x"), jobs(1))
    assert run(path, measured, jobs(1))["skipped"] == 1
    assert run(path, measured, jobs(1), retry_errors=True)["ok"] == 1


def test_a_runner_that_breaks_is_an_error_record(tmp_path):
    def broken(job):
        raise OSError("no such device")

    assert run(tmp_path / "r.jsonl", broken, jobs(2))["error"] == 2


def test_runs_share_the_card_only_as_memory_and_processes_allow(tmp_path):
    lock, now, most = threading.Lock(), [0], [0]

    def runner(job):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1
        return measured(job)

    each = expected.expected_bytes(small_job())
    run(tmp_path / "a.jsonl", runner, jobs(8), num_processes=8, memory_bytes=3 * each)
    assert most[0] == 3
    most[0] = 0
    run(tmp_path / "b.jsonl", runner, jobs(8), num_processes=2, memory_bytes=100 * each)
    assert most[0] == 2
    most[0] = 0
    alone = [small_job(f"alone-{n}", exclusive=True) for n in range(3)]
    run(tmp_path / "c.jsonl", runner, alone, num_processes=8, memory_bytes=100 * each)
    assert most[0] == 1
    run(tmp_path / "d.jsonl", runner, jobs(1), memory_bytes=1)  # larger than the card: tried alone all the same


def test_an_out_of_memory_that_neighbours_caused_is_run_again_alone(tmp_path):
    running, gate = set(), threading.Barrier(2, timeout=5)

    def runner(job):
        first = job.run_id not in running
        running.add(job.run_id)
        if first:
            gate.wait()
            if job.run_id == "job-0":
                return measured(job, "oom", out_of_memory=OOM_BY_NEIGHBOURS)
        return measured(job)

    path = tmp_path / "r.jsonl"
    counts = run(path, runner, jobs(2), num_processes=2)
    assert counts == {"ok": 2, "oom": 0, "error": 0, "skipped": 0, "left": 0}
    assert len(path.read_text().splitlines()) == 2


def test_texts_tell_cap_from_neighbours():
    assert card_was_full({"out_of_memory": OOM_BY_NEIGHBOURS})
    assert not card_was_full({"out_of_memory": OOM_BY_CAP})
    assert not card_was_full({"out_of_memory": None})


def test_nothing_new_is_started_after_the_time(tmp_path):
    path = tmp_path / "r.jsonl"
    counts = run(path, measured, jobs(4), stop_after_seconds=0.0, num_processes=1)
    assert counts["left"] == 4
    assert run(path, measured, jobs(4))["ok"] == 4


def survivor(truth):
    def runner(job):
        outcome = "oom" if (job.memory_cap_bytes or truth) < truth else "ok"
        return measured(job, outcome, peak_allocated_bytes=20 * GIB, peak_reserved_bytes=30 * GIB)

    return runner


def test_survival_is_found_for_both_settings_and_resumes_within_a_bisection(tmp_path):
    path, both = tmp_path / "r.jsonl", ("default", "expandable_segments")
    work = [small_job("a"), small_job("b")]
    calls = []

    class Stop(BaseException):
        pass

    def counted(job):
        calls.append(job.run_id)
        return survivor(25 * GIB)(job)

    with ResultFile(path) as results:
        Sweep(results, counted, show_progress=False).run(work, both)
    whole = list(calls)
    finals = [r for r in map(json.loads, path.read_text().splitlines()) if r["kind"] == "survival"]
    assert {r["run_id"] for r in finals} == {f"{j}/survival/{a}" for j in "ab" for a in both}
    assert all(r["dies_at_bytes"] < 25 * GIB <= r["survives_at_bytes"] for r in finals)

    half = tmp_path / "half.jsonl"
    kept = [line for line in path.read_text().splitlines() if json.loads(line)["kind"] == "run"][: len(whole) // 2]
    half.write_text("".join(line + "\n" for line in kept))
    calls.clear()
    run(half, counted, work, both)
    assert len(calls) == len(whole) - len(kept)
    assert not set(calls) & {json.loads(line)["run_id"] for line in kept}


SWEEP_TO_KILL = """
    import sys, time
    sys.path[:0] = [{root!r}, {tests!r}]
    from tests.estimator.profiling.jobs import measured, small_job
    from pathlib import Path
    from estimator.profiling.store import ResultFile
    from estimator.profiling.sweep import Sweep

    def runner(job):
        with open({ran!r}, "a") as stream:
            stream.write(job.run_id + "\\n")
        time.sleep(0.05)
        return measured(job, error="x" * 20000)

    with ResultFile(Path({path!r})) as results:
        Sweep(results, runner, num_processes=3, show_progress=False).run([small_job(f"job-{{n}}") for n in range(30)])
"""


def test_a_kill_loses_nothing_acknowledged_and_repeats_nothing(tmp_path):
    path, ran = tmp_path / "r.jsonl", tmp_path / "ran"
    script = textwrap.dedent(SWEEP_TO_KILL).format(root=str(ROOT), tests=str(ROOT), ran=str(ran), path=str(path))
    for _ in range(2):
        child = subprocess.Popen([sys.executable, "-c", script])
        before = path.read_bytes().count(b"\n") if path.exists() else 0
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and (not path.exists() or path.read_bytes().count(b"\n") < before + 5):
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        acknowledged = {
            json.loads(line)["run_id"] for line in path.read_text().splitlines(keepends=True) if "\n" in line
        }
        assert acknowledged
    with path.open("a") as stream:
        stream.write('{"run_id": "job-29", "outco')  # as a kill in the middle of a write would leave it
    repeated = []
    counts = run(path, lambda job: repeated.append(job.run_id) or measured(job), jobs(30))
    assert counts["skipped"] + counts["ok"] == 30
    assert not acknowledged & set(repeated)
    lines = [json.loads(line)["run_id"] for line in path.read_text().splitlines()]
    assert sorted(lines) == sorted(f"job-{n}" for n in range(30))


def test_sweep_files_are_read_with_line_numbers():
    line = json.dumps(job_to_dict(small_job("a")))
    assert [job.run_id for job in read_jobs(f"# comment\n{line}\n\n", "f")] == ["a"]
    with pytest.raises(ValueError, match="f, line 2: run_id 'a' occurs twice"):
        read_jobs(f"{line}\n{line}\n", "f")
    with pytest.raises(ValueError, match="f, line 1"):
        read_jobs('{"run_id": "a"', "f")
    with pytest.raises(ValueError, match="f, line 1: job: unknown extra"):
        read_jobs(json.dumps({**job_to_dict(small_job("a")), "extra": 1}), "f")


def test_a_process_that_leaves_no_record_is_an_error_with_its_last_words(tmp_path):
    record = ProcessRunner("nonsense", 60.0)(small_job("a"))  # argparse refuses the device
    assert record["outcome"] == "error"
    assert "invalid choice" in record["error"]
