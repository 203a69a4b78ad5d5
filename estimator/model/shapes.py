"""Sizes of one rank's tensors for one microbatch.

Letters: b micro batch, s sequence, h hidden, a heads, g query groups, d head size, f FFN, V vocabulary, t TP, c CP.
"""

from __future__ import annotations

from dataclasses import dataclass

from estimator.job.settings import DTYPE_BYTES, Settings


@dataclass(frozen=True, slots=True)
class Shapes:
    """Element counts and widths from which every buffer of a layer is sized. Bytes are e * elements."""

    element_bytes: int
    micro_batch_size: int
    tokens: int
    """b s / c: tokens that attention and the vocabulary see on this rank."""
    hidden_tokens: int
    """Rows of the hidden states between layers: tokens / t with sequence parallelism, else tokens."""
    full_tokens: int
    """b s: what the data loader puts on the GPU before context parallelism slices it."""
    hidden_size: int
    ffn_size: int
    """f / t."""
    num_heads: int
    """a / t."""
    num_query_groups: int
    """max(1, g / t)."""
    head_dim: int
    vocab_size: int
    """V / t."""
    sequence_parallel: bool
    tensor_parallel: int
    rotary_dim: int
    sequence: int
    """s / c."""
    context_parallel: int = 1
    fp8: str | None = None
    """FP8 recipe of the linear layers (None: the compute dtype)."""
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1
    expert_rows: int = 0
    """Rows that the experts of this rank compute; more than the mean on the fullest rank."""
    fp8_transposes: bool = True
    """Whether products read a transposed copy where another layout is needed: GPUs before Blackwell, and scales by
    block."""

    @property
    def hidden(self) -> int:
        """Bytes of the hidden states between layers, [s/c/t, b, h] with sequence parallelism."""
        return self.hidden_tokens * self.hidden_size * self.element_bytes

    @property
    def gathered_hidden(self) -> int:
        """Bytes of the hidden states with the whole sequence of this context-parallel rank, [s/c, b, h]."""
        return self.tokens * self.hidden_size * self.element_bytes

    @property
    def query(self) -> int:
        return self.tokens * self.num_heads * self.head_dim * self.element_bytes

    @property
    def key(self) -> int:
        """Bytes of the keys (the values have the same)."""
        return self.tokens * self.num_query_groups * self.head_dim * self.element_bytes

    @property
    def ffn(self) -> int:
        """Bytes of one [s/c, b, f/t] tensor; gated layers make fc1's output twice this."""
        return self.tokens * self.ffn_size * self.element_bytes

    @property
    def logits(self) -> int:
        """Bytes of the logits in the compute dtype, [s/c, b, V/t]."""
        return self.tokens * self.vocab_size * self.element_bytes


def shapes_of(settings: Settings, gpu_family: str = "hopper") -> Shapes:
    """Per-rank sizes; expects divisibility (checked by the rules before).

    From Blackwell on FP8 products with one scale a tensor read either layout (TE 2.12 pytorch/utils.py
    is_non_tn_fp8_gemm_supported); this was read, never measured.
    """
    m, p = settings.model, settings.parallel
    t, c, b = p.tensor_model_parallel_size, p.context_parallel_size, settings.batch.micro_batch_size
    tokens = b * m.seq_length // c
    sp = p.sequence_parallel and t > 1
    expert_rows = 0
    if m.moe:
        etp, hidden_tokens = p.expert_tensor_parallel_size, tokens // t if sp else tokens
        expert_rows = hidden_tokens * m.moe.topk * etp
        if p.expert_model_parallel_size > 1:
            expert_rows = int(expert_rows * settings.moe_load_imbalance)
    return Shapes(
        element_bytes=DTYPE_BYTES[settings.runtime.params_dtype],
        micro_batch_size=b,
        tokens=tokens,
        hidden_tokens=tokens // t if sp else tokens,
        full_tokens=b * m.seq_length,
        hidden_size=m.hidden_size,
        ffn_size=m.ffn_hidden_size // t,
        num_heads=max(1, m.num_attention_heads // t),
        num_query_groups=max(1, m.num_query_groups // t),
        head_dim=m.kv_channels,
        vocab_size=m.vocab_size // t,
        sequence_parallel=sp,
        tensor_parallel=t,
        rotary_dim=m.mla.qk_pos_emb_head_dim if m.mla else int(m.kv_channels * m.rotary_percent),
        sequence=m.seq_length // c,
        context_parallel=c,
        expert_parallel=p.expert_model_parallel_size,
        expert_tensor_parallel=p.expert_tensor_parallel_size,
        expert_rows=expert_rows,
        fp8=m.fp8.recipe if m.fp8 else None,
        fp8_transposes=bool(m.fp8 and m.fp8.recipe == "blockwise") or not gpu_family.startswith("blackwell"),
    )
