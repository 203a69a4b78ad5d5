"""Composes model, layout, sharding and schedule into the timeline of one rank: building, a first and a steady
iteration.

The first iteration makes what later ones find (workspaces, Adam states), so the second peaks above the first.
Phases: model_build (with wrapping), optimizer_build, first_forward_backward, first_optimizer_step,
steady_forward_backward, steady_optimizer_step.
"""

from __future__ import annotations

from dataclasses import dataclass

from estimator.components import ACTIVATION_GRADIENTS, BATCH, RESIDUAL
from estimator.job.settings import Settings
from estimator.layout import StageShare, stage_shares
from estimator.model.embedding import embedding_program
from estimator.model.head import head_program
from estimator.model.layer import discarded_forward, layer_program
from estimator.model.parameters import Parameter, stage_parameters
from estimator.model.program import GradReady, NeedsMainGrad, Program, Step
from estimator.model.shapes import Shapes, shapes_of
from estimator.schedule import stage_order
from estimator.sharding.base import Stage, Unit
from estimator.sharding.table import strategy_for
from estimator.step.first_use import FirstUse, block_of
from estimator.step.recompute import Chunk, recompute_chunks
from estimator.timeline import Block, Scribe, Timeline, rounded

_BATCH_BYTES_PER_TOKEN = 8 + 8 + 4 + 8
"""Tokens, labels and positions as int64, the loss mask as FP32."""


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """The timeline of one rank, and the states (parameters, main weights, gradients, Adam) it holds after a step."""

    timeline: Timeline
    share: StageShare
    resident_state_bytes: int


def step_timeline(settings: Settings, pipeline_rank: int, gpu_family: str = "hopper") -> StepTimeline:
    """Timeline of data-parallel rank 0 of one pipeline stage."""
    share = stage_shares(settings.model, settings.parallel)[pipeline_rank]
    composer = _Composer(settings, share, gpu_family)
    composer.build()
    composer.iteration("first", first=True)
    composer.iteration("steady", first=False)
    return StepTimeline(composer.timeline, share, composer.strategy.resident_state_bytes())


def steady_peak(settings: Settings, pipeline_rank: int, gpu_family: str = "hopper") -> int:
    """Peak of the steady iteration alone, in bytes: what a search needs of a candidate, at half the time.

    Never above the peak of the whole timeline, and equal to it wherever the steady iteration is the highest.
    """
    share = stage_shares(settings.model, settings.parallel)[pipeline_rank]
    composer = _Composer(settings, share, gpu_family)
    composer.build()
    composer.leave_first_iteration()
    composer.iteration("steady", first=False)
    return max(phase.peak_bytes for phase in composer.timeline.phases()[-2:])


class _Composer:
    def __init__(self, settings: Settings, share: StageShare, gpu_family: str) -> None:
        self.settings, self.share, self.gpu_family = settings, share, gpu_family
        self.x: Shapes = shapes_of(settings)
        model = settings.model
        parameters = stage_parameters(
            model,
            settings.parallel.tensor_model_parallel_size,
            share.num_layers,
            share.pre_process,
            share.post_process,
        )
        self.by_name: dict[tuple[int | None, str], Parameter] = {(p.layer, p.name): p for p in parameters}
        self.parameters = parameters
        stage = Stage(parameters, share.pipeline_rank, self.x.element_bytes)
        self.strategy = strategy_for(settings, stage)
        self.timeline = Timeline()
        fused = self.strategy.fused_wgrad
        tied = model.share_embeddings_and_output_weights and share.pre_process and share.post_process
        self.chunks: tuple[Chunk, ...] = recompute_chunks(settings.recompute, share.num_layers)
        selective = settings.recompute.recompute_granularity == "selective"
        modules = settings.recompute.recompute_modules if selective else ()
        self.modules = tuple(modules)
        self.programs: dict[tuple[bool, bool, bool], Program] = {}
        self.discarded = discarded_forward(model, self.x) if any(c.recomputed for c in self.chunks) else None
        self.embedding = embedding_program(model, self.x, tied, fused) if share.pre_process else None
        self.head = head_program(model, self.x, tied, fused) if share.post_process else None
        self.hidden = rounded(self.x.hidden)
        rotary = model.position_embedding_type in ("rope", "yarn")
        self.first_use: FirstUse | None = FirstUse(self.x, share, rotary, gpu_family)
        self.kept: dict[str, tuple[object, ...]] = {}
        self.sent_output: tuple[object, ...] = ()
        self._move = self._moves()

    def _layer(self, own_sum: bool = False, keep_output_grad: bool = False, keep_input: bool = False) -> Program:
        kind = (own_sum, keep_output_grad, keep_input)
        program = self.programs.get(kind)
        if program is None:
            program = self.programs[kind] = layer_program(
                self.settings.model,
                self.x,
                recompute_core_attention="core_attn" in self.modules,
                recompute_mlp="mlp" in self.modules,
                fused_wgrad=self.strategy.fused_wgrad,
                out_of_place=own_sum,
                keep_output_grad=keep_output_grad,
                keep_input=keep_input,
            )
        return program

    def _moves(self) -> dict[str, Block]:
        """Blocks of one op, shared by all microbatches."""
        blocks = {}
        for name, buffer, component, size in (
            ("batch", "batch", BATCH, self.x.full_tokens * _BATCH_BYTES_PER_TOKEN),
            ("receive_forward", "output", RESIDUAL, self.hidden),
            ("receive_backward", "^grad", ACTIVATION_GRADIENTS, self.hidden),
            ("release_output_grad", "^kept_output_grad", ACTIVATION_GRADIENTS, self.hidden),
            ("release_input", "^kept_input", RESIDUAL, self.hidden),
            ("release_input_grad", "^kept_input_grad", ACTIVATION_GRADIENTS, self.hidden),
        ):
            s = Scribe()
            s.alloc(buffer, size, component)
            blocks[name] = s.cut(name)
            s.free(buffer)
            blocks[f"{name}.end"] = s.cut(f"{name}.end")
        s = Scribe()
        s.assume("output", self.hidden, RESIDUAL)
        s.free("output")
        blocks["drop_output"] = s.cut("drop_output")
        s.assume("^grad", self.hidden, ACTIVATION_GRADIENTS)
        s.rename("^grad", "^kept_input_grad")
        blocks["keep_input_grad"] = s.cut("keep_input_grad")
        return blocks

    # -- building -------------------------------------------------------------------------------------------------
    def build(self) -> None:
        self.timeline.phase("model_build")
        self.strategy.build_model()
        self._sync("model")
        self.strategy.wrap()
        self._sync("wrap")
        self.timeline.phase("optimizer_build")
        self.strategy.build_optimizer()
        self._sync("optimizer")

    def _sync(self, name: str) -> None:
        """Runs what the strategy has written."""
        if self.strategy.s.has_ops:
            self.timeline.run(self.strategy.cut(name))

    # -- one iteration --------------------------------------------------------------------------------------------
    def iteration(self, name: str, first: bool) -> None:
        settings = self.settings
        self.timeline.phase(f"{name}_forward_backward")
        self.strategy.zero_grad()
        self._sync("zero_grad")
        order = stage_order(
            settings.parallel.pipeline_model_parallel_size, self.share.pipeline_rank, settings.num_microbatches
        )
        for step, following in zip(order, (*order[1:], None), strict=True):
            scope = (name, step.microbatch)
            if step.kind == "F":
                self.forward(scope, first_receive=step is order[0])
                if following is None or following.kind == "F":
                    self._drop_sent_output()
            else:
                self.backward(scope, step.is_last)
                self.first_use = None
        self._release_kept("output_grad")
        self.strategy.finish_gradients()
        self._sync("finish_gradients")
        self.timeline.phase(f"{name}_optimizer_step")
        self.strategy.optimizer_step(first)
        self._sync("optimizer_step")

    def leave_first_iteration(self) -> None:
        """What a first iteration leaves behind, without running it: lasting buffers, optimizer states."""
        if self.first_use:
            self.timeline.run(self.first_use.remaining(self.parameters, self.strategy.fused_wgrad))
            self.first_use = None
        self.strategy.begin_backward()
        self.strategy.finish_gradients()
        self.strategy.optimizer_step(first=True)
        self._sync("first_iteration")

    def forward(self, scope: tuple[object, ...], first_receive: bool) -> None:
        run, strategy = self.timeline.run, self.strategy
        if self.share.pre_process or self.share.post_process:
            run(self._move["batch"], scope)
        if self.embedding:
            strategy.before_forward("embedding")
            self._sync("gather")
            run(self.embedding.forward, (*scope, -1))
        else:
            run(self._move["receive_forward"], (*scope, -1))
            self._release_kept("input")
            if first_receive:
                self._release_kept("input_grad")
        if self.first_use and self.first_use.rotary:
            run(block_of(self.first_use.rotary))
            self.first_use.rotary = None
        for chunk in self.chunks:
            for layer in chunk.layers:
                strategy.before_forward(layer)
                self._sync("gather")
                if chunk.recomputed and self.discarded:
                    self._run(self.discarded, (*scope, layer))
                    if layer != chunk.layers[0]:
                        run(self._move["drop_output"], (*scope, layer - 1))
                else:
                    self._run(self._layer().forward, (*scope, layer))
                strategy.after_forward(layer)
                self._sync("release")
        last = self.share.num_layers
        if self.head:
            strategy.before_forward("head")
            self._sync("gather")
            self._run(self.head.forward, (*scope, last))
        else:
            self.sent_output = (*scope, last - 1)

    def _drop_sent_output(self) -> None:
        """The output was sent on: the schedule lets go of it, after a gradient to receive has its buffer."""
        if self.sent_output:
            self.timeline.run(self._move["drop_output"], self.sent_output)
            self.sent_output = ()

    def backward(self, scope: tuple[object, ...], is_last: bool) -> None:
        run, strategy = self.timeline.run, self.strategy
        if not self.head:
            run(self._move["receive_backward"], scope)
            self._drop_sent_output()
            self._release_kept("output_grad")
        strategy.begin_backward()
        if self.head:
            self._steps(self.head, "head", (*scope, self.share.num_layers))
        top = self.share.num_layers - 1
        for chunk in reversed(self.chunks):
            if chunk.recomputed:
                for layer in chunk.layers:
                    strategy.before_recompute(layer)
                    self._sync("gather")
                    run(self._layer().forward, (*scope, layer))
                    strategy.after_recompute(layer)
            for layer in reversed(chunk.layers):
                strategy.before_backward(layer)
                self._sync("gather")
                own_sum = (
                    strategy.out_of_place_residual or layer == top or (chunk.recomputed and layer == chunk.layers[-1])
                )
                keep_grad, keep_input = layer == top and not self.head, layer == 0 and not self.embedding
                self._steps(self._layer(own_sum, keep_grad, keep_input), layer, (*scope, layer))
                if keep_grad:
                    self._keep("output_grad", scope)
                strategy.after_backward(layer)
                self._sync("release")
            if chunk.recomputed:
                run(self._move["drop_output"], (*scope, chunk.layers[-1]))
        if self.embedding:
            self._steps(self.embedding, "embedding", (*scope, -1))
        else:
            self._release_kept("input_grad")
            run(self._move["keep_input_grad"], scope)
            self._keep("input_grad", scope)
            self._keep("input", scope)
        strategy.end_backward(is_last)
        self._sync("reduce")
        if self.share.pre_process or self.share.post_process:
            run(self._move["batch.end"], scope)

    def _keep(self, name: str, scope: tuple[object, ...]) -> None:
        """What the schedule still refers to after it was sent or used: until the next one of its kind is there."""
        self._release_kept(name)
        self.kept[name] = scope

    def _release_kept(self, name: str) -> None:
        if name in self.kept:
            self.timeline.run(self._move[f"release_{name}.end"], self.kept.pop(name))

    def _run(self, block: Block, scope: tuple[object, ...]) -> None:
        """Runs a block; in the first iteration with the lasting buffers where they are first used."""
        if not self.first_use:
            self.timeline.run(block, scope)
            return
        for part, lasting in self.first_use.split(block):
            self.timeline.run(part, scope)
            if lasting:
                self.timeline.run(block_of(lasting))

    def _steps(self, program: Program, unit: Unit, scope: tuple[object, ...]) -> None:
        if not (self.strategy.acts_in_backward or self.first_use):
            self.timeline.run(program.whole_backward, scope)
            return
        layer = unit if isinstance(unit, int) else None
        for step in program.backward:
            self._step(step, layer, scope)

    def _step(self, step: Step, layer: int | None, scope: tuple[object, ...]) -> None:
        if isinstance(step, Block):
            self._run(step, scope)
            return
        parameter = self.by_name[layer, step.parameter]
        if isinstance(step, NeedsMainGrad):
            self.strategy.needs_main_grad(parameter)
            self._sync("gradient")
            if not self.first_use:
                return
            placeholder = self.first_use.expect_placeholder(parameter)
            if placeholder:
                self.timeline.run(placeholder)
        elif isinstance(step, GradReady):
            self.strategy.grad_ready(parameter)
        self._sync("gradient")
