"""The last stage with multi-token prediction: final norm, prediction layers, a loss for each depth and the main one.

Read in megatron-core 0.19.2: transformer/multi_token_prediction.py:1030-1330 (a depth embeds the shifted tokens, norms
them and the hidden states before, joins both, projects, runs a layer like the decoder's last and a norm), :1700-1790
(all hidden states joined along the sequence), :760-900 (their losses come before the main one, so that all logits live
at once; the main loss's backward begins), models/gpt/gpt_model.py:160-250. Not measured
alone; whole steps are held against real runs (tests/estimator/test_real_expert_runs.py). Each depth's parameters have
names that begin with ``mtp{i}/``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

from estimator.components import ACTIVATION_GRADIENTS, LOGITS, NORMS, RESIDUAL, WEIGHT_GRADIENTS
from estimator.job.settings import ModelSettings
from estimator.model.embedding import table_bytes, write_embedding, write_table_backward
from estimator.model.head import cross_entropy_kind, write_loss_backward, write_loss_forward
from estimator.model.layer import discarded_forward, layer_program
from estimator.model.norms import free_statistics, write_statistics
from estimator.model.products import Product, write_norm_backward
from estimator.model.program import GradReady, NeedsMainGrad, Program, Step
from estimator.model.shapes import Shapes
from estimator.timeline import Block, Op, Scribe

T = TypeVar("T")


@lru_cache(maxsize=256)
def prediction_program(
    model: ModelSettings,
    x: Shapes,
    fused_wgrad: bool,
    modules: tuple[str, ...],
    recomputed: bool,
    with_embedding: bool,
) -> Program:
    """Forward from ``prev/output`` to the losses; backward to ``^grad``.

    ``recomputed``: full recompute checkpoints each depth (uniform method). ``with_embedding``: the stage embeds the
    input too, whose gradient waits for the one from here, ``^mtp_word_grad``.
    """
    return _Writer(model, x, fused_wgrad, modules, recomputed, with_embedding).program()


class _Writer:
    def __init__(
        self,
        model: ModelSettings,
        x: Shapes,
        fused_wgrad: bool,
        modules: tuple[str, ...],
        recomputed: bool,
        with_embedding: bool,
    ) -> None:
        self.model, self.x, self.fused_wgrad = model, x, fused_wgrad
        self.recomputed, self.with_embedding = recomputed, with_embedding
        self.kind = cross_entropy_kind(model)
        experts = model.has_experts(model.num_layers - 1)
        self.layer = layer_program(
            model, x, modules=modules, fused_wgrad=fused_wgrad, out_of_place=True, experts=experts
        )
        self.discarded = discarded_forward(model, x, experts)
        self.s = Scribe()
        self.depths = range(model.mtp_num_layers)

    def program(self) -> Program:
        s, x = self.s, self.x
        self._norm_forward("final_norm", "final_norm_output")
        ops = list(s.cut("norm").ops)
        for i in self.depths:
            ops += self._depth_forward(i, keep=not self.recomputed)
        s.alloc("all_hidden", x.hidden * (len(self.depths) + 1), RESIDUAL)
        s.free(f"mtp{len(self.depths) - 1}/normed")  # no later norm has saved it
        for name in self._losses:
            s.alloc(f"{name}logits", x.logits, LOGITS)
            self._renamed(write_loss_forward, name)
        ops += s.cut("losses").ops
        forward = Block("head.forward", tuple(ops))
        s.live.clear()
        s.assume("prev/output", x.hidden, RESIDUAL)
        return Program(forward, tuple(step for step in self._backward() if not isinstance(step, Block) or step.ops))

    @property
    def _losses(self) -> list[str]:
        """Names' beginnings, in forward order: the main loss is last."""
        return [*(f"loss{i}/" for i in self.depths), "main/"]

    # -- forward --------------------------------------------------------------------------------------------------
    def _norm_forward(self, name: str, output: str) -> None:
        write_statistics(self.s, name, self.x.hidden_tokens, self.model.normalization)
        self.s.alloc(output, self.x.hidden, NORMS)

    def _source(self, depth: int) -> str:
        return f"mtp{depth - 1}/normed" if depth else "final_norm_output"

    def _projection(self, depth: int) -> Product:
        width = self.x.hidden_size // self.x.tensor_parallel
        name = f"mtp{depth}/eh"
        return Product(name, f"mtp{depth}/eh_proj", 2 * self.x.hidden_size, width, "column", RESIDUAL)

    def _depth_forward(self, i: int, keep: bool) -> list[Op]:
        s, x = self.s, self.x
        own = Scribe()
        write_embedding(own, self.model, x)
        ops = _translated(own.cut("embed"), f"mtp{i}/embed/")
        if keep:
            return ops + self._inner_forward(i)
        self._enter(i, keep=False)
        ops += s.cut("enter").ops
        ops += _translated(self.discarded, f"mtp{i}/")
        s.assume(f"mtp{i}/output", x.hidden, RESIDUAL)
        s.free(f"mtp{i}/input")
        self._norm_forward(f"mtp{i}/final", f"mtp{i}/normed")
        free_statistics(s, f"mtp{i}/final", self.model.normalization)
        s.free(f"mtp{i}/output")
        return ops + list(s.cut("leave").ops)

    def _inner_forward(self, i: int) -> list[Op]:
        s, x = self.s, self.x
        self._enter(i, keep=True)
        ops = list(s.cut("enter").ops)
        ops += _translated(self.layer.forward, f"mtp{i}/")
        s.assume(f"mtp{i}/output", x.hidden, RESIDUAL)
        self._norm_forward(f"mtp{i}/final", f"mtp{i}/normed")
        return ops + list(s.cut("leave").ops)

    def _enter(self, i: int, keep: bool) -> None:
        """Both norms, their outputs joined, the projection: to ``mtp{i}/input`` of the layer."""
        s, x, m = self.s, self.x, self.model
        self._norm_forward(f"mtp{i}/enorm", f"mtp{i}/enorm_output")
        self._norm_forward(f"mtp{i}/hnorm", f"mtp{i}/hnorm_output")
        s.alloc(f"mtp{i}/joined", 2 * x.hidden, RESIDUAL)
        s.free(f"mtp{i}/hnorm_output")
        projection = self._projection(i)
        projection.forward(s, x, m, keep)
        output = f"{projection.name}_output"
        if x.tensor_parallel > 1:
            s.alloc("gathered", x.gathered_hidden, RESIDUAL)
            s.free(output)
            if x.sequence_parallel:
                s.alloc(f"mtp{i}/input", x.hidden, RESIDUAL)
                s.free("gathered")
            else:
                s.rename("gathered", f"mtp{i}/input")
        else:
            s.rename(output, f"mtp{i}/input")
        s.free(f"mtp{i}/enorm_output")
        if not keep:
            s.free(f"mtp{i}/joined")
            for norm in ("enorm", "hnorm"):
                free_statistics(s, f"mtp{i}/{norm}", m.normalization)

    # -- backward -------------------------------------------------------------------------------------------------
    def _backward(self) -> list[Step]:
        s, x = self.s, self.x
        self._assume_saved()
        steps: list[Step] = []
        for name in reversed(self._losses):
            steps += self._loss_backward(name)
        s.alloc("all_grad", x.hidden * len(self._losses), ACTIVATION_GRADIENTS)
        s.free(*(f"{name}hidden_grad" for name in self._losses), "all_hidden")
        steps.append(s.cut("losses.backward"))
        for i in reversed(self.depths):
            steps += self._depth_backward(i)
        s.alloc("final_grad", x.hidden, ACTIVATION_GRADIENTS)
        s.free("all_grad", "^grad")
        steps += self._final_norm_backward()
        return steps

    def _assume_saved(self) -> None:
        """What forward has left, so that backward can free it."""
        s, x, m = self.s, self.x, self.model
        mean = ("mean", "rstd") if m.normalization == "LayerNorm" else ("rstd",)
        norms = ["final_norm"]
        buffers = {"final_norm_output": x.hidden, "all_hidden": x.hidden * len(self._losses)}
        for i in self.depths:
            buffers[f"mtp{i}/embed/output"] = x.hidden
            if i:
                buffers[f"mtp{i - 1}/normed"] = x.hidden
            if m.hidden_dropout > 0:
                buffers[f"mtp{i}/embed/mask"] = x.hidden // x.element_bytes
            if not self.recomputed:
                buffers[f"mtp{i}/joined"] = 2 * x.hidden
                buffers[f"mtp{i}/output"] = x.hidden
                norms += [f"mtp{i}/{norm}" for norm in ("enorm", "hnorm", "final")]
        for name, size in buffers.items():
            s.assume(name, size, RESIDUAL if "normed" not in name and "norm_output" not in name else NORMS)
        for norm in norms:
            for statistic in mean:
                s.assume(f"{norm}.{statistic}", x.hidden_tokens * 4, NORMS)
        for name in self._losses:
            own = Scribe()
            own.alloc("logits", x.logits, LOGITS)
            write_loss_forward(own, x, self.kind)
            for buffer in own.live.values():
                s.assume(f"{name}{buffer.name}", buffer.num_bytes, LOGITS)

    def _renamed(self, write: Callable[[Scribe, Shapes, str], T], name: str) -> T:
        """Runs a writer of the plain head on this loss's buffers."""
        s, own = self.s, Scribe()
        for key in [key for key in s.live if key.startswith(name)]:
            own.live[key.removeprefix(name)] = s.live.pop(key)
        result = write(own, self.x, self.kind)
        s.adopt(_translated(own.cut("part"), name))
        for key, buffer in own.live.items():
            s.live[f"{name}{key}"] = buffer._replace(name=f"{name}{key}")
        return result

    def _loss_backward(self, name: str) -> list[Step]:
        """As the plain head's, to ``{name}hidden_grad``."""
        s, x, steps = self.s, self.x, list[Step]()
        grad = name + self._renamed(write_loss_backward, name)
        s.alloc("head_input_grad", x.gathered_hidden, ACTIVATION_GRADIENTS)
        target = "head_input_grad"
        if x.sequence_parallel:
            s.alloc(f"{name}hidden_grad", x.hidden, ACTIVATION_GRADIENTS)
        if self.fused_wgrad:
            steps += [s.cut("head.dgrad"), NeedsMainGrad("output_layer")]
        elif name == "main/":
            s.alloc("output_wgrad", table_bytes(x), WEIGHT_GRADIENTS)
        else:
            s.transient("output_wgrad_part", table_bytes(x), WEIGHT_GRADIENTS)
        if x.sequence_parallel:
            s.free(target)
        else:
            s.rename(target, f"{name}hidden_grad")
        s.free(grad)
        steps.append(s.cut("head.wgrad"))
        if name == self._losses[0]:
            steps.append(GradReady("output_layer", None if self.fused_wgrad else "output_wgrad"))
            if not self.fused_wgrad:
                s.free("output_wgrad")
        return steps

    def _norm_backward(self, norm: str, parameter: str, grad: str | None, saved: str | None) -> list[Step]:
        """A norm's backward to ``{norm}_input_grad``."""
        s = self.s
        stats = {f"{norm}.{k}": f"{norm}_norm.{k}" for k in ("mean", "rstd") if f"{norm}.{k}" in s.live}
        for old, new in stats.items():
            s.rename(old, new)
        write_norm_backward(s, self.x, self.model, norm, self.x.hidden_tokens, self.x.hidden_size)
        s.free(*(name for name in (grad, saved) if name))
        steps: list[Step] = [s.cut(f"{norm}.backward"), GradReady(parameter, None)]
        s.free(f"{norm}_gamma_grad")
        return steps

    def _depth_backward(self, i: int) -> list[Step]:
        """From ``^grad`` of the depth after (none at the last) and this depth's part of ``all_grad`` to ``^grad``."""
        s, x, steps = self.s, self.x, list[Step]()
        if self.recomputed:
            steps.append(Block("recompute", tuple(self._inner_forward(i))))
            s.free(f"mtp{i}/normed")
        if "^grad" in s.live:
            s.free("^grad")
        steps += self._norm_backward(f"mtp{i}/final", f"mtp{i}/final_norm_weight", None, f"mtp{i}/output")
        s.rename(f"mtp{i}/final_input_grad", "^grad")
        steps.append(s.cut("final.end"))
        steps += _translated_steps(self.layer.backward, f"mtp{i}/")
        grad = "^grad"
        if x.sequence_parallel:
            s.alloc("gathered_grad", x.gathered_hidden, ACTIVATION_GRADIENTS)
            s.free("^grad")
            grad = "gathered_grad"
        if x.tensor_parallel > 1:
            s.alloc("own_columns", x.gathered_hidden // x.tensor_parallel, ACTIVATION_GRADIENTS)
            s.free(grad)
            grad = "own_columns"
        projection = self._projection(i)
        steps += projection.backward(s, x, self.model, self.fused_wgrad, grad, f"mtp{i}/joined")
        for name in ("hidden", "embedded"):
            s.alloc(f"{name}_part", x.hidden, ACTIVATION_GRADIENTS)
        s.free(f"{projection.name}_input_grad")
        source = self._source(i)
        steps += self._norm_backward(f"mtp{i}/hnorm", f"mtp{i}/hnorm_weight", "hidden_part", source)
        steps += self._norm_backward(f"mtp{i}/enorm", f"mtp{i}/enorm_weight", "embedded_part", f"mtp{i}/embed/output")
        s.rename(f"mtp{i}/hnorm_input_grad", "^grad")
        return steps + self._embedding_backward(i)

    def _embedding_backward(self, i: int) -> list[Step]:
        s, x = self.s, self.x
        grad = f"mtp{i}/enorm_input_grad"
        if self.model.hidden_dropout > 0:
            s.alloc("undropped", x.hidden, ACTIVATION_GRADIENTS)
            s.free(grad, f"mtp{i}/embed/mask")
            grad = "undropped"
        if x.sequence_parallel:
            s.alloc("tokens_grad", x.gathered_hidden, ACTIVATION_GRADIENTS)
            s.free(grad)
            grad = "tokens_grad"
        waiting = "^mtp_word_grad"
        name = "word_grad" if waiting in s.live else waiting
        write_table_backward(s, x, name, x.vocab_size)
        s.free(grad, *(["word_grad"] if name == "word_grad" else []))
        steps: list[Step] = [s.cut("embedding.backward")]
        if i == 0 and not self.with_embedding:
            steps.append(GradReady("word_embeddings", waiting))
            s.free(waiting)
        return steps

    def _final_norm_backward(self) -> list[Step]:
        s = self.s
        steps = self._norm_backward("final_norm", "final_norm_weight", "final_grad", "prev/output")
        s.rename("final_norm_input_grad", "^grad")
        steps.append(s.cut("head.end"))
        return steps


def _translated(block: Block, prefix: str) -> list[Op]:
    """Ops of a layer as part of the head: its input and output are buffers of the head's own."""
    return [op._replace(name=_name(op.name, prefix)) for op in block.ops]


def _name(name: str, prefix: str) -> str:
    if ">" in name:
        old, _, new = name.partition(">")
        return f"{_name(old, prefix)}>{_name(new, prefix)}"
    if name.startswith("^"):
        return name
    return f"{prefix}input" if name == "prev/output" else prefix + name


def _translated_steps(steps: tuple[Step, ...], prefix: str) -> list[Step]:
    translated: list[Step] = []
    for step in steps:
        if isinstance(step, Block):
            translated.append(Block(step.name, tuple(_translated(step, prefix))))
        elif isinstance(step, NeedsMainGrad):
            translated.append(NeedsMainGrad(prefix + step.parameter))
        else:
            buffer = None if step.buffer is None else _name(step.buffer, prefix)
            translated.append(GradReady(prefix + step.parameter, buffer))
    return translated
