"""What libraries allocate once, in the first iteration, and keep: each at the moment of its first use.

Where it lies decides nothing about allocated bytes, but a good deal about fragmentation: these buffers stay for good
between buffers that come and go.

Source: transformer_engine 2.12.0 pytorch/module/base.py (get_cublas_workspace, get_dummy_wgrad), torch 2.11
aten/src/ATen/cuda/CUDABlas (default workspace; the backward thread has a cuBLAS handle and workspace of its own),
megatron-core 0.19.2 tensor_parallel/layers.py:570 (global buffer for the gathered input of the output layer),
models/common/embeddings/rotary_pos_embedding.py:131-168 (cached table). Moments as recorded on an H200.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from estimator.components import WGRAD_DUMMIES, WORKSPACES
from estimator.layout import StageShare
from estimator.model.fp8 import write_weight_copies
from estimator.model.parameters import Parameter
from estimator.model.shapes import Shapes
from estimator.timeline import Block, Scribe

TE_CUBLAS_BYTES = {"hopper": 32 * 1024 * 1024 + 1024, "blackwell": 32 * 1024 * 1024 + 1024}
TE_CUBLAS_DEFAULT_BYTES = 4 * 1024 * 1024  # TE 2.12 pytorch/cpp_extensions/gemm.py:31-36
TORCH_CUBLAS_BYTES = {"hopper": 32 * 1024 * 1024, "blackwell": 32 * 1024 * 1024}
"""Blackwell since some version: Megatron-LM's tests on GB200 have the default below until April 2026, and this from May
on."""
TORCH_CUBLAS_DEFAULT_BYTES = 8_519_680

_WORKSPACE_CHUNKS = re.compile(r":(\d{1,9}):(\d{1,9})")

GROUPED_STREAMS = 4
"""Streams over which Transformer Engine spreads grouped products, each with a workspace (TE 2.12
pytorch/cpp_extensions/gemm.py:39-58)."""

_AFTER_WGRAD = {
    "linear_fc2": "fc2_input_grad",
    "linear_proj": "proj_input_grad",
    "linear_fc1": "fc1_norm_workspace",
    "linear_qkv": "qkv_norm_workspace",
}
"""Weight -> the last buffer that its layer's backward makes before it asks for the placeholder."""


class Lasting(NamedTuple):
    """A buffer that is made once and kept."""

    name: str
    num_bytes: int
    component: str


def torch_cublas_bytes(gpu_family: str, config: str | None) -> int:
    """Bytes of torch's workspace of one cuBLAS handle. ``config``: CUBLAS_WORKSPACE_CONFIG, sizes in KiB with their
    counts (":4096:8"), which replace torch's default for the GPU."""
    chunks = _WORKSPACE_CHUNKS.findall(config or "")
    if chunks:
        return sum(int(size) * 1024 * int(count) for size, count in chunks)
    return TORCH_CUBLAS_BYTES.get(gpu_family, TORCH_CUBLAS_DEFAULT_BYTES)


class FirstUse:
    """Hands out lasting buffers when the buffer that precedes them is made."""

    def __init__(
        self, x: Shapes, share: StageShare, torch_bytes: int, family: str, rotary: bool, experts: bool
    ) -> None:
        """``torch_bytes``: of one cuBLAS workspace of torch's (:func:`torch_cublas_bytes`)."""
        self.x = x
        self._seen: set[tuple[int, int]] = set()
        self._awaited: set[tuple[int, int]] = set()
        te_bytes = TE_CUBLAS_BYTES.get(family, TE_CUBLAS_DEFAULT_BYTES)
        self._rotary = Lasting("rotary_table", x.sequence * x.rotary_dim * 4, WORKSPACES)
        self._without_table = {c.index for c in share.chunks} if rotary else set()
        self._after: dict[str, Lasting] = {}
        self._fp8_copies: dict[int, list[Parameter]] = {}
        self._names: dict[int, tuple[Block, frozenset[str]]] = {}
        """By identity of a block, which is kept so that it stays one: the buffers that it makes or frees."""
        if share.num_layers:
            te_cublas = Lasting("te_cublas", te_bytes, WORKSPACES)
            self._after["qkv_norm_output"] = te_cublas
            self._after["input_output"] = te_cublas  # latent attention
            if x.fp8:  # whichever comes first: layers at the ends may be in BF16
                self._after["qkv_norm_row"] = te_cublas
        if experts:
            self._after["expert_fc1_output"] = Lasting("te_grouped_cublas", GROUPED_STREAMS * te_bytes, WORKSPACES)
        if share.post_process:
            self._after["logits"] = Lasting("torch_cublas_forward", torch_bytes, WORKSPACES)
            self._after["head_input_grad"] = Lasting("torch_cublas_backward", torch_bytes, WORKSPACES)
            if x.sequence_parallel:
                self._after["final_norm_output"] = Lasting("global_gather", x.gathered_hidden, WORKSPACES)

    @property
    def done(self) -> bool:
        """Whether everything has been handed out."""
        return not (self._after or self._without_table or self._fp8_copies or self._awaited)

    def await_placeholders(self, parameters: tuple[Parameter, ...]) -> None:
        """These parameters' gradients will be asked for (gradient accumulation fusion)."""
        self._awaited = {(p.num_elements, p.row_size) for p in parameters if p.fused_gradient}

    def rotary_of(self, chunk: int) -> Block | None:
        """The table that a model chunk makes in its first forward: each caches its own."""
        if chunk not in self._without_table:
            return None
        self._without_table.discard(chunk)
        return block_of(self._rotary)

    def expect_fp8_copies(self, parameters: tuple[Parameter, ...], layers: frozenset[int]) -> None:
        """Weights of these layers are quantized at their first use, into copies that later steps overwrite."""
        for layer in layers:
            self._fp8_copies[layer] = [p for p in parameters if p.layer == layer and p.fused_gradient]

    def fp8_copies_of(self, layer: int) -> Block:
        s = Scribe()
        for parameter in self._fp8_copies.pop(layer, ()):
            write_weight_copies(s, self.x, parameter)
        return s.cut("fp8_copies")

    def expect_placeholder(self, parameter: Parameter) -> Block | None:
        """The placeholder that will be returned for this weight's gradient, one for every distinct shape.

        A block if it is made at once (the output layer), else it follows its layer's last buffer.
        """
        shape = (parameter.num_elements, parameter.row_size)
        if not parameter.fused_gradient or shape in self._seen:
            return None
        self._seen.add(shape)
        self._awaited.discard(shape)
        name = f"wgrad_dummy/{parameter.name}/{parameter.layer}"
        lasting = Lasting(name, parameter.num_elements * self.x.element_bytes, WGRAD_DUMMIES)
        trigger = _AFTER_WGRAD.get(parameter.name)
        if trigger is None:
            return block_of(lasting)
        self._after[trigger] = lasting
        return None

    def split(self, block: Block) -> list[tuple[Block, Lasting | None]]:
        """The block in parts, each with the lasting buffer that follows it."""
        parts: list[tuple[Block, Lasting | None]] = []
        while self._after:
            if self._after.keys().isdisjoint(self._names_of(block)):
                break
            trigger = next(op.name for op in block.ops if op.name in self._after)
            head, block = block.split_after(trigger)
            lasting = self._after.pop(trigger)
            if lasting in self._after.values():
                self._after = {name: other for name, other in self._after.items() if other is not lasting}
            parts.append((head, lasting))
        parts.append((block, None))
        return parts

    def _names_of(self, block: Block) -> frozenset[str]:
        known = self._names.get(id(block))
        if known is None:
            known = self._names[id(block)] = (block, frozenset(op.name for op in block.ops))
        return known[1]

    def remaining(self, parameters: tuple[Parameter, ...], placeholders: bool) -> Block:
        """Everything at once: what a first iteration would have left behind."""
        s = Scribe()
        for chunk in sorted(self._without_table):
            s.alloc(f"rotary_table/{chunk}", *self._rotary[1:])
        self._without_table.clear()
        immediate = [self.expect_placeholder(p) for p in parameters] if placeholders else []
        for layer in list(self._fp8_copies):
            immediate.append(self.fp8_copies_of(layer))
        for lasting in dict.fromkeys(self._after.values()):
            s.alloc(*lasting)
        self._after.clear()
        ops = tuple(op for block in immediate if block for op in block.ops)
        return Block("first_use", (*s.cut("first_use").ops, *ops))


def block_of(lasting: Lasting) -> Block:
    s = Scribe()
    s.alloc(*lasting)
    return s.cut(lasting.name)
