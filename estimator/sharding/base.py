"""What the step composer asks of a strategy. Each method writes ops on the strategy's own scribe; the composer cuts
them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from estimator.components import (
    MAIN_PARAMETERS,
    OPTIMIZER_STATES,
    OPTIMIZER_TEMPORARIES,
    PARAMETERS,
    STATES,
)
from estimator.job.settings import DTYPE_BYTES, OptimizerSettings, Settings
from estimator.model.parameters import Parameter
from estimator.timeline import SIDE, Block, Scribe

Unit = int | str
"""A decoder layer's index in this stage, or "embedding" or "head"."""

_IN_PLACE_CLIPPING_SINCE = (2, 13)
"""Transformer Engine from which megatron-core 0.19.2 finds multi_tensor_scale_tensor and clips without a temporary
(core/optimizer/clip_grads.py:10-45)."""


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """What one rank of a pipeline stage holds. Compared by identity: ``step.model_chunk.stage_of`` makes one a job."""

    parameters: tuple[Parameter, ...]
    pipeline_rank: int
    element_bytes: int
    parameters_by_chunk: tuple[int, ...] = ()
    fp8_layers: frozenset[int] = frozenset()
    """Layers whose weight matrices are themselves FP8."""
    fp8_transposes: bool = True
    """How many of ``parameters``, in order, each model chunk has; empty: all belong to one."""

    def is_fp8(self, parameter: Parameter) -> bool:
        return parameter.layer in self.fp8_layers and parameter.fused_gradient

    @property
    def chunks(self) -> tuple[tuple[Parameter, ...], ...]:
        """Parameters of each model chunk: chunks are wrapped one by one."""
        parts, start = [], 0
        for count in self.parameters_by_chunk or (len(self.parameters),):
            parts.append(self.parameters[start : start + count])
            start += count
        return tuple(parts)

    @property
    def num_elements(self) -> int:
        return sum(p.num_elements for p in self.parameters)


def version_tuple(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: "2.12.0+cu" -> (2, 12, 0)."""
    numbers = []
    for part in text.split("."):
        digits = "".join(c for c in part if c.isdigit())
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


class Strategy(ABC):
    """Base: the optimizer, which differs only in which shards it steps over."""

    out_of_place_residual = False
    """Whether every layer's backward sums the residual gradient into a tensor of its own."""

    acts_in_backward = False
    """Whether gradients make this strategy allocate or free anything between the modules of a backward."""

    def __init__(self, settings: Settings, stage: Stage) -> None:
        self.settings, self.stage = settings, stage
        self.s = Scribe()

    # -- building -------------------------------------------------------------------------------------------------
    @property
    def fused_wgrad(self) -> bool:
        return self.settings.model.gradient_accumulation_fusion

    def build_model(self) -> None:
        """Weights of the plain module on the GPU, before it is wrapped."""
        for p in self.stage.parameters:
            self.s.alloc(f"module/{p.layer}/{p.name}", p.num_elements * self.stage.element_bytes, PARAMETERS)
            if self.stage.is_fp8(p):
                self._quantize_parameter(p)

    def _quantize_parameter(self, p: Parameter) -> None:
        """A weight made under fp8_model_init: initialized in the compute dtype, then quantized; its row-wise copy is
        the module's tensor, its column-wise one stays beside it (TE 2.12 module/base.py reset_parameters)."""
        name = f"module/{p.layer}/{p.name}"
        self.s.alloc(f"{name}/row", p.num_elements, PARAMETERS)
        if self.stage.fp8_transposes:
            self.s.alloc(f"{name}/column", p.num_elements, PARAMETERS)
        self.s.free(name)
        self.s.rename(f"{name}/row", name)

    @abstractmethod
    def wrap(self) -> None:
        """From the plain module to the wrapped one: flat buffers, freed originals."""

    @abstractmethod
    def build_optimizer(self) -> None: ...

    # -- one iteration --------------------------------------------------------------------------------------------
    def zero_grad(self) -> None:  # noqa: B027
        """Start of an iteration."""

    def before_forward(self, unit: Unit) -> None:  # noqa: B027
        """A module's forward begins."""

    def after_forward(self, unit: Unit) -> None:  # noqa: B027
        """A unit's forward has ended."""

    def begin_backward(self) -> None:  # noqa: B027
        """The first gradient of a microbatch reaches the model."""

    def before_recompute(self, unit: Unit) -> None:  # noqa: B027
        """A unit is computed again in backward."""

    def after_recompute(self, unit: Unit) -> None:  # noqa: B027
        """A unit has been computed again in backward."""

    def before_backward(self, unit: Unit) -> None:  # noqa: B027
        """A unit's backward begins."""

    def after_backward(self, unit: Unit) -> None:  # noqa: B027
        """A unit's backward has ended."""

    def needs_main_grad(self, parameter: Parameter) -> None:  # noqa: B027
        """A kernel is about to add to this parameter's main_grad."""

    def grad_ready(self, parameter: Parameter) -> None:  # noqa: B027
        """This parameter's gradient is complete for the microbatch."""

    def end_backward(self, is_last: bool) -> None:  # noqa: B027
        """The microbatch's backward has ended; ``is_last`` of the step."""

    def finish_gradients(self) -> None:  # noqa: B027
        """finalize_model_grads, after the last microbatch, still inside forward_backward."""

    @abstractmethod
    def optimizer_shards(self) -> list[int]:
        """Elements of every parameter shard that this rank's optimizer steps over."""

    @property
    @abstractmethod
    def gradient_dtype(self) -> str:
        """dtype of the accumulated gradients."""

    def after_step(self) -> None:  # noqa: B027
        """After the optimizer has written the weights."""

    # -- the optimizer --------------------------------------------------------------------------------------------
    def optimizer_step(self, first: bool) -> None:
        """Gradient copies, clipping, Adam states (made in the first step), temporaries of low-precision states."""
        shards = self.optimizer_shards()
        self.copy_gradients(shards)
        self._clip(shards)
        if first:
            self._make_states(shards)
        self._scale_states(shards)
        self.after_step()

    def copy_gradients(self, shards: list[int]) -> None:  # noqa: B027
        """FP32 copies of lower-precision gradients, kept until zero_grad."""

    def _clip(self, shards: list[int]) -> None:
        optimizer, te = self.settings.optimizer, version_tuple(self.settings.stack.transformer_engine)
        if not optimizer.clipping_active or optimizer.clip_grad <= 0 or te >= _IN_PLACE_CLIPPING_SINCE or not shards:
            return
        size = 4 if self.clips_fp32 else DTYPE_BYTES[self.gradient_dtype]
        self.s.transient("clipped", max(shards) * size, OPTIMIZER_TEMPORARIES)

    @property
    def clips_fp32(self) -> bool:
        return not self.settings.optimizer.use_precision_aware_optimizer

    def _make_states(self, shards: list[int]) -> None:
        optimizer = self.settings.optimizer
        for i, n in enumerate(shards):
            for state, size in state_bytes(optimizer).items():
                self.s.alloc(f"optimizer/{i}/{state}", n * size, OPTIMIZER_STATES)
            if self.master_weight_bytes:
                self.s.alloc(f"optimizer/{i}/master", n * self.master_weight_bytes, MAIN_PARAMETERS)

    @property
    def master_weight_bytes(self) -> int:
        """Bytes an element of main weights that FusedAdam itself keeps (precision-aware optimizer), else 0."""
        return 0

    def _scale_states(self, shards: list[int]) -> None:
        """FusedAdam brings states below FP32 to FP32 for the step and back (TE 2.12
        pytorch/optimizers/fused_adam.py:324)."""
        low = [name for name, size in state_bytes(self.settings.optimizer).items() if size < 4]
        if not low:
            return
        names = [(f"unscaled/{i}/{name}", n * 4) for i, n in enumerate(shards) for name in low]
        for name, size in names:
            self.s.alloc(name, size, OPTIMIZER_TEMPORARIES)
        if shards:
            self.s.transient("rescaled", max(shards) * 2, OPTIMIZER_TEMPORARIES)
        self.s.free(*(name for name, _ in names))

    # -- results --------------------------------------------------------------------------------------------------
    def cut(self, name: str) -> Block:
        return self.s.cut(name)

    def resident_state_bytes(self) -> int:
        """Parameters, main weights, gradients and optimizer states now allocated (section M of the rules)."""
        return sum(b.num_bytes for b in self.s.live.values() if b.component in STATES)


def state_bytes(optimizer: OptimizerSettings) -> dict[str, int]:
    """Bytes an element of each optimizer state. SGD keeps one momentum buffer."""
    if optimizer.optimizer == "sgd":
        return {"momentum": 4}
    if not optimizer.use_precision_aware_optimizer:
        return {"exp_avg": 4, "exp_avg_sq": 4}
    return {"exp_avg": DTYPE_BYTES[optimizer.exp_avg_dtype], "exp_avg_sq": DTYPE_BYTES[optimizer.exp_avg_sq_dtype]}


__all__ = ["SIDE", "Stage", "Strategy", "Unit", "state_bytes", "version_tuple"]
