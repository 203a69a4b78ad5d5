"""What to know before a change list is run, and how to see that it worked: warnings, checkpoints, verification.

Sources: bridge_rules B14, B15, B20 as in ``estimator.rules``; Megatron-LM tools/checkpoint/checkpoint_inspector.py
(convert-torch-dist-to-fsdp-dtensor); Megatron-Bridge examples/conversion/mfsdp/convert_checkpoints_fsdp.py; the place
of the 2-GPU functional test by release: tags v0.2.0 to v0.6.0 of Megatron-Bridge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from estimator.changes import Change, routed
from estimator.job.settings import Stack
from estimator.rules.facts import FSDP_STRATEGIES, section, strategy_of
from estimator.rules.rule import version_tuple

FUNCTIONAL_TESTS = (
    ("0.5", "tests/functional_tests/test_groups/megatron_fsdp/test_megatron_fsdp.py"),
    ("0.4", "tests/functional_tests/test_groups/training/test_megatron_fsdp.py"),
    ("0.2", "tests/functional_tests/training/test_megatron_fsdp.py"),
)
"""First release -> file of Bridge's own Megatron FSDP test."""

WATCHED = (
    "dist.use_megatron_fsdp",
    "ddp.use_megatron_fsdp",
    "ddp.data_parallel_sharding_strategy",
    "ddp.average_in_collective",
    "ddp.megatron_fsdp_main_grads_dtype",
    "ddp.grad_reduce_in_fp32",
    "ddp.bucket_size",
    "ddp.overlap_grad_reduce",
    "checkpoint.ckpt_format",
    "checkpoint.save",
    "checkpoint.load",
)
"""Fields that are printed to verify an override, beside those that it changes."""


@dataclass(frozen=True, slots=True)
class Note:
    """One warning: a short id and a sentence or two."""

    id: str
    text: str

    def as_dict(self) -> dict[str, str]:
        return {"id": self.id, "text": self.text}


@dataclass(frozen=True, slots=True)
class Advice:
    """What goes with an override: ``warnings``, ``checkpoint`` {format, conversion_needed, text} and ``verify``."""

    warnings: tuple[Note, ...]
    checkpoint_format: str
    conversion_needed: bool
    checkpoint_text: str
    verify_commands: tuple[str, ...]
    verify_criteria: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The three parts as the API answers them."""
        return {
            "warnings": [note.as_dict() for note in self.warnings],
            "checkpoint": {
                "format": self.checkpoint_format,
                "conversion_needed": self.conversion_needed,
                "text": self.checkpoint_text,
            },
            "verify": {"commands": list(self.verify_commands), "criteria": list(self.verify_criteria)},
        }


def advise(
    changes: Iterable[Change],
    values: Mapping[str, Any],
    effective: Mapping[str, Any],
    changed: Mapping[str, Any],
    stack: Stack | None = None,
) -> Advice:
    """Advice for a change list.

    ``values`` and ``effective`` are the job before, ``changed`` the effective document after the changes.
    """
    stack = stack or Stack()
    changes = routed(changes, values)
    before, after = strategy_of(effective), strategy_of(changed)
    conversion_needed, text = checkpoint_note(effective, changed)
    fsdp = after in FSDP_STRATEGIES
    return Advice(
        warnings=tuple(_warnings(changes, effective, changed, before, after)),
        checkpoint_format=str(section(changed, "checkpoint").get("ckpt_format") or "torch_dist"),
        conversion_needed=conversion_needed,
        checkpoint_text=text,
        verify_commands=verify_commands(changes, stack, fsdp),
        verify_criteria=verify_criteria(fsdp),
    )


def checkpoint_note(effective: Mapping[str, Any], changed: Mapping[str, Any]) -> tuple[bool, str]:
    """(whether checkpoints must be converted, what happens to them)."""
    before, after = section(effective, "checkpoint"), section(changed, "checkpoint")
    old, new = before.get("ckpt_format") or "torch_dist", after.get("ckpt_format") or "torch_dist"
    loaded = before.get("load") or before.get("pretrained_checkpoint")
    if old == new:
        if strategy_of(effective) == strategy_of(changed):
            return False, f"Checkpoints stay {new}; existing ones load as they are."
        return False, (
            f"Checkpoints stay {new}. Weights load as they are; if the optimizer's states do not, start with "
            "checkpoint.load_optim = False."
        )
    folder = after.get("save") or after.get("load")
    where = f" They go to {folder}, so that the job resumes from there." if folder else ""
    if not loaded:
        return False, f"Checkpoints are written as {new} from now on.{where} The job loads none, so none is converted."
    start = (
        f"{old} checkpoints do not load as {new}.{where} To go on from {loaded}, convert it once; without that, "
        "the job starts anew in the new folder."
    )
    if new == "fsdp_dtensor":
        target = after.get("load") or after.get("pretrained_checkpoint") or folder
        return True, f"{start}\n" + "\n".join(conversion_commands(effective, str(loaded), str(target)))
    return True, f"{start} Export it to Hugging Face and import it again: there is no direct converter."


def conversion_commands(effective: Mapping[str, Any], source: str, target: str) -> tuple[str, ...]:
    """Shell lines that turn a torch_dist checkpoint, or Hugging Face weights, into fsdp_dtensor.

    A gated model needs --swiglu, because the fused gate and up projection is split (checkpoint_inspector.py:352-385).
    """
    model = section(effective, "model")
    gated = " --swiglu" if model.get("gated_linear_unit") else ""
    sizes = [
        f"--{flag} {model.get(f'{name}_model_parallel_size' if flag != 'cp' else 'context_parallel_size') or 1}"
        for flag, name in (("tp", "tensor"), ("cp", "context"), ("ep", "expert"))
    ]
    return (
        "# in a checkout of Megatron-LM; <ITERATION> is the folder of the last step (iter_0001000);",
        "# then copy the latest_* files beside it to the new folder",
        "torchrun --nproc_per_node=8 tools/checkpoint/checkpoint_inspector.py convert-torch-dist-to-fsdp-dtensor \\",
        f"  {source}/<ITERATION> {target}/<ITERATION>{gated}",
        "# or from Hugging Face weights, in a checkout of Megatron-Bridge",
        "torchrun --nproc_per_node=8 examples/conversion/mfsdp/convert_checkpoints_fsdp.py import \\",
        f"  --hf-model <HF_MODEL> --megatron-path {target} {' '.join(sizes)} --ckpt-format fsdp_dtensor",
    )


def _warnings(
    changes: tuple[Change, ...], effective: Mapping[str, Any], changed: Mapping[str, Any], before: str, after: str
) -> Iterable[Note]:
    paths = {change.path for change in changes}
    if after in FSDP_STRATEGIES and before not in FSDP_STRATEGIES:
        yield Note(
            "B15",
            "Existing torch_dist checkpoints do not load under Megatron FSDP (fsdp_dtensor): convert them.",
        )
        yield Note(
            "A8",
            "An exported CUDA_DEVICE_MAX_CONNECTIONS wins over cfg.env_vars; if your container or script exports 1, "
            "Megatron FSDP refuses to start. Export the value given here.",
        )
    if "model.init_model_with_meta_device" in paths and section(changed, "model").get("init_model_with_meta_device"):
        yield Note(
            "B7",
            "If your script loads Hugging Face weights into the model before it is wrapped (a pre-wrap hook), leave "
            "init_model_with_meta_device False; an fsdp_dtensor checkpoint loads fine.",
        )
    if "model.cuda_graph_impl" in paths:
        yield Note("B9", "CUDA graphs are switched off: steps that are bound by kernel launches get slower.")
    lower = section(effective, "ddp").get("grad_reduce_in_fp32") and "ddp.megatron_fsdp_main_grads_dtype" not in paths
    if lower and after in FSDP_STRATEGIES and before not in FSDP_STRATEGIES:
        dtype = section(changed, "ddp").get("megatron_fsdp_main_grads_dtype")
        if dtype != "float32":
            yield Note("B20", "Gradients accumulate in the parameters' precision, no longer in FP32.")
    if {"model.pipeline_model_parallel_size"} & paths:
        yield Note("B1", "The pipeline layout changes, and with it which rank holds which layers.")


def verify_commands(changes: Iterable[Change], stack: Stack, fsdp: bool) -> tuple[str, ...]:
    """What to run: the values in effect, Bridge's own 2-GPU test, this project's profiler on one GPU."""
    paths = dict.fromkeys(WATCHED if fsdp else ())
    paths.update(dict.fromkeys(change.path for change in changes if not change.path.startswith("env")))
    names = dict.fromkeys(change.path.partition(".")[2] for change in changes if change.path.startswith("env"))
    if fsdp:
        names["CUDA_DEVICE_MAX_CONNECTIONS"] = None
    lines = [
        "import os",
        "from operator import attrgetter",
        "from megatron.bridge.training.config import runtime_config_update",
        "runtime_config_update(cfg)  # with WORLD_SIZE set, as torchrun does",
        f"for path in {list(paths)!r}:",
        "    print(path, '=', attrgetter(path)(cfg))",
    ]
    lines += [f"print({name!r}, '=', os.environ.get({name!r}))" for name in names]
    commands = ["\n".join(lines)]
    if fsdp:
        test = f"{_functional_test(stack.megatron_bridge)}::TestMegatronFSDP::test_fsdp_pretrain_basic"
        commands.append(
            f"CUDA_VISIBLE_DEVICES=0,1 uv run python -m torch.distributed.run --nproc_per_node=2 -m pytest {test} -v -s"
        )
    return tuple(commands)


def verify_criteria(fsdp: bool) -> tuple[str, ...]:
    """What counts as success."""
    common = (
        "the printed values are those of the changes",
        "the loss of the last iteration is finite",
        "torch.cuda.max_memory_allocated() after the second iteration is at most the predicted peak",
    )
    return (*common, "no assertion about the checkpoint format", "the 2-GPU test reports 1 passed") if fsdp else common


def _functional_test(megatron_bridge: str) -> str:
    version = version_tuple(megatron_bridge)
    for first, path in FUNCTIONAL_TESTS:
        if version >= version_tuple(first):
            return path
    return FUNCTIONAL_TESTS[-1][1]
