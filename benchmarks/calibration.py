"""What a calibration from 100,000 stored runs costs: seconds and memory of the fit, and seconds to predict a run.

Run: python benchmarks/calibration.py [--runs 100000] [--database-url postgresql://...]. Runs and their predictions are
drawn from a known truth (a fit does not care), the predicting is timed on the jobs of the dense fit sweep. The fit runs
in a process of its own, whose largest resident memory is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import insert

from app.db import migrations
from app.db.models import ProfiledRun, RunPrediction
from app.db.session import Database
from app.services import calibrations, predictions
from app.settings import Settings
from estimator import ESTIMATOR_VERSION
from estimator.calibration import stack_key
from estimator.job.settings import Stack

GIB = 2**30
STRATEGIES = ("ddp", "distopt", "no_shard", "optim", "optim_grads", "optim_grads_params")
COMPONENTS = (
    "parameters", "main_parameters", "main_gradients", "optimizer_states", "gathered_parameters", "gradient_buckets",
    "activations_attention", "activations_mlp", "activations_norms", "activations_residual", "logits_and_loss",
    "activation_gradients",
)  # fmt: skip
SWEEP = Path(__file__).resolve().parents[1] / "estimator" / "data" / "sweeps" / "dense_fit.jsonl"
BATCH = 5000


def rows(num: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Runs of 40 models and their predictions: heavy-tailed errors of 0.3 %, a component off by 3 %."""
    import datetime as dt

    generator = np.random.default_rng(1)
    now = dt.datetime(2026, 12, 1, tzinfo=dt.UTC)
    for i in range(num):
        sizes = (generator.lognormal(0.5, 1.0, len(COMPONENTS)) * GIB).astype(int)
        components = dict(zip(COMPONENTS, map(int, sizes), strict=True))
        predicted = sum(components.values())
        measured = int((predicted + 0.03 * components["activations_mlp"]) * (1 + 0.003 * generator.standard_t(5)))
        name, states = f"run-{i:07d}", sum(list(components.values())[:4])
        yield (
            {
                "run_id": name, "stored_at": now, "source": "profiler", "method": "simulated", "outcome": "ok",
                "fingerprint": name, "gpu": "h200-141gb", "strategy": STRATEGIES[i % 6], "world_size": 64, "rank": 0,
                "allocator": "default", "peak_allocated_bytes": measured, "persistent_bytes": states,
                "peak_reserved_bytes": int(1.02 * measured), "stack": stack_key(Stack()), "content_hash": "x",
                "document": {},
            },
            {
                "fingerprint": name, "estimator_version": ESTIMATOR_VERSION, "peak_allocated_bytes": predicted,
                "persistent_bytes": states, "peak_reserved_bytes": int(1.02 * predicted), "components": components,
                "model": f"model-{i % 40}", "num_communicators": 1,
            },
        )  # fmt: skip


def store(database: Database, num: int) -> float:
    """Seconds to store as many runs and predictions, in batches."""
    started = time.monotonic()
    batch: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for pair in rows(num):
        batch.append(pair)
        if len(batch) == BATCH:
            _flush(database, batch)
            batch = []
    if batch:
        _flush(database, batch)
    return time.monotonic() - started


def _flush(database: Database, batch: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    with database.transaction() as session:
        session.execute(insert(ProfiledRun), [run for run, _ in batch])
        session.execute(insert(RunPrediction), [prediction for _, prediction in batch])


def predicting_seconds() -> tuple[float, int]:
    """Mean seconds for one job of the fit sweep, allocator included, after the first has loaded the simulator."""
    jobs = [json.loads(line) for line in SWEEP.read_text().splitlines()]
    documents = [
        {"run_id": job["run_id"], "gpu": "h200-141gb", "rank": job["rank"], "profile": job, "measured": {}}
        for job in jobs
    ]
    predictions.predict("warm", documents[0])
    started = time.monotonic()
    for document in documents:
        predictions.predict("x", document)
    return (time.monotonic() - started) / len(documents), len(documents)


def fit_here() -> None:
    """In a process of its own: seconds and largest resident memory as JSON."""
    database = Database(Settings())
    started = time.monotonic()
    found = calibrations.fit(database, stack_key(Stack()), "hopper").document
    print(
        json.dumps(
            {
                "seconds": round(time.monotonic() - started, 2),
                "largest_resident_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
                "num_fitted": found["provenance"]["num_fitted"],
                "coverage": found["coverage"],
                "median_before": found["held_out"]["all"]["before"]["median"],
                "median_after": found["held_out"]["all"]["after"]["median"],
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--database-url", help="an empty PostgreSQL database; default: SQLite in a temporary folder")
    parser.add_argument("--fit-here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.fit_here:
        fit_here()
        return
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(data_dir=Path(folder), database_url=arguments.database_url)
        migrations.upgrade(settings)
        database = Database(settings)
        print(
            f"{database.engine.dialect.name}: {arguments.runs} runs stored in {store(database, arguments.runs):.1f} s"
        )
        database.close()
        environment = {**os.environ, "OOMBUDSMAN_DATA_DIR": folder}
        if arguments.database_url:
            environment["OOMBUDSMAN_DATABASE_URL"] = arguments.database_url
        command = [sys.executable, __file__, "--fit-here"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        print("fit: " + done.stdout.strip())
    seconds, count = predicting_seconds()
    print(f"predicting: {1000 * seconds:.0f} ms a run (mean of {count} jobs of the dense fit sweep, one process)")


if __name__ == "__main__":
    main()
