"""Requests shown in the OpenAPI document. The tests run each of them."""

from __future__ import annotations

from typing import Any

JOB: dict[str, Any] = {"recipe": "llama3_8b_pretrain_config"}

EXAMPLES: dict[str, dict[str, Any]] = {
    "as shipped, on the GPUs of its name": {
        "summary": "llama3_8b_pretrain_config on 2 x H100 80 GB",
        "value": {"job": JOB, "cluster": {"gpu": "h100-80gb", "num_gpus": 2}},
    },
    "larger micro batch": {
        "summary": "The same on 16 GPUs with a micro batch of 2",
        "value": {
            "job": {**JOB, "overrides": ["train.micro_batch_size=2"]},
            "cluster": {"gpu": "h100-80gb", "num_gpus": 16},
        },
    },
    "no context parallelism": {
        "summary": "The same on 8 GPUs without context parallelism",
        "value": {
            "job": {**JOB, "overrides": ["model.context_parallel_size=1"]},
            "cluster": {"gpu": "h100-80gb", "num_gpus": 8, "gpus_per_node": 8},
            "min_fit_probability": 0.95,
        },
    },
}
