"""Answers of the shape that the API promises, for tests of what is made of them."""

from __future__ import annotations

from typing import Any

GIB = 1024**3


def estimate(required: float = 97.3, usable: float = 79.1) -> dict[str, Any]:
    """An estimate whose components add up to its peak."""
    components = {
        "parameters": 15 * GIB,
        "main_gradients": 30 * GIB,
        "optimizer_states": 30 * GIB,
        "main_parameters": 15 * GIB,
        "logits_and_loss": 2 * GIB,
        "batch": GIB // 100,
    }
    peak = sum(components.values())
    return {
        "peak_allocated_bytes": peak,
        "persistent_bytes": 90 * GIB,
        "resident_state_bytes": 89 * GIB,
        "peak_phase": "steady_forward_backward",
        "peak_pipeline_rank": 0,
        "survival_bytes": {"default": 95 * GIB, "expandable_segments": 94 * GIB},
        "allocator": {"setting": "default", "source": "default"},
        "required_bytes": int(required * GIB),
        "usable_bytes": int(usable * GIB),
        "fits": required <= usable,
        "fit_probability": 0.0001 if required > usable else 0.9999,
        "phases": [
            {"name": "model_build", "allocated_bytes": 45 * GIB, "peak_bytes": 46 * GIB},
            {"name": "steady_forward_backward", "allocated_bytes": 90 * GIB, "peak_bytes": peak},
        ],
        "components_at_peak": components,
        "ranks": [
            {"pipeline_rank": 0, "peak_allocated_bytes": peak, "required_bytes": int(required * GIB)},
            {"pipeline_rank": 1, "peak_allocated_bytes": peak - GIB, "required_bytes": int(required * GIB) - GIB},
        ],
        "problems": [],
        "assumptions": [f"assumption {n}" for n in range(9)],
        "estimator_version": "0.1.0",
        "calibration_id": None,
        "schema_version": "1",
    }


PYTHON = """import torch
cfg.dist.use_megatron_fsdp = True
cfg.ddp.use_megatron_fsdp = True
cfg.ddp.data_parallel_sharding_strategy = "optim_grads_params"
cfg.ddp.megatron_fsdp_main_grads_dtype = torch.float32  # a line that is longer than eighty columns is not wrapped
"""


def recommended() -> dict[str, Any]:
    """Two recommendations for a job that does not fit."""
    return {
        "outcome": "recommended",
        "current": estimate(),
        "problems": [{"rule_id": "S1", "fields": ["ddp.x"], "message": "x is refused", "fix": "set x to y"}],
        "missing": [],
        "diagnosis": {
            "summary": "Parameters, gradients and optimizer states alone need 90.0 GiB of the card's 79.1 GiB.",
            "causes": [{"cause": "states_too_large", "confidence": 0.99, "evidence": "89 GiB resident"}],
        },
        "recommendations": [_recommendation(1, "Megatron FSDP, ZeRO-3"), _recommendation(2, "Twice the GPUs")],
        "alternatives": [{"title": "a third", "required_bytes": 60 * GIB, "relative_step_time": 1.3, "fits": True}],
        "schema_version": "1",
    }


def _recommendation(rank: int, title: str) -> dict[str, Any]:
    return {
        "rank": rank,
        "title": title,
        "changes": [
            {
                "path": "ddp.use_megatron_fsdp",
                "from": False,
                "to": True,
                "why": "shards parameters, gradients and states over the data-parallel ranks",
                "family": "dp_strategy",
            }
        ],
        "override": {
            "python": PYTHON,
            "cli": None,
            "yaml": "ddp:\n  use_megatron_fsdp: true\n",
            "env": {"CUDA_DEVICE_MAX_CONNECTIONS": None, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            "launch": {"torchrun": "torchrun --nproc_per_node=2 <YOUR_TRAINING_SCRIPT.py>", "slurm": "srun"},
            "harness": None,
            "reasons": {"cli": "a torch dtype would become a string"},
        },
        "estimate": estimate(required=70.2),
        "fit_probability": 0.9983,
        "headroom_bytes": 9 * GIB,
        "relative_step_time": 1.04,
        "warnings": [{"id": "checkpoint", "text": "existing torch_dist checkpoints do not load"}],
        "checkpoint": {"format": "fsdp_dtensor", "conversion_needed": True, "text": "Saves go to a new folder."},
        "verify": {"commands": ["python -c 'print(1)'"], "criteria": ["the second iteration ends"]},
    }
