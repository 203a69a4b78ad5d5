"""How to start the job: environment first, then torchrun on every node or one Slurm script, and NVIDIA's harness."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from estimator.render.assignments import Assignments
from estimator.render.values import hydra_literal, structured

SCRIPT = "<YOUR_TRAINING_SCRIPT.py>"
SCRIPT_ARGUMENTS = "<YOUR_ARGUMENTS>"


class ClusterLike(Protocol):
    """What is asked of a cluster: its GPUs, and how many a node has (None: 8, or all where there are fewer)."""

    @property
    def num_gpus(self) -> int: ...

    @property
    def gpus_per_node(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Cluster:
    """The GPUs a job runs on."""

    num_gpus: int
    gpus_per_node: int | None = None


def node_shape(cluster: ClusterLike | Mapping[str, Any]) -> tuple[int, int]:
    """(nodes, GPUs of a node). What is no multiple of a node is spread evenly over smaller ones."""
    if isinstance(cluster, Mapping):
        num_gpus, per_node = int(cluster["num_gpus"]), cluster.get("gpus_per_node")
    else:
        num_gpus, per_node = cluster.num_gpus, cluster.gpus_per_node
    per_node = min(per_node or 8, num_gpus)
    while num_gpus % per_node:
        per_node -= 1
    return num_gpus // per_node, per_node


def export_lines(env: Mapping[str, str | None]) -> list[str]:
    """Shell lines that export or unset each variable."""
    return [f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}" for name, value in env.items()]


def torchrun_text(env: Mapping[str, str | None], cli: str | None, cluster: ClusterLike | Mapping[str, Any]) -> str:
    """Commands for one node, or for each node in turn where there are several."""
    nodes, per_node = node_shape(cluster)
    lines = export_lines(env)
    if nodes == 1:
        lines.append(f"torchrun --standalone --nproc_per_node={per_node} {_script(cli)}")
        return "\n".join(lines) + "\n"
    lines += [
        f"# on each of the {nodes} nodes; NODE_RANK is 0 on the first, MASTER_ADDR its address",
        f"torchrun --nnodes={nodes} --nproc_per_node={per_node} --node_rank=$NODE_RANK \\",
        "  --rdzv_backend=c10d --rdzv_endpoint=$MASTER_ADDR:29500 \\",
        f"  {_script(cli)}",
    ]
    return "\n".join(lines) + "\n"


def slurm_text(env: Mapping[str, str | None], cli: str | None, cluster: ClusterLike | Mapping[str, Any]) -> str:
    """A batch script: one torchrun a node."""
    nodes, per_node = node_shape(cluster)
    lines = [
        "#!/bin/bash",
        f"#SBATCH --nodes={nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={per_node}",
        "#SBATCH --exclusive",
        "# <YOUR_ACCOUNT_PARTITION_AND_TIME_LIMIT>",
        *export_lines(env),
        'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f"srun torchrun --nnodes={nodes} --nproc_per_node={per_node} \\",
        '  --rdzv_id="$SLURM_JOB_ID" --rdzv_backend=c10d --rdzv_endpoint="$MASTER_ADDR:29500" \\',
        f"  {_script(cli)}",
    ]
    return "\n".join(lines) + "\n"


def _script(cli: str | None) -> str:
    overrides = f" {cli}" if cli else ""
    return f"{SCRIPT} {SCRIPT_ARGUMENTS}{overrides}"


HARNESS_FLAGS = {
    "model.tensor_model_parallel_size": "--tensor_model_parallel_size",
    "model.pipeline_model_parallel_size": "--pipeline_model_parallel_size",
    "model.context_parallel_size": "--context_parallel_size",
    "model.expert_model_parallel_size": "--expert_model_parallel_size",
    "train.micro_batch_size": "--micro_batch_size",
    "train.global_batch_size": "--global_batch_size",
    "checkpoint.save": "--save_dir",
    "checkpoint.load": "--load_dir",
}
"""cfg field -> flag. Source: Megatron-Bridge v0.6.0 scripts/performance/argument_parser.py:224-400."""

HARNESS_FSDP_SETS = {
    "dist.use_megatron_fsdp": True,
    "ddp.use_megatron_fsdp": True,
    "ddp.data_parallel_sharding_strategy": "optim_grads_params",
    "ddp.keep_fp8_transpose_cache": False,
    "ddp.average_in_collective": False,
    "model.init_model_with_meta_device": True,
    "model.gradient_accumulation_fusion": True,
    "comm_overlap.defer_embedding_wgrad_compute": False,
}
"""What --use_megatron_fsdp true sets. Source: v0.6.0 scripts/performance/utils/overrides.py:94-116."""


def harness_form(work: Assignments, values: Mapping[str, Any], megatron_bridge: str) -> tuple[str | None, str | None]:
    """Arguments for NVIDIA's scripts/performance/setup_experiment.py, which forwards Hydra overrides to the run.

    Overrides are applied before flags (run_script.py:76-79), so --use_megatron_fsdp is written only where it does not
    undo one: with optim_grads_params, meta-device init and gradient accumulation fusion. Checkpoint folders are flags
    since 0.3, which matters because the FSDP flag sets load = None.
    """
    if any(start.structured is None for start in work.starts) or any(item.delete for item in work.fields):
        return None, "a change cannot be written as a flag or a Hydra override of the harness"
    minor = tuple(int(part) for part in megatron_bridge.split(".")[:2] if part.isdigit())
    fields = {item.path: item.value for item in work.fields if item.section not in {s.section for s in work.starts}}
    by_flag = _fsdp_flag_suits(fields, values)
    words: list[str] = []
    if by_flag:
        words.append("--use_megatron_fsdp true")
        if fields.get("checkpoint.load") is not None and minor < (0, 3):
            return None, "this version's --use_megatron_fsdp sets checkpoint.load to None after every override"
    overrides = [f"++{s.section}={hydra_literal(structured(s.section, s.structured))}" for s in work.starts]
    for path, value in fields.items():
        if by_flag and HARNESS_FSDP_SETS.get(path, ...) == value:
            continue
        flag = HARNESS_FLAGS.get(path)
        if flag in ("--save_dir", "--load_dir") and minor < (0, 3):
            flag = None
        if flag is not None and value is not None:
            words.append(f"{flag} {shlex.quote(str(value))}")
        elif not (by_flag and path == "checkpoint.load"):
            prefix = "++" if path.startswith("env_vars.") else ""
            overrides.append(f"{prefix}{path}={hydra_literal(structured(path, value))}")
    exported = [f"{name}={value}" for name, value in work.env.items() if value is not None]
    if exported and minor >= (0, 3):
        words.append(f"--custom_env_vars {shlex.quote(','.join(exported))}")
    text = " ".join([*words, shlex.join(overrides)]).strip()
    return (text, None) if text else (None, "nothing changes that the harness could set")


def _fsdp_flag_suits(fields: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    if fields.get("ddp.use_megatron_fsdp") is not True:
        return False
    if any(path in fields and fields[path] != value for path, value in HARNESS_FSDP_SETS.items()):
        return False
    if "ddp.data_parallel_sharding_strategy" not in fields:
        return False
    model = values.get("model") or {}
    fused = fields.get("model.gradient_accumulation_fusion", model.get("gradient_accumulation_fusion"))
    meta = fields.get("model.init_model_with_meta_device", model.get("init_model_with_meta_device"))
    return bool(fused) and bool(meta)
