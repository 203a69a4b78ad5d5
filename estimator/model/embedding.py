"""Token (and position) embedding. Source: megatron-core 0.19.2
models/common/embeddings/language_model_embedding.py:100-150,
torch 2.11 aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu (sorted backward, partial segments of 10 rows)."""

from __future__ import annotations

from functools import lru_cache

from estimator.components import ACTIVATION_GRADIENTS, RESIDUAL, WEIGHT_GRADIENTS
from estimator.job.settings import ModelSettings
from estimator.model.program import GradReady, Program, Step
from estimator.model.shapes import Shapes
from estimator.timeline import SIDE, Scribe

_ROWS_PER_PARTIAL = 10
_INDEX_BYTES = 8


@lru_cache(maxsize=512)
def embedding_program(
    model: ModelSettings, x: Shapes, tied: bool, fused_wgrad: bool, joins_prediction: bool = False
) -> Program:
    """Forward leaves ``output``; backward turns ``^grad`` into the dense gradient of the embedding table.

    ``joins_prediction``: multi-token prediction on this stage has left a gradient of the same table.
    """
    s = Scribe()
    write_embedding(s, model, x)
    forward = s.cut("embedding.forward")
    s.live.clear()
    s.assume("^grad", x.hidden, ACTIVATION_GRADIENTS)
    if model.hidden_dropout > 0:
        s.assume("mask", x.hidden // x.element_bytes, RESIDUAL)
        s.alloc("undropped", x.hidden, ACTIVATION_GRADIENTS)
        s.free("^grad", "mask")
        s.rename("undropped", "^grad")
    steps: list[Step] = []
    if x.sequence_parallel:
        s.alloc("gathered", x.gathered_hidden, ACTIVATION_GRADIENTS)
        s.free("^grad")
        s.rename("gathered", "^grad")
    if model.position_embedding_type == "learned_absolute":
        write_table_backward(s, x, "position_grad", model.seq_length)
        steps += [s.cut("positions.backward"), GradReady("position_embeddings", "position_grad")]
        s.free("position_grad")
    write_table_backward(s, x, "word_grad", x.vocab_size)
    s.free("^grad")
    if tied and not fused_wgrad:
        s.assume("^tied_wgrad", table_bytes(x), WEIGHT_GRADIENTS)
    if tied:
        s.alloc("word_grad_sum", table_bytes(x), WEIGHT_GRADIENTS, SIDE)
        s.free("word_grad", *(["^tied_wgrad"] if not fused_wgrad else []))
        s.rename("word_grad_sum", "word_grad")
    if joins_prediction:
        s.assume("^mtp_word_grad", table_bytes(x), WEIGHT_GRADIENTS)
        s.free("^mtp_word_grad")
    steps += [s.cut("embedding.backward"), GradReady("word_embeddings", "word_grad")]
    s.free("word_grad")
    steps.append(s.cut("embedding.end"))
    return Program(forward, tuple(steps))


def table_bytes(x: Shapes) -> int:
    return x.vocab_size * x.hidden_size * x.element_bytes


def write_embedding(s: Scribe, model: ModelSettings, x: Shapes) -> None:
    s.alloc("words", x.gathered_hidden, RESIDUAL)
    current = "words"
    if model.position_embedding_type == "learned_absolute":
        s.alloc("positions", x.gathered_hidden, RESIDUAL)
        s.alloc("sum", x.gathered_hidden, RESIDUAL)
        s.free("words", "positions")
        current = "sum"
    if x.micro_batch_size > 1:
        s.alloc("transposed", x.gathered_hidden, RESIDUAL)
        s.free(current)
        current = "transposed"
    if x.sequence_parallel:
        s.alloc("scattered", x.hidden, RESIDUAL)
        s.free(current)
        s.alloc("output", x.hidden, RESIDUAL)
        s.free("scattered")
    else:
        s.rename(current, "output")
    if model.hidden_dropout > 0:
        s.alloc("mask", x.hidden // x.element_bytes, RESIDUAL)
        s.alloc("dropped", x.hidden, RESIDUAL)
        s.free("output")
        s.rename("dropped", "output")


def write_table_backward(s: Scribe, x: Shapes, name: str, rows: int) -> None:
    """Sorted indices, the dense gradient, then FP32 sums of partial segments: (n // 10 + min(n, rows)) x h."""
    n = x.tokens
    for i in range(2):
        s.alloc(f"sorted{i}", n * _INDEX_BYTES, ACTIVATION_GRADIENTS)
    s.alloc(name, rows * x.hidden_size * x.element_bytes, WEIGHT_GRADIENTS)
    for i in range(2, 5):
        s.alloc(f"sorted{i}", n * _INDEX_BYTES, ACTIVATION_GRADIENTS)
    segments = n // _ROWS_PER_PARTIAL + min(n, rows)
    s.transient("partial_sums", segments * x.hidden_size * 4, ACTIVATION_GRADIENTS)
    s.free(*(f"sorted{i}" for i in range(5)))
