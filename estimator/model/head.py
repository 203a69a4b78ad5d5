"""Final norm, output layer and cross entropy.

Three cross entropies (megatron-core 0.19.2): Transformer Engine's works in place on the logits (fusions none,
extensions/transformer_engine.py te_parallel_cross_entropy); the native fused one keeps an FP32 copy and needs a second
for a moment, in forward and in backward (fusions/fused_cross_entropy.py); the unfused one keeps an FP32 copy
(tensor_parallel/cross_entropy.py). Sequences as torch's memory history shows them on an H200.
"""

from __future__ import annotations

from functools import lru_cache

from estimator.components import ACTIVATION_GRADIENTS, LOGITS, NORMS, WEIGHT_GRADIENTS
from estimator.job.settings import ModelSettings
from estimator.model.norms import backward_workspace, free_statistics, write_statistics
from estimator.model.program import GradReady, NeedsMainGrad, Program, Step
from estimator.model.shapes import Shapes
from estimator.timeline import Scribe


def cross_entropy_kind(model: ModelSettings) -> str:
    """ "te", "native" or "unfused"."""
    if not model.cross_entropy_loss_fusion:
        return "unfused"
    return "te" if model.cross_entropy_fusion_impl == "te" else "native"


@lru_cache(maxsize=512)
def head_program(model: ModelSettings, x: Shapes, tied_on_one_stage: bool, fused_wgrad: bool) -> Program:
    """Forward from ``prev/output`` to the loss; backward from the loss to ``^grad``."""
    kind = cross_entropy_kind(model)
    s = Scribe()
    write_statistics(s, "final_norm", x.hidden_tokens, model.normalization)
    s.alloc("final_norm_output", x.hidden, NORMS)
    s.alloc("logits", x.logits, LOGITS)
    write_loss_forward(s, x, kind)
    forward = s.cut("head.forward")

    s.assume("prev/output", x.hidden, "activations_residual")
    steps: list[Step] = []
    grad = write_loss_backward(s, x, kind)
    s.alloc("head_input_grad", x.gathered_hidden, ACTIVATION_GRADIENTS)
    if x.sequence_parallel:
        s.alloc("head_scattered", x.hidden, ACTIVATION_GRADIENTS)
    weight = "word_embeddings" if tied_on_one_stage else "output_layer"
    wgrad = "^tied_wgrad" if tied_on_one_stage else "output_wgrad"
    if fused_wgrad:
        steps += [s.cut("head.dgrad"), NeedsMainGrad(weight)]
    else:
        s.alloc(wgrad, x.vocab_size * x.hidden_size * x.element_bytes, WEIGHT_GRADIENTS)
    if x.sequence_parallel:
        s.free("head_input_grad")
        s.rename("head_scattered", "head_input_grad")
    s.free(grad, "final_norm_output")
    steps.append(s.cut("head.wgrad"))
    if not tied_on_one_stage:
        steps.append(GradReady("output_layer", None if fused_wgrad else wgrad))
        if not fused_wgrad:
            s.free(wgrad)
    s.alloc("^grad", x.hidden, ACTIVATION_GRADIENTS)
    s.alloc("gamma_grad", x.hidden_size * x.element_bytes, WEIGHT_GRADIENTS)
    s.transient("final_norm_workspace", backward_workspace(x.hidden_size, model.normalization), NORMS)
    free_statistics(s, "final_norm", model.normalization)
    s.free("head_input_grad", "prev/output")
    steps += [s.cut("head.norm"), GradReady("final_norm_weight", None)]
    s.free("gamma_grad")
    steps.append(s.cut("head.end"))
    return Program(forward, tuple(steps))


def write_loss_forward(s: Scribe, x: Shapes, kind: str) -> None:
    if kind == "te":
        s.alloc("losses", x.tokens * 4, LOGITS)
        s.transient("softmax_parts", x.tokens * 12, LOGITS)
        return
    s.alloc("logits_fp32", x.tokens * x.vocab_size * 4, LOGITS)
    s.alloc("losses", x.tokens * 4, LOGITS)
    if kind == "native":
        s.transient("exponentials", x.tokens * x.vocab_size * 4, LOGITS)
    s.free("logits")


def write_loss_backward(s: Scribe, x: Shapes, kind: str) -> str:
    """Gradient of the logits; returns the name of its buffer."""
    s.free("losses")
    if kind == "te":
        return "logits"
    if kind == "native":
        s.alloc("gradient_fp32", x.tokens * x.vocab_size * 4, LOGITS)
    s.alloc("logits_grad", x.logits, LOGITS)
    if kind == "native":
        s.free("gradient_fp32")
    s.free("logits_fp32")
    return "logits_grad"
