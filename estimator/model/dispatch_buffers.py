"""What expert-parallel libraries allocate beside torch: device memory that they keep for the whole run.

Read in DeepEP: branch hybrid-ep of 2026-07-10, csrc/hybrid_ep/buffer/intranode.cu:95-275 (one buffer for dispatch and
combine), buffer/internode_doca.cu:385-590, extension/allgather.cu:140-150; branch main, csrc/legacy/config.hpp:56-107
(the last format of the classic buffers), csrc/kernels/legacy/compiled.cuh. Not measured.
"""

from __future__ import annotations

from estimator.job.settings import DEEPEP_RECEIVED_TOKENS, Settings
from estimator.model.shapes import shapes_of

_WORKSPACE_BYTES = 32 * 1024 * 1024
_NODE_RANKS = 8
_META_BYTES = 8 + 128 * 8 + 128 * 4 + 128 * 4
"""A received token's source, and room for 128 choices (indices, weights) and 128 scales."""


def dispatch_buffer_bytes(settings: Settings) -> int:
    """Bytes of the dispatcher's own buffers on one rank; 0 for all-to-all and models without experts."""
    moe, parallel = settings.model.moe, settings.parallel
    ranks = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size
    if moe is None or moe.dispatcher == "alltoall":
        return 0
    width = moe.latent_size or settings.model.hidden_size
    if moe.dispatcher == "deepep":
        return deep_ep_bytes(ranks, width * 2, moe.dispatcher_sms) if ranks > 1 else 0
    tokens = shapes_of(settings).hidden_tokens
    return hybrid_ep_bytes(ranks, moe.nvlink_ranks, -(-tokens // 16) * 16, width, moe.num_experts // ranks or 1)


def hybrid_ep_bytes(ranks: int, nvlink_ranks: int, tokens: int, width: int, local_experts: int) -> int:
    """Room for every token of the group on each rank, with probabilities, scales and the gathered map; between nodes
    also what is sent and received there."""
    domain = min(ranks, nvlink_ranks)
    nodes = max(1, ranks // domain)
    everyone = tokens * ranks
    probs = local_experts * domain * 4
    scale = width // 128 * 4
    total = everyone * (width * 2 + probs + scale) + everyone * local_experts * ranks
    if nodes > 1:
        token = width * 2
        total += tokens * (token + local_experts * ranks * 4 + scale)
        total += tokens * (nodes - 1) * (token + probs + scale + 2 * (token + probs))
    return total


def deep_ep_bytes(ranks: int, hidden_bytes: int, multiprocessors: int) -> int:
    """Buffers over NVLink and, between nodes, over RDMA, with the workspace."""
    channels = multiprocessors // 2
    nodes, peers = max(1, ranks // _NODE_RANKS), min(ranks, _NODE_RANKS)
    held = DEEPEP_RECEIVED_TOKENS[ranks]
    total = _WORKSPACE_BYTES + channels * peers * ((2 * nodes + 3) * 4 + held * (hidden_bytes + _META_BYTES))
    if ranks > _NODE_RANKS:
        sent = 20 if ranks == 16 else 8 if ranks <= 64 else 12
        held = -(-128 // sent) * sent
        total += channels * nodes * ((_NODE_RANKS * 2 + 2) * 8 + held * (hidden_bytes + _META_BYTES + 16) * 2)
    return total
