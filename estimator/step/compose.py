"""Composes model, layout, sharding and schedule into the timeline of one rank: building, a first and a steady
iteration.

The first iteration makes what later ones find (workspaces, Adam states), so the second peaks above the first.
Phases: model_build (with wrapping), optimizer_build, first_forward_backward, first_optimizer_step,
steady_forward_backward, steady_optimizer_step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from estimator.job.settings import BatchSettings, Settings
from estimator.layout import ChunkShare, StageShare, stage_shares
from estimator.model.dispatchers import kept_blocks
from estimator.model.embedding import embedding_program
from estimator.model.head import head_program
from estimator.model.layer import discarded_forward, layer_program
from estimator.model.prediction import prediction_program
from estimator.model.program import GradReady, NeedsMainGrad, Program, Step
from estimator.model.shapes import Shapes, shapes_of
from estimator.schedule import Action, pipeline_order
from estimator.schedule.actions import BACKWARD, DROP, FORWARD, INPUT, OUTPUT, RECEIVE
from estimator.sharding.base import Unit
from estimator.sharding.table import strategy_for
from estimator.step.counting import Counter, CountingScribe, CountingTimeline
from estimator.step.first_use import FirstUse, block_of, torch_cublas_bytes
from estimator.step.model_chunk import (
    ModelChunk,
    by_name,
    in_this_rank,
    layers_in_fp8,
    layers_with_experts,
    stage_of,
    transfer_blocks,
)
from estimator.step.recompute import recompute_chunks
from estimator.timeline import Block, Timeline


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
    """The bytes of :func:`counted_peak`."""
    return counted_peak(settings, pipeline_rank, gpu_family)[0]


def counted_peak(settings: Settings, pipeline_rank: int, gpu_family: str = "hopper") -> tuple[int, int]:
    """Peak of the steady iteration alone, in bytes: what a search needs of a candidate, in a third of the time.

    Without a pipeline of its first microbatch only. Never above the peak of the whole timeline.

    Returns (bytes, work): ``work`` says how much there was to count (:class:`estimator.step.counting.Counter`).
    """
    if settings.parallel.pipeline_model_parallel_size == 1:
        micro = settings.batch.micro_batch_size
        settings = replace(settings, batch=BatchSettings(micro, micro * settings.parallel.data_parallel_size))
    share = stage_shares(settings.model, settings.parallel)[pipeline_rank]
    composer = _CountingComposer(settings, share, gpu_family)
    composer.build()
    composer.leave_first_iteration()
    composer.iteration("steady", first=False)
    return composer.counter.peak, composer.counter.work


class _Composer:
    def __init__(self, settings: Settings, share: StageShare, gpu_family: str) -> None:
        self.settings, self.share, self.gpu_family = settings, share, gpu_family
        self.x: Shapes = shapes_of(settings, gpu_family)
        model = settings.model
        stage = stage_of(model, settings.parallel.weight_split, share, self.x)
        self.parameters = stage.parameters
        self.by_name = by_name(stage)
        self.fp8_layers = layers_in_fp8(model, share)
        self.expert_layers = layers_with_experts(model, share)
        self.strategy = strategy_for(settings, stage)
        self.timeline = Timeline()
        selective = settings.recompute.recompute_granularity == "selective"
        modules = settings.recompute.recompute_modules if selective else ()
        self.modules = tuple(modules)
        self.chunks = [self._chunk(chunk) for chunk in share.chunks]
        self.programs: dict[tuple[bool, bool, bool, bool, bool], Program] = {}
        self.in_bf16 = replace(self.x, fp8=None)
        rotary = model.position_embedding_type in ("rope", "yarn") and not model.mla
        torch_bytes = torch_cublas_bytes(gpu_family, settings.runtime.cublas_workspace_config)
        self.first_use: FirstUse | None = FirstUse(
            self.x, share, torch_bytes, gpu_family, rotary, bool(self.expert_layers)
        )
        if self.strategy.fused_wgrad:
            self.first_use.await_placeholders(self.parameters)
        if model.fp8 and not model.fp8.primary_weights:
            self.first_use.expect_fp8_copies(self.parameters, self.fp8_layers)
        self.left: dict[int, tuple[object, ...]] = {}
        self.kept: set[Unit] = set()
        """Layers whose dispatcher still refers to the routing of the last microbatch."""
        self._move = transfer_blocks(self.x)

    def _chunk(self, share: ChunkShare) -> ModelChunk:
        model, fused = self.settings.model, self.strategy.fused_wgrad
        tied = model.share_embeddings_and_output_weights and share.pre_process and share.post_process
        joins = share.post_process and model.mtp_num_layers > 0
        return ModelChunk(
            share,
            in_this_rank(recompute_chunks(self.settings.recompute, share.num_layers), share),
            embedding_program(model, self.x, tied, fused, joins) if share.pre_process else None,
            self._head(share, tied) if share.post_process else None,
        )

    def _head(self, share: ChunkShare, tied: bool) -> Program:
        model, fused = self.settings.model, self.strategy.fused_wgrad
        if not model.mtp_num_layers:
            return head_program(model, self.x, tied, fused)
        recompute = self.settings.recompute
        checkpointed = recompute.recompute_granularity == "full" and recompute.recompute_method == "uniform"
        return prediction_program(model, self.x, fused, self.modules, checkpointed, share.pre_process)

    def _shapes(self, layer: int) -> Shapes:
        return self.x if layer in self.fp8_layers else self.in_bf16

    def _layer(
        self, layer: int, own_sum: bool = False, keep_output_grad: bool = False, keep_input: bool = False
    ) -> Program:
        experts = layer in self.expert_layers
        kind = (layer in self.fp8_layers, experts, own_sum, keep_output_grad, keep_input)
        program = self.programs.get(kind)
        if program is None:
            program = self.programs[kind] = layer_program(
                self.settings.model,
                self._shapes(layer),
                modules=self.modules,
                fused_wgrad=self.strategy.fused_wgrad,
                out_of_place=own_sum,
                experts=experts,
                keep_output_grad=keep_output_grad,
                keep_input=keep_input,
            )
        return program

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
        order = pipeline_order(settings.parallel, self.share.pipeline_rank, settings.num_microbatches)
        left: dict[int, tuple[object, ...]] = {}
        for action in order:
            scope = (name, (action.chunk, action.microbatch))
            chunk = self.chunks[action.chunk]
            if action.kind == FORWARD:
                self.forward(chunk, scope)
                left[action.chunk] = scope
            elif action.kind == BACKWARD:
                self.backward(chunk, scope, action.is_last)
                if self.settings.model.moe and action.microbatch == settings.num_microbatches - 1:
                    self._keep_routing(chunk)
            else:
                self._transfer(action, chunk, scope)
        self.first_use = None
        self.left = left
        self.strategy.finish_gradients()
        self._sync("finish_gradients")
        self.timeline.phase(f"{name}_optimizer_step")
        self.strategy.optimizer_step(first)
        self._sync("optimizer_step")

    def _transfer(self, action: Action, chunk: ModelChunk, scope: tuple[object, ...]) -> None:
        """Tensors that stages exchange. ``left``: scopes of those that the iteration before has left behind."""
        run, move, buffer = self.timeline.run, self._move, action.buffer
        if action.kind == RECEIVE:
            run(move[f"receive_{buffer}"], (*scope, chunk.input_layer) if buffer == INPUT else scope)
        elif action.kind == DROP and buffer == OUTPUT:
            run(move["drop_output"], scope if chunk.is_empty else (*scope, chunk.last_layer))
        elif action.kind == DROP:
            run(move[f"drop_{buffer}.end"], scope)
        elif action.chunk in self.left:
            run(move[f"drop_{buffer}.end"], self.left[action.chunk])

    def _routers(self, chunk: ModelChunk) -> list[Unit]:
        """Layers of a chunk that route, those of multi-token prediction last."""
        model = self.settings.model
        routers: list[Unit] = [layer for layer in chunk.share.local_layers if layer in self.expert_layers]
        if chunk.share.post_process and model.has_experts(model.num_layers - 1):
            routers += [f"mtp{i}" for i in range(model.mtp_num_layers)]
        return routers

    def _keep_routing(self, chunk: ModelChunk) -> None:
        for unit in self._routers(chunk):
            self.kept.add(unit)
            self.timeline.run(kept_blocks(self.settings.model, self.x)[0], ("kept", unit))

    def _drop_routing(self, chunk: ModelChunk) -> None:
        """The first microbatch routes anew."""
        for unit in self._routers(chunk):
            if unit in self.kept:
                self.kept.discard(unit)
                self.timeline.run(kept_blocks(self.settings.model, self.x)[1], ("kept", unit))

    def leave_first_iteration(self) -> None:
        """What a first iteration leaves behind, without running it: lasting buffers, optimizer states."""
        if self.first_use:
            self.timeline.run(self.first_use.remaining(self.parameters, self.strategy.fused_wgrad))
            self.first_use = None
        if self.expert_layers:
            for chunk in self.chunks:
                self._keep_routing(chunk)
        self.strategy.begin_backward()
        self.strategy.finish_gradients()
        self.strategy.optimizer_step(first=True)
        self._sync("first_iteration")

    def forward(self, chunk: ModelChunk, scope: tuple[object, ...]) -> None:
        run, strategy = self.timeline.run, self.strategy
        if self.kept:
            self._drop_routing(chunk)
        if chunk.loads_batch:
            run(self._move["batch"], scope)
        if chunk.embedding:
            strategy.before_forward("embedding")
            self._sync("gather")
            run(chunk.embedding.forward, (*scope, chunk.input_layer))
        if self.first_use:
            rotary = self.first_use.rotary_of(chunk.share.index)
            if rotary:
                run(rotary, ("rotary", chunk.share.index))
        for group in chunk.groups:
            for layer in group.layers:
                strategy.before_forward(layer)
                self._sync("gather")
                if self.first_use:
                    run(self.first_use.fp8_copies_of(layer), ("fp8", layer))
                if group.recomputed:
                    experts = layer in self.expert_layers
                    discarded = discarded_forward(self.settings.model, self._shapes(layer), experts)
                    self._run(discarded, (*scope, layer))
                    if layer != group.layers[0]:
                        run(self._move["drop_output"], (*scope, layer - 1))
                else:
                    self._run(self._layer(layer).forward, (*scope, layer))
                strategy.after_forward(layer)
                self._sync("release")
        if chunk.head:
            strategy.before_forward("head")
            self._sync("gather")
            self._run(chunk.head.forward, (*scope, chunk.last_layer + 1))
        elif chunk.is_empty:
            run(self._move["clone"], scope)

    def backward(self, chunk: ModelChunk, scope: tuple[object, ...], is_last: bool) -> None:
        """From the received gradient, or the loss, to the gradient of the chunk's input; the schedule drops those."""
        run, strategy = self.timeline.run, self.strategy
        strategy.begin_backward()
        if chunk.head:
            self._steps(chunk.head, "head", (*scope, chunk.last_layer + 1))
        elif not chunk.groups:
            run(self._move["keep_output_grad"], scope)
        top, bottom = chunk.last_layer, chunk.input_layer + 1
        for group in reversed(chunk.groups):
            if group.recomputed:
                for layer in group.layers:
                    strategy.before_recompute(layer)
                    self._sync("gather")
                    run(self._layer(layer).forward, (*scope, layer))
                    strategy.after_recompute(layer)
            for layer in reversed(group.layers):
                strategy.before_backward(layer)
                self._sync("gather")
                own_sum = (
                    strategy.out_of_place_residual or layer == top or (group.recomputed and layer == group.layers[-1])
                )
                keep_grad, keep_input = layer == top and not chunk.head, layer == bottom and not chunk.embedding
                self._steps(self._layer(layer, own_sum, keep_grad, keep_input), layer, (*scope, layer))
                strategy.after_backward(layer)
                self._sync("release")
            if group.recomputed:
                run(self._move["drop_output"], (*scope, group.layers[-1]))
        if chunk.embedding:
            self._steps(chunk.embedding, "embedding", (*scope, chunk.input_layer))
        else:
            if not chunk.groups:
                self._keep_input_without_layers(chunk, scope)
            run(self._move["keep_input_grad"], scope)
        strategy.end_backward(is_last)
        self._sync("reduce")
        if chunk.loads_batch:
            run(self._move["batch.end"], scope)

    def _keep_input_without_layers(self, chunk: ModelChunk, scope: tuple[object, ...]) -> None:
        """The schedule's reference, where no layer's program leaves it: the head's frees its input."""
        if chunk.head:
            self.timeline.run(self._move["drop_input"], scope)
        else:
            self.timeline.run(self._move["move_input"], (*scope, chunk.input_layer))

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
        if self.first_use and self.first_use.done:
            self.first_use = None

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


class _CountingComposer(_Composer):
    """Counts the steady iteration instead of writing it down: what a strategy does counts when it does it."""

    def __init__(self, settings: Settings, share: StageShare, gpu_family: str) -> None:
        super().__init__(settings, share, gpu_family)
        self.counter = Counter()
        self.timeline = CountingTimeline(self.counter)
        self.strategy.s = CountingScribe(self.counter)

    def _sync(self, name: str) -> None:
        return

    def _run(self, block: Block, scope: tuple[object, ...]) -> None:
        self.timeline.run(block, scope)

    def _steps(self, program: Program, unit: Unit, scope: tuple[object, ...]) -> None:
        strategy, run = self.strategy, self.timeline.run
        if not strategy.acts_in_backward:
            run(program.whole_backward, scope)
            return
        layer = unit if isinstance(unit, int) else None
        self.counter.work += len(program.backward)
        for step in program.backward:
            if isinstance(step, Block):
                run(step, scope)
            elif isinstance(step, NeedsMainGrad):
                strategy.needs_main_grad(self.by_name[layer, step.parameter])
            else:
                strategy.grad_ready(self.by_name[layer, step.parameter])
