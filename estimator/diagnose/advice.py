"""What follows from a cause for the recommendation: which families of changes come first, and what to do by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Advice:
    """``search`` False: no setting of the job helps, so none is recommended. ``families_first`` are names of
    :data:`estimator.changes.FAMILIES`, to be preferred among changes that fit; ``actions`` are for a person."""

    actions: tuple[str, ...] = ()
    families_first: tuple[str, ...] = ()
    search: bool = True

    def as_dict(self) -> dict[str, Any]:
        return {
            "actions": list(self.actions),
            "families_first": list(self.families_first),
            "search": self.search,
        }


_ALLOCATOR = "Export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True first: it changes nothing else."
_HOST = (
    "This is host memory: no setting of Megatron FSDP, and no other change of GPU memory, helps.",
    "Lower dataset.num_workers and prefetching, ask the scheduler for more memory, and look at what is kept on the CPU "
    "(optimizer_cpu_offload, asynchronous checkpoints, a checkpoint gathered on one rank).",
)

ADVICE: dict[str, Advice] = {
    "model_states": Advice(families_first=("dp_strategy", "layout", "optimizer_precision")),
    "activations": Advice(families_first=("recompute", "micro_batch", "layout")),
    "logits": Advice(
        ("Use Transformer Engine's fused cross entropy; context parallelism and tensor parallelism cut the logits.",),
        ("cross_entropy", "layout", "micro_batch"),
    ),
    "unfused_attention": Advice(
        ("Make attention run fused: attention_backend flash or fused, a head size and mask that they support.",),
        ("recompute", "layout"),
    ),
    "fsdp_buffers": Advice(families_first=("fsdp_buffers", "dp_strategy")),
    "optimizer_first_step": Advice(families_first=("dp_strategy", "optimizer_precision", "offload")),
    "optimizer_temporaries": Advice(families_first=("dp_strategy", "optimizer_precision")),
    "gradient_accumulation": Advice(
        ("Let gradients be reduced in every microbatch (no no_sync), or use the distributed optimizer.",),
        ("dp_strategy", "micro_batch"),
    ),
    "fragmentation": Advice((_ALLOCATOR,), ("allocator",)),
    "memory_cap": Advice(("Raise or remove the memory fraction (set_per_process_memory_fraction, MIG, MPS).",)),
    "other_process": Advice(
        ("Free the card first: nvidia-smi shows who holds it (an earlier run, a notebook, a second job).",),
        search=False,
    ),
    "outside_pool": Advice(
        (
            "Leave room outside PyTorch's pool: fewer communicators and NCCL channels (NCCL_NCHANNELS_PER_PEER, "
            "NCCL_BUFFSIZE), torch.cuda.set_per_process_memory_fraction(0.95), or train.empty_unused_memory_level=1.",
        ),
        ("allocator",),
    ),
    "cuda_graphs": Advice(
        ('Set model.cuda_graph_impl = "none", or capture fewer graphs: their pools are kept for good.',),
    ),
    "fp8_copies": Advice(
        ("Set ddp.keep_fp8_transpose_cache = False, look at fp8_param_gather: FP8 keeps copies beside BF16 weights.",),
        ("fsdp_buffers",),
    ),
    "moe_imbalance": Advice(
        ("Cap what a rank can get: moe_expert_capacity_factor, or balance the router; recompute the experts.",),
        ("recompute", "micro_batch", "layout"),
    ),
    "pipeline_imbalance": Advice(
        ("Give the full stage fewer layers (num_layers_in_first_pipeline_stage, ..._last_...).",), ("layout",)
    ),
    "longest_sample": Advice(
        ("Bound the longest sample: pack or cut to seq_length, and drop what is longer.",), ("recompute", "micro_batch")
    ),
    "leak": Advice(
        ("Something is kept from step to step: losses or outputs collected with their graph, hooks, growing caches.",),
    ),
    "model_build": Advice(
        ("Build the model on the meta device (model.init_model_with_meta_device) with a sharding strategy.",),
        ("dp_strategy", "layout"),
    ),
    "checkpoint_load": Advice(
        ("Loading needs room beside the model: load sharded, on the CPU, or without the optimizer.",),
        ("dp_strategy", "layout"),
    ),
    "checkpoint_save": Advice(
        ("Save sharded (torch_dist or fsdp_dtensor) instead of gathering; check that the last file is complete.",),
        ("allocator",),
    ),
    "evaluation": Advice(
        ("Lower the evaluation's micro batch or sequence, and run it without gradients.",), ("micro_batch",)
    ),
    "host_memory": Advice(_HOST, search=False),
    "shared_memory": Advice(
        (
            "Shared memory or host memory of the data loader: raise /dev/shm (docker --shm-size, an emptyDir of medium "
            "Memory), or lower dataset.num_workers. No setting of GPU memory helps.",
        ),
        search=False,
    ),
    "corrupt_shape": Advice(
        ("Find the shape: a negative or overflowing length, a wrong tokenizer, unpadded or corrupt data.",),
        search=False,
    ),
    "configuration": Advice(search=False),
    "collective_timeout": Advice(
        ("Another rank stopped or hung first: look at its log; this text only shows who waited.",), search=False
    ),
    "not_out_of_memory": Advice(("This error is not about memory.",), search=False),
}

NOT_GPU_MEMORY = frozenset(
    {"host_memory", "shared_memory", "configuration", "collective_timeout", "not_out_of_memory", "corrupt_shape"}
)
"""Causes whose answer is ``outcome`` not_gpu_memory: the card is not what is short."""
