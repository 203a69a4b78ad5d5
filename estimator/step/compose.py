"""Composes model, layout, sharding and schedule into the timeline of one rank: building, a first and a steady
iteration.

The first iteration makes what later ones find (workspaces, Adam states), so the second peaks above the first.
Phases: model_build (with wrapping), optimizer_build, first_forward_backward, first_optimizer_step,
steady_forward_backward, steady_optimizer_step.
"""

from __future__ import annotations

from dataclasses import dataclass

from estimator.components import ACTIVATION_GRADIENTS, BATCH, PIPELINE, RESIDUAL, WGRAD_DUMMIES
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
from estimator.step.recompute import Chunk, recompute_chunks
from estimator.step.workspaces import wgrad_dummy_bytes, write_backward_workspaces, write_forward_workspaces
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
        self.programs = [
            layer_program(
                model,
                self.x,
                recompute_core_attention="core_attn" in modules,
                recompute_mlp="mlp" in modules,
                fused_wgrad=fused,
                out_of_place=out_of_place,
            )
            for out_of_place in (False, True)
        ]
        self.discarded = discarded_forward(model, self.x) if any(c.recomputed for c in self.chunks) else None
        self.embedding = embedding_program(model, self.x, tied, fused) if share.pre_process else None
        self.head = head_program(model, self.x, tied, fused) if share.post_process else None
        self.hidden = rounded(self.x.hidden)
        self.dummy_shapes: set[tuple[int, int]] = set()
        self.makes_dummies = False
        self.kept: dict[str, tuple[object, ...]] = {}
        self._move = self._moves()

    def _moves(self) -> dict[str, Block]:
        """Blocks of one op, shared by all microbatches."""
        blocks = {}
        for name, buffer, component, size in (
            ("batch", "batch", BATCH, self.x.full_tokens * _BATCH_BYTES_PER_TOKEN),
            ("receive_forward", "output", RESIDUAL, self.hidden),
            ("receive_backward", "^grad", ACTIVATION_GRADIENTS, self.hidden),
            ("keep_output_grad", "kept_output_grad", PIPELINE, self.hidden),
            ("keep_input", "kept_input", PIPELINE, self.hidden),
            ("keep_input_grad", "kept_input_grad", PIPELINE, self.hidden),
        ):
            s = Scribe()
            s.alloc(buffer, size, component)
            blocks[name] = s.cut(name)
            s.free(buffer)
            blocks[f"{name}.end"] = s.cut(f"{name}.end")
        for name, buffer, component in (
            ("drop_output", "output", RESIDUAL),
            ("send_backward", "^grad", ACTIVATION_GRADIENTS),
        ):
            s = Scribe()
            s.alloc(buffer, self.hidden, component)
            s.cut(name)
            s.free(buffer)
            blocks[name] = s.cut(name)
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
        made_forward = made_backward = not first
        for step in order:
            scope = (name, step.microbatch)
            if step.kind == "F":
                self.forward(scope, not made_forward, first_receive=step is order[0])
                made_forward = True
            else:
                self.backward(scope, step.is_last, make_workspaces=not made_backward)
                made_backward = True
        self._release_kept("output_grad")
        self.strategy.finish_gradients()
        self._sync("finish_gradients")
        self.timeline.phase(f"{name}_optimizer_step")
        self.strategy.optimizer_step(first)
        self._sync("optimizer_step")

    def leave_first_iteration(self) -> None:
        """What a first iteration leaves behind, without running it: workspaces, placeholders, optimizer states."""
        self._workspaces(forward=True)
        self._workspaces(forward=False)
        self.makes_dummies = self.strategy.fused_wgrad
        for parameter in self.parameters:
            self._make_dummy(parameter)
        self.strategy.begin_backward()
        self.strategy.finish_gradients()
        self.strategy.optimizer_step(first=True)
        self._sync("first_iteration")

    def forward(self, scope: tuple[object, ...], make_workspaces: bool, first_receive: bool) -> None:
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
        if make_workspaces:
            self._workspaces(forward=True)
        for chunk in self.chunks:
            for layer in chunk.layers:
                strategy.before_forward(layer)
                self._sync("gather")
                if chunk.recomputed and self.discarded:
                    run(self.discarded, (*scope, layer))
                    if layer != chunk.layers[0]:
                        run(self._move["drop_output"], (*scope, layer - 1))
                else:
                    run(self.programs[0].forward, (*scope, layer))
                strategy.after_forward(layer)
                self._sync("release")
        last = self.share.num_layers
        if self.head:
            strategy.before_forward("head")
            self._sync("gather")
            run(self.head.forward, (*scope, last))
        else:
            run(self._move["drop_output"], (*scope, last - 1))

    def backward(self, scope: tuple[object, ...], is_last: bool, make_workspaces: bool) -> None:
        run, strategy = self.timeline.run, self.strategy
        if not self.head:
            run(self._move["receive_backward"], scope)
            self._release_kept("output_grad")
        strategy.begin_backward()
        if make_workspaces:
            self._workspaces(forward=False)
        self.makes_dummies = make_workspaces and strategy.fused_wgrad
        if self.head:
            self._steps(self.head, "head", (*scope, self.share.num_layers))
        top = self.share.num_layers - 1
        for chunk in reversed(self.chunks):
            if chunk.recomputed:
                for layer in chunk.layers:
                    strategy.before_recompute(layer)
                    self._sync("gather")
                    run(self.programs[0].forward, (*scope, layer))
                    strategy.after_recompute(layer)
            for layer in reversed(chunk.layers):
                strategy.before_backward(layer)
                self._sync("gather")
                own_sum = (
                    strategy.out_of_place_residual or layer == top or (chunk.recomputed and layer == chunk.layers[-1])
                )
                self._steps(self.programs[own_sum], layer, (*scope, layer))
                if layer == top and not self.head:
                    self._keep("output_grad", scope)
                strategy.after_backward(layer)
                self._sync("release")
            if chunk.recomputed:
                run(self._move["drop_output"], (*scope, chunk.layers[-1]))
        if self.embedding:
            self._steps(self.embedding, "embedding", (*scope, -1))
        else:
            run(self._move["send_backward"], scope)
            self._keep("input_grad", scope)
            self._keep("input", scope)
        strategy.end_backward(is_last)
        self._sync("reduce")
        if self.share.pre_process or self.share.post_process:
            run(self._move["batch.end"], scope)

    def _keep(self, name: str, scope: tuple[object, ...]) -> None:
        """What the schedule still refers to after it was sent or used: until the next one of its kind is received."""
        self._release_kept(name)
        self.timeline.run(self._move[f"keep_{name}"], scope)
        self.kept[name] = scope

    def _release_kept(self, name: str) -> None:
        if name in self.kept:
            self.timeline.run(self._move[f"keep_{name}.end"], self.kept.pop(name))

    def _steps(self, program: Program, unit: Unit, scope: tuple[object, ...]) -> None:
        if not (self.strategy.acts_in_backward or self.makes_dummies):
            self.timeline.run(program.whole_backward, scope)
            return
        layer = unit if isinstance(unit, int) else None
        for step in program.backward:
            self._step(step, layer, scope)

    def _step(self, step: Step, layer: int | None, scope: tuple[object, ...]) -> None:
        if isinstance(step, Block):
            self.timeline.run(step, scope)
            return
        parameter = self.by_name[layer, step.parameter]
        if isinstance(step, NeedsMainGrad):
            self.strategy.needs_main_grad(parameter)
            self._make_dummy(parameter)
        elif isinstance(step, GradReady):
            self.strategy.grad_ready(parameter)
        self._sync("gradient")

    def _make_dummy(self, parameter: Parameter) -> None:
        if not self.makes_dummies:
            return
        size = wgrad_dummy_bytes(parameter, self.dummy_shapes, self.x.element_bytes)
        if size:
            s = Scribe()
            s.alloc(f"wgrad_dummy/{parameter.name}/{parameter.layer}", size, WGRAD_DUMMIES)
            self.timeline.run(s.cut("wgrad_dummy"))

    def _workspaces(self, forward: bool) -> None:
        s = Scribe()
        if forward:
            rotary = self.settings.model.position_embedding_type in ("rope", "yarn")
            write_forward_workspaces(s, self.x, self.share, rotary, self.gpu_family)
        else:
            write_backward_workspaces(s, self.share, self.gpu_family)
        self.timeline.run(s.cut("workspaces"))
