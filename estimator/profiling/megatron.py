"""Builds the model, its data-parallel wrapper and its optimizer with the real Megatron-Core, as Bridge's setup does.

Follows megatron-bridge 0.6.2, training/setup.py:setup, models/gpt_provider.py:GPTModelProvider.provide and
training/train.py:train; the wrapping itself is megatron.training.models.dist_utils, which megatron-core 0.19.2 ships.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from estimator.profiling import configs
from estimator.profiling.job import ProfileJob

_ACTIVATIONS = ("fast_gelu", "quick_gelu", "squared_relu")


@dataclass(slots=True)
class Training:
    """Everything that a training step needs, built."""

    config: Any
    ddp_config: Any
    groups: Any
    models: list[Any]
    optimizer: Any
    forward_backward: Callable[..., Any]
    communicator: Any
    toggles_forward_pre_hook: bool
    """Distributed optimizer with overlapped gathers: Bridge's first iteration runs without the forward pre-hooks."""
    param_sync_func: Any = None
    graphs: Any = None


def dtype_of(name: Any) -> Any:
    """torch's dtype for Settings' name of it; anything else is returned as it is."""
    import torch

    return getattr(torch, name) if isinstance(name, str) else name


def with_dtypes(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with every ``*_dtype`` turned from text into torch's dtype (and FP8's uint8 states)."""
    return {
        key: dtype_of(value) if key.endswith("_dtype") and key != "moe_router_dtype" else value
        for key, value in arguments.items()
    }


def transformer_config(job: ProfileJob) -> Any:
    """TransformerConfig, or MLATransformerConfig where multi_latent_attention is asked for."""
    from megatron.core import activations
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    from torch.nn import functional

    latent = bool(
        job.extra_transformer_config.get("multi_latent_attention")
        or getattr(job.settings.model, "multi_latent_attention", False)
    )
    cls = MLATransformerConfig if latent else TransformerConfig
    arguments = configs.transformer_arguments(job, [f.name for f in fields(cls)])
    name = arguments["activation_func"]
    arguments["activation_func"] = getattr(activations if name in _ACTIVATIONS else functional, name)
    arguments["attention_backend"] = AttnBackend[arguments["attention_backend"]]
    return cls(**with_dtypes(arguments))


def initialise_parallel_state(job: ProfileJob, config: Any, rank: int) -> Any:
    """Megatron's process groups, microbatch calculator and random seeds; returns the ProcessGroupCollection."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    settings = job.settings
    parallel_state.initialize_model_parallel(
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        hierarchical_context_parallel_sizes=config.hierarchical_context_parallel_sizes,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=settings.sharding.num_distributed_optimizer_instances,
        create_gloo_process_groups=False,
    )
    init_num_microbatches_calculator(
        rank,
        None,
        settings.batch.global_batch_size,
        settings.batch.micro_batch_size,
        settings.parallel.data_parallel_size,
        False,
    )
    torch.manual_seed(1234)
    graphs = config.cuda_graph_impl != "none"
    model_parallel_cuda_manual_seed(
        1234, te_rng_tracker=config.use_te_rng_tracker or graphs, use_cudagraphable_rng=graphs
    )
    if config.num_moe_experts is not None:
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device=torch.cuda.current_device()))
    return ProcessGroupCollection.use_mpu_process_groups()


def _layer_spec(config: Any, vp_stage: int | None) -> Any:
    """Bridge's default specification of dense GPT layers, or the block one that its MoE and MLA models name."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    engine = config.transformer_impl == "transformer_engine"
    if config.num_moe_experts is not None or config.multi_latent_attention:
        return specs.get_gpt_decoder_block_spec(config, use_transformer_engine=engine, vp_stage=vp_stage)
    if engine:
        return specs.get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=config.qk_layernorm, use_te_op_fuser=config.use_transformer_engine_op_fuser
        )
    return specs.get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)


def _mtp_spec(config: Any, spec: Any, vp_stage: int | None) -> Any:
    if not config.mtp_num_layers:
        return None
    from megatron.core.models.gpt import gpt_layer_specs as specs

    engine = config.transformer_impl == "transformer_engine"
    if hasattr(spec, "layer_specs") and not spec.layer_specs:
        spec = specs.get_gpt_decoder_layer_specs(config, use_transformer_engine=engine)[-1]
    return specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=engine, vp_stage=vp_stage)


def model_builder(job: ProfileJob, config: Any) -> Callable[..., Any]:
    """What dist_utils calls for each pipeline chunk: builds its GPTModel."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    model = job.settings.model
    if model.post_layer_norms:
        raise NotImplementedError("post_layer_norms (Gemma 2 and 3) needs a layer specification that Bridge brings")

    def build(
        pg_collection: Any = None, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
    ) -> Any:
        spec = _layer_spec(config, vp_stage)
        # The rotary base of MLA is a field of its configuration; nothing else of it shapes memory.
        return GPTModel(
            config,
            spec,
            vocab_size=model.vocab_size,
            max_sequence_length=model.seq_length,
            position_embedding_type=model.position_embedding_type,
            rotary_percent=model.rotary_percent,
            share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
            parallel_output=True,
            pre_process=pre_process,
            post_process=post_process,
            mtp_block_spec=_mtp_spec(config, spec, vp_stage),
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )

    return build


def build_training(job: ProfileJob, config: Any, groups: Any, mark: Callable[[str], None]) -> Training:
    """Model, wrapper, optimizer and the functions that Bridge hangs on the config; ``mark`` is called at phase ends."""
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.training.models import dist_utils

    torch_fsdp2 = job.settings.sharding.strategy == configs.TORCH_FSDP2
    ddp = configs.ddp_arguments(job)
    ddp_config = DistributedDataParallelConfig(**with_dtypes(ddp))
    wrap = dist_utils._ddp_wrap

    def wrap_and_mark(*arguments: Any, **named: Any) -> Any:
        mark("model_build")
        wrapped = wrap(*arguments, **named)
        mark("wrap")
        return wrapped

    dist_utils._ddp_wrap = wrap_and_mark
    try:
        models = dist_utils.unimodal_build_distributed_models(
            model_builder(job, config),
            config,
            groups,
            ddp_config,
            use_megatron_fsdp=job.settings.sharding.is_megatron_fsdp,
            use_torch_fsdp2=torch_fsdp2,
        )
    finally:
        dist_utils._ddp_wrap = wrap
    optimizer_config = OptimizerConfig(**with_dtypes(configs.optimizer_arguments(job, ddp)))
    optimizer = get_megatron_optimizer(optimizer_config, models, use_gloo_process_groups=False)
    mark("optimizer_build")

    _set_config_functions(config, ddp_config, models, optimizer, groups)
    for model in models:
        model.train()
    forward_backward = get_forward_backward_func(
        pp_size=groups.pp.size(), vp_size=config.virtual_pipeline_model_parallel_size
    )
    training = Training(
        config=config,
        ddp_config=ddp_config,
        groups=groups,
        models=models,
        optimizer=optimizer,
        forward_backward=forward_backward,
        communicator=P2PCommunicator(pp_group=groups.pp, config=config),
        toggles_forward_pre_hook=(
            not ddp_config.use_megatron_fsdp
            and ddp_config.use_distributed_optimizer
            and ddp_config.overlap_param_gather
        ),
    )
    _prepare_cuda_graphs(job, training)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return training


def _set_config_functions(config: Any, ddp_config: Any, models: list[Any], optimizer: Any, groups: Any) -> None:
    """Bridge's ``_update_model_config_funcs`` (training/setup.py:549-577), align_grad_reduce at its default."""
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    def one_or_all(functions: list[Any]) -> Any:
        return functions[0] if len(functions) == 1 else functions

    if isinstance(models[0], DistributedDataParallel | FullyShardedDataParallel) and ddp_config.overlap_grad_reduce:
        config.no_sync_func = one_or_all([model.no_sync for model in models])
        config.grad_sync_func = one_or_all([model.start_grad_sync for model in models])
    if ddp_config.overlap_param_gather and ddp_config.align_param_gather:
        config.param_sync_func = one_or_all([model.start_param_sync for model in models])
    config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=groups)
    config.grad_scale_func = optimizer.scale_loss


def _prepare_cuda_graphs(job: ProfileJob, training: Training) -> None:
    """Bridge's choice among the CUDA graph implementations (training/train.py:241-320)."""
    config = training.config
    if config.cuda_graph_impl == "transformer_engine":
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        training.graphs = TECudaGraphHelper(
            model=training.models,
            config=config,
            seq_length=job.settings.model.seq_length,
            micro_batch_size=job.settings.batch.micro_batch_size,
            optimizers=[training.optimizer],
        )
    elif config.cuda_graph_impl == "full_iteration":
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper

        training.forward_backward = FullCudaGraphWrapper(
            training.forward_backward, cuda_graph_warmup_steps=config.cuda_graph_warmup_steps
        )


def before_first_iteration(training: Training) -> None:
    """As Bridge's ``train`` starts: no overlapped gathers before the first optimizer step."""
    if training.toggles_forward_pre_hook:
        training.param_sync_func = training.config.param_sync_func
        for model in training.models:
            model.disable_forward_pre_hook(param_sync=False)
        training.config.param_sync_func = None


def before_iteration(training: Training, iteration: int) -> None:
    """Capture Transformer Engine's CUDA graphs once the warm-up is over."""
    helper, warmup = training.graphs, training.config.cuda_graph_warmup_steps
    if helper is None or helper.graphs_created() or iteration != warmup:
        return
    toggle = warmup > 0 and training.toggles_forward_pre_hook
    if toggle:
        for model in training.models:
            model.disable_forward_pre_hook(param_sync=False)
    helper.create_cudagraphs()
    if toggle:
        for model in training.models:
            model.enable_forward_pre_hook()
        helper.cuda_graph_set_manual_hooks()


def after_first_iteration(training: Training) -> None:
    """Overlapped gathers from now on."""
    if training.toggles_forward_pre_hook:
        for model in training.models:
            model.enable_forward_pre_hook()
        training.config.param_sync_func = training.param_sync_func
        if training.graphs is not None and training.config.cuda_graph_warmup_steps == 0:
            training.graphs.cuda_graph_set_manual_hooks()


def _cudnn_version(torch: Any) -> str | None:
    """torch refuses to name a runtime version other than the one it was built with, though the library works."""
    if not torch.backends.cudnn.is_available():
        return None
    try:
        return str(torch.backends.cudnn.version())
    except RuntimeError:
        return str(torch._C._cudnn.getRuntimeVersion())


def versions() -> dict[str, str | None]:
    """Versions of the software that decides memory."""
    import platform
    from importlib import metadata

    import torch

    def version_of(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": _cudnn_version(torch),
        "megatron_core": version_of("megatron-core"),
        "transformer_engine": version_of("transformer-engine"),
        "triton": version_of("triton"),
        "python": platform.python_version(),
    }


def gpu_identity() -> dict[str, Any] | None:
    """The card as torch sees it, and the driver's CUDA version; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "total_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "driver_cuda": getattr(torch._C, "_cuda_getDriverVersion", lambda: None)(),
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
