"""What one question costs: CPU of POST /recommend and POST /estimate after start, and the command line's wall time.

Run: make bench. Prints milliseconds; nothing here is a test. Each request asks about a different job.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from app.api import create_app
from app.settings import Settings

COMMAND = ["recommend", "--recipe", "llama3_8b_pretrain_config", "--gpu", "h100-80gb", "--num-gpus", "2"]


def job(n: int) -> dict[str, Any]:
    """The main job, told apart by its batch size and length so that nothing can be remembered from the last one."""
    overrides = [f"train.global_batch_size={512 + 16 * n}", f"model.seq_length={8192 - 64 * (n % 32)}"]
    overrides.append(f"dataset.seq_length={8192 - 64 * (n % 32)}")
    return {
        "job": {"recipe": "llama3_8b_pretrain_config", "overrides": overrides},
        "cluster": {"gpu": "h100-80gb", "num_gpus": 2},
    }


def cpu_milliseconds(ask: Callable[[int], None], rounds: int) -> list[float]:
    """CPU of this process (client, server and SQL together) for each round."""
    found = []
    for n in range(rounds):
        started = time.process_time()
        ask(n)
        found.append(1000 * (time.process_time() - started))
    return found


def wall_milliseconds(arguments: list[str], rounds: int, data_dir: str) -> list[float]:
    """Wall time of a whole command."""
    environment = {**os.environ, "OOMBUDSMAN_DATA_DIR": data_dir}
    command = [str(Path(sys.executable).parent / "oombudsman"), *arguments]
    found = []
    for _ in range(rounds):
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        found.append(1000 * (time.perf_counter() - started))
    return found


def show(label: str, milliseconds: list[float]) -> None:
    """One line: median, best and worst."""
    figures = (
        f"median {statistics.median(milliseconds):7.1f}   min {min(milliseconds):7.1f}   max {max(milliseconds):7.1f}"
    )
    print(f"{label:44} {figures}   ms, {len(milliseconds)} runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cli-rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        app = create_app(Settings(data_dir=Path(folder), log_level="error"))
        with TestClient(app) as client:

            def ask(path: str, n: int, **more: Any) -> None:
                client.post(path, json=job(n) | more).raise_for_status()

            ask("/recommend", 1000)
            ask("/estimate", 1000)
            show("POST /recommend, CPU", cpu_milliseconds(lambda n: ask("/recommend", n), options.rounds))
            show("POST /estimate, CPU", cpu_milliseconds(lambda n: ask("/estimate", n), options.rounds))
            without = cpu_milliseconds(lambda n: ask("/estimate", n, survival=False), options.rounds)
            show("POST /estimate without survival, CPU", without)
        wall_milliseconds(COMMAND, 1, folder)
        show("oombudsman recommend, wall", wall_milliseconds(COMMAND, options.cli_rounds, folder))
        show("oombudsman version, wall", wall_milliseconds(["version"], options.cli_rounds, folder))


if __name__ == "__main__":
    main()
