"""Batches and the loss, made as Bridge's GPT step makes them, with random tokens.

Source: megatron-bridge 0.6.2, training/gpt_step.py (get_batch_from_iterator, get_batch, _forward_step_common) and
training/losses.py (masked_next_token_loss). Only pre-training batches: no packed sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from estimator.profiling.job import ProfileJob


def batches(job: ProfileJob) -> Iterator[dict[str, Any]]:
    """Endless microbatches on the host, as a data loader hands them over: int64 [b, s] and a float32 mask."""
    import torch

    b, s = job.settings.batch.micro_batch_size, job.settings.model.seq_length
    while True:
        tokens = torch.randint(0, job.settings.model.vocab_size, (b, s))
        yield {
            "tokens": tokens,
            "labels": torch.roll(tokens, -1, dims=1),
            "loss_mask": torch.ones(b, s),
            "position_ids": torch.arange(s).expand(b, s).contiguous(),
        }


def _needed(config: Any, groups: Any, vp_stage: int | None) -> frozenset[str]:
    """Tensors that this model chunk takes to the GPU; a middle stage takes none."""
    from megatron.core.pipeline_parallel.utils import (
        is_pp_first_stage,
        is_pp_last_stage,
        is_vp_first_stage,
        is_vp_last_stage,
    )

    vp_size = config.virtual_pipeline_model_parallel_size
    first = is_pp_first_stage(groups.pp) and (vp_stage is None or is_vp_first_stage(vp_stage=vp_stage, vp_size=vp_size))
    last = is_pp_last_stage(groups.pp) and (vp_stage is None or is_vp_last_stage(vp_stage=vp_stage, vp_size=vp_size))
    names: set[str] = set()
    if first or (last and (config.mtp_num_layers or 0) > 0):
        names |= {"tokens", "position_ids"}
    if last:
        names |= {"labels", "loss_mask"}
    return frozenset(names)


def forward_step_function(job: ProfileJob, groups: Any) -> Callable[..., Any]:
    """What the schedules call for each microbatch: moves the batch, runs the model, returns output and loss."""
    from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_model_config

    check_for_nan = job.settings.runtime.check_for_nan_in_loss

    def forward_step(data_iterator: Any, model: Any, *_unused: Any) -> tuple[Any, Callable[..., Any]]:
        config = get_model_config(model)
        vp_stage = get_attr_wrapped_model(model, "vp_stage", allow_none=True)
        needed = _needed(config, groups, vp_stage)
        batch: dict[str, Any] = dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids"))
        if needed:
            host = next(data_iterator)
            batch = {key: value.cuda(non_blocking=True) if key in needed else None for key, value in host.items()}
            batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=groups.cp)
        output = model(
            input_ids=batch["tokens"],
            position_ids=batch["position_ids"],
            attention_mask=None,
            labels=batch["labels"],
        )
        loss_mask = batch["loss_mask"]
        return output, lambda tensor: masked_next_token_loss(loss_mask, tensor, check_for_nan)

    return forward_step


def masked_next_token_loss(loss_mask: Any, output_tensor: Any, check_for_nan_in_loss: bool) -> tuple[Any, Any, Any]:
    """Sum of the masked losses, number of tokens, and what is reported: allocated as Bridge's function allocates it."""
    import torch
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    losses = output_tensor.view(-1).float()
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses * mask)
    if check_for_nan_in_loss:
        machine = get_rerun_state_machine()
        for rejection in (torch.isnan, torch.isinf):
            machine.validate_result(result=loss, rejection_func=rejection, message="loss", tolerance=0.0, fatal=True)
    num_tokens = mask.sum().clone().detach().to(torch.int)
    reporting = torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": reporting}
