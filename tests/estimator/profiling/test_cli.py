"""The command line: it runs on a bare Python, and says what is wrong with its arguments."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from estimator.profiling import cli, job_to_dict

from .jobs import small_job

ROOT = Path(__file__).resolve().parents[3]
BARE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in sys.stdlib_module_names | {"estimator"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
import estimator.profiling.cli, estimator.profiling.grid
assert "torch" not in sys.modules
estimator.profiling.cli.parser()
"""


def test_it_needs_nothing_but_the_standard_library_until_it_runs():
    subprocess.run([sys.executable, "-c", BARE], cwd=ROOT, check=True)


def test_arguments(tmp_path, capsys):
    assert cli.main([]) == 2
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job_to_dict(small_job("a"))))
    assert cli.main(["--sweep", str(path)]) == 2
    assert "--output" in capsys.readouterr().err
    assert cli.main([str(tmp_path / "missing.json")]) == 2


def test_the_command_line_wins_over_the_file(tmp_path):
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job_to_dict(small_job("a"))))
    given = ["--simulate-world", "64", "--rank", "9", "--memory-cap", "20.5", "--allocator", "expandable_segments"]
    arguments = cli.parser().parse_args([str(path), *given, "--iterations", "3", "--exclusive"])
    (job,) = cli._jobs(arguments)
    assert job.settings.parallel.world_size == 64
    assert job.rank == 9
    assert job.memory_cap_bytes == int(20.5 * 2**30)
    assert job.allocator == "expandable_segments"
    assert job.iterations == 3
    assert job.exclusive


REHEARSAL = os.environ.get("PROFILING_PYTHON")


@pytest.mark.slow
@pytest.mark.skipif(REHEARSAL is None, reason="PROFILING_PYTHON names no Python with torch and megatron-core")
@pytest.mark.parametrize("strategy", ["ddp", "distopt", "optim_grads", "optim_grads_params"])
def test_the_real_training_step_rehearses_on_a_cpu(strategy, tmp_path):
    from estimator.profiling import ProfileJob

    from .jobs import small_settings

    path, output = tmp_path / "job.json", tmp_path / "out.jsonl"
    path.write_text(json.dumps(job_to_dict(ProfileJob("rehearsal", small_settings(strategy)))))
    command = [REHEARSAL, "-m", "estimator.profiling", str(path), "--device", "cpu", "--output", str(output)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    record = json.loads(output.read_text())
    assert record["outcome"] == "ok"
    assert record["method"] == "rehearsal"
    assert record["phases"][-1]["name"] == "steady_optimizer_step"
    assert record["persistent_bytes"] is None
