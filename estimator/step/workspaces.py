"""What libraries allocate once, in the first iteration, and keep.

Source: transformer_engine 2.12.0 pytorch/module/base.py (get_cublas_workspace, get_dummy_wgrad), torch 2.11
aten/src/ATen/cuda/CUDABlas (default workspace), megatron-core 0.19.2 tensor_parallel/layers.py:570 (global buffer for
the gathered input of the output layer), models/common/embeddings/rotary_pos_embedding.py:168 (cached table).
"""

from __future__ import annotations

from estimator.components import WORKSPACES
from estimator.layout import StageShare
from estimator.model.parameters import Parameter
from estimator.model.shapes import Shapes
from estimator.timeline import Scribe

TE_CUBLAS_BYTES = {"hopper": 32 * 1024 * 1024 + 1024, "blackwell": 32 * 1024 * 1024 + 1024}
TE_CUBLAS_DEFAULT_BYTES = 4 * 1024 * 1024 + 1024
TORCH_CUBLAS_BYTES = {"hopper": 32 * 1024 * 1024, "blackwell": 32 * 1024 * 1024}
TORCH_CUBLAS_DEFAULT_BYTES = 8_519_680


def write_forward_workspaces(s: Scribe, x: Shapes, share: StageShare, rotary: bool, gpu_family: str) -> None:
    """Transformer Engine's cuBLAS workspace, the rotary table, torch's workspace where the output layer runs."""
    if rotary:
        s.alloc("rotary_table", x.sequence * x.rotary_dim * 4, WORKSPACES)
    s.alloc("te_cublas", TE_CUBLAS_BYTES.get(gpu_family, TE_CUBLAS_DEFAULT_BYTES), WORKSPACES)
    if share.post_process:
        if x.sequence_parallel:
            s.alloc("global_gather_buffer", x.gathered_hidden, WORKSPACES)
        s.alloc("torch_cublas_forward", TORCH_CUBLAS_BYTES.get(gpu_family, TORCH_CUBLAS_DEFAULT_BYTES), WORKSPACES)


def write_backward_workspaces(s: Scribe, share: StageShare, gpu_family: str) -> None:
    """The backward thread has its own cuBLAS handle, so torch's matrix products there take a second workspace."""
    if share.post_process:
        s.alloc("torch_cublas_backward", TORCH_CUBLAS_BYTES.get(gpu_family, TORCH_CUBLAS_DEFAULT_BYTES), WORKSPACES)


def wgrad_dummy_bytes(parameter: Parameter, seen: set[tuple[int, int]], element_bytes: int) -> int:
    """Bytes of the placeholder returned for this weight's gradient: one for every distinct shape, made at first use."""
    shape = (parameter.num_elements, parameter.row_size)
    if not parameter.fused_gradient or shape in seen:
        return 0
    seen.add(shape)
    return parameter.num_elements * element_bytes
