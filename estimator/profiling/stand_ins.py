"""What a simulated rank replaces: the process group, an absent extension, and checks that would stop on fake numbers.

Nothing here changes what is allocated: every check still computes what it would, and only its verdict is dropped.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import types
from typing import Any


def initialise_process_group(simulate: bool, rank: int, world_size: int) -> int:
    """Join torch's fake process group as ``rank`` of ``world_size``, or the launcher's NCCL group; returns the rank.

    Fake collectives return at once and move nothing, so a single process is one rank of a world of any size.
    """
    import torch

    if simulate:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        return rank
    actual = int(os.environ.get("WORLD_SIZE", "1"))
    if actual != world_size:
        raise ValueError(f"the job has world_size {world_size}, but {actual} processes were launched")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.distributed.init_process_group("nccl")
    return torch.distributed.get_rank()  # type: ignore[no-any-return]


def provide_weight_gradient_extension() -> bool:
    """Put a do-nothing ``fused_weight_gradient_mlp_cuda`` (apex) in place where it is not installed; True if done.

    ColumnParallelLinear refuses gradient_accumulation_fusion without it (megatron-core 0.19.2,
    core/tensor_parallel/layers.py). The real kernel accumulates into ``weight.main_grad`` in place, so leaving it out
    changes numbers and not memory.
    """
    name = "fused_weight_gradient_mlp_cuda"
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        return False
    module = types.ModuleType(name)
    for function in ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"):
        setattr(module, function, lambda *_arguments: None)
    sys.modules[name] = module
    return True


def ignore_verdicts() -> None:
    """Let NaN checks compute and not judge: fake collectives leave unwritten memory in what they were to receive.

    Covers DDP's check_grads and Bridge's loss check (RerunStateMachine.validate_result in mode "disabled"), Megatron
    FSDP's ``_check_nan_in_grad``, its check that all ranks' shards together cover a parameter, and the loss scaler's
    overflow test, which would skip every FP16 step and with it the optimizer states.
    """
    import torch
    from megatron.core.optimizer import optimizer as optimizer_module
    from megatron.core.rerun_state_machine import RerunStateMachine

    def validate_result(_self: Any, result: Any, rejection_func: Any, *_rest: Any, **_more: Any) -> None:
        bool(rejection_func(result))

    RerunStateMachine.validate_result = validate_result

    scaled = optimizer_module.MixedPrecisionOptimizer
    real = scaled._unscale_main_grads_and_check_for_nan

    def unscale_and_pass(self: Any) -> bool:
        real(self)
        return False

    scaled._unscale_main_grads_and_check_for_nan = unscale_and_pass

    def check_nan_in_grad(grad: Any) -> None:
        norm = torch.linalg.norm(grad)
        bool(torch.isnan(norm) or not torch.isfinite(norm))

    for name in ("param_and_grad_buffer", "megatron_fsdp"):
        try:
            module = importlib.import_module(f"megatron.core.distributed.fsdp.src.megatron_fsdp.{name}")
        except ImportError:
            continue
        if hasattr(module, "_check_nan_in_grad"):
            vars(module)["_check_nan_in_grad"] = check_nan_in_grad
        if hasattr(module, "validate_uneven_dtensor"):
            vars(module)["validate_uneven_dtensor"] = _without_assertions(module.validate_uneven_dtensor)


def keep_own_random_state() -> None:
    """Megatron FSDP takes the random state of its tensor-parallel group's first rank: nobody sends it here.

    Its broadcast would read a length from memory that no one wrote (mcore_fsdp_adapter.py:472-483).
    """
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    FullyShardedDataParallel.sync_rng_states_across_tp_group = lambda _self: None


def _without_assertions(check: Any) -> Any:
    """The same check, its AssertionError dropped."""

    def checked(*arguments: Any) -> None:
        with contextlib.suppress(AssertionError):
            check(*arguments)

    return checked
