"""Megatron-LM's arguments as it parses and prints them, in Megatron-Bridge's fields.

One table serves two readers. ``from_megatron`` translates what a log or a command line says, which may be a part, and
leaves out the rest. ``megatron_config`` takes a whole set of parsed arguments for a job: what Megatron-LM derives from
them is filled in, and what would change memory and has no field here is refused by its name.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from typing import Any

from estimator.catalog import fields as catalog
from estimator.errors import FieldProblem, JobError

Assignments = dict[str, Any]
"""Dotted path below ``cfg`` -> value."""

_SECTIONS = ("model", "ddp", "optimizer", "train", "checkpoint", "dist")
_CHECKPOINT_FIELDS = frozenset({"save", "load", "ckpt_format", "save_interval", "async_save", "pretrained_checkpoint"})


@functools.cache
def _section_of() -> Mapping[str, str]:
    """Argument name -> the section that has a field of that name, the first of :data:`_SECTIONS`."""
    found: dict[str, str] = {}
    for section in _SECTIONS:
        target = catalog.sections()[section].default_class
        for name in catalog.class_fields(target) if target else ():
            if section != "checkpoint" or name in _CHECKPOINT_FIELDS:
                found.setdefault(name, section)
    return found


def both(*paths: str) -> Callable[[Any], Assignments]:
    return lambda value: dict.fromkeys(paths, value)


def _negated(path: str) -> Callable[[Any], Assignments]:
    return lambda value: {path: not value}


def _when(true: Assignments) -> Callable[[Any], Assignments]:
    return lambda value: dict(true) if value is True else {}


MEGATRON: Mapping[str, Callable[[Any], Assignments]] = {
    "swiglu": _when({"model.gated_linear_unit": True, "model.activation_func": "silu"}),
    "squared_relu": _when({"model.activation_func": "squared_relu"}),
    "untie_embeddings_and_output_weights": _negated("model.share_embeddings_and_output_weights"),
    "disable_bias_linear": _negated("model.add_bias_linear"),
    "num_experts": both("model.num_moe_experts"),
    "vocab_size": both("model.vocab_size"),
    "padded_vocab_size": lambda value: {"model.vocab_size": value, "model.should_pad_vocab": False},
    "accumulate_allreduce_grads_in_fp32": both("mixed_precision.grad_reduce_in_fp32", "ddp.grad_reduce_in_fp32"),
    "grad_reduce_in_fp32": both("mixed_precision.grad_reduce_in_fp32", "ddp.grad_reduce_in_fp32"),
    "bf16": _when({"mixed_precision": "bf16_mixed"}),
    "fp16": _when({"mixed_precision": "fp16_mixed"}),
    "fp8": both("mixed_precision.fp8"),
    "fp8_recipe": both("mixed_precision.fp8_recipe"),
    "ddp_bucket_size": both("ddp.bucket_size"),
    "use_distributed_optimizer": both("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer"),
    "overlap_param_gather": both("ddp.overlap_param_gather", "optimizer.overlap_param_gather"),
    "use_custom_fsdp": both("dist.use_megatron_fsdp", "ddp.use_megatron_fsdp"),
    "use_megatron_fsdp": both("dist.use_megatron_fsdp", "ddp.use_megatron_fsdp"),
    "use_torch_fsdp2": both("dist.use_torch_fsdp2"),
    "params_dtype": lambda value: {},
    "fp32_residual_connection": both("model.fp32_residual_connection"),
    "encoder_num_layers": lambda value: {},
    "rotary_interleaved": lambda value: {},
}
"""Arguments that have another name, another sense or two places in Bridge. Source: megatron-core 0.19.2
training/arguments.py; every other argument goes to the field of its name, if there is one."""


def from_megatron(arguments: Mapping[str, Any]) -> Assignments:
    """Bridge's fields for Megatron-LM's arguments (``args.NAME``). What is None stays Bridge's default."""
    result: Assignments = {}
    for name, value in arguments.items():
        if value is None or not isinstance(value, (str, int, float, list)):
            continue
        translate = MEGATRON.get(name)
        if translate is not None:
            result.update(translate(value))
        elif name in _section_of():
            result[f"{_section_of()[name]}.{name}"] = value
        elif _section_of().get(name.removeprefix("ddp_")) == "ddp":
            result[f"ddp.{name.removeprefix('ddp_')}"] = value
    if arguments.get("padded_vocab_size"):
        result["model.vocab_size"] = arguments["padded_vocab_size"]
    if arguments.get("group_query_attention") is False:
        result.pop("model.num_query_groups", None)
    return result


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8"}
_DTYPE_FIELDS = ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_PROVIDERS = {
    False: "megatron.bridge.models.gpt_provider.GPTModelProvider",
    True: "megatron.bridge.models.mla_provider.MLAModelProvider",
}
_BLOCK_SPEC = "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec"

_REFUSED: Mapping[str, Callable[[Any], bool]] = {
    "use_mcore_models": lambda value: value is False,
    "use_legacy_models": bool,
    "spec": lambda value: value is not None,
    "heterogeneous_layers_config_path": lambda value: value is not None,
    "heterogeneous_layers_config_encoded_json": lambda value: value is not None,
    "freeze_all_layers": bool,
    "moe_use_legacy_grouped_gemm": bool,
    "hybrid_layer_pattern": lambda value: value is not None,
    "hybrid_override_pattern": lambda value: value is not None,
    "is_hybrid_model": bool,
    "rampup_batch_size": lambda value: value is not None,
    "qk_l2_norm": bool,
    "openai_gelu": bool,
    "quick_geglu": bool,
    "memory_efficient_layer_norm": bool,
    "add_position_embedding": lambda value: value is False,
    "num_distributed_optimizer_instances": lambda value: not isinstance(value, int),
}
"""Arguments that decide memory and that no field says: refused for these values."""


_NEAR_MISSES = frozenset(
    {
        "decoder_num_layers",
        "disable_gloo_process_groups",
        "max_position_embeddings",
        "muon_no_split_qkv",
        "no_align_param_gather",
        "no_bias_dropout_fusion",
        "no_gradient_accumulation_fusion",
        "no_gradient_reduce_div_fusion",
        "no_masked_softmax_fusion",
        "no_persist_layer_norm",
        "no_pin_cpu_grads",
        "no_pin_cpu_params",
        "no_position_embedding",
        "no_yarn_correction_range_round_to_int",
        "rotary_seq_len_interpolation_factor",
        "te_rng_tracker",
        "use_rope_scaling",
    }
)
"""Megatron-LM's own arguments that only look like a misspelling of another one. Source: as for :data:`MEGATRON`."""

_LIKENESS = 0.85
"""From this ratio of ``difflib`` on, an unknown name is taken for a misspelling: none of the 439 names in
megatron-core 0.19.2's training folder is, but for :data:`_NEAR_MISSES`."""


_MOST_ARGUMENTS = 2000
"""Megatron-LM has some 800; the search for misspellings takes half a millisecond for each unknown name."""


def _misspelt(arguments: Mapping[str, Any]) -> list[FieldProblem]:
    """Names that are no argument known here and are almost one that is not given: it would be passed over unsaid."""
    known = _section_of().keys() | MEGATRON.keys() | _REFUSED.keys()
    absent = sorted(known - arguments.keys())
    problems = []
    for name in sorted(arguments.keys() - known - _NEAR_MISSES):
        if _section_of().get(name.removeprefix("ddp_")) == "ddp":
            continue
        for meant in difflib.get_close_matches(name[:80], absent, 1, _LIKENESS):
            problems.append(FieldProblem(f"job.megatron_lm_args.{name[:80]}", f"is no argument; {meant} is meant?"))
    return problems


def megatron_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration for ``build_document`` from Megatron-LM's parsed arguments (``vars(args)``), section by section.

    Precision, activation, layer specification and tensor-parallel vocabulary are what Megatron-LM makes of the
    arguments (megatron-core 0.19.2 training/arguments.py core_transformer_config_from_args and validate_args,
    gpt_builders.py): no ``mixed_precision`` is left to overwrite them. Arguments that do not touch memory are passed
    over. Raises JobError naming every argument that matters and cannot be said here, or that looks misspelt.
    """
    if len(arguments) > _MOST_ARGUMENTS:
        raise JobError([FieldProblem("job.megatron_lm_args", f"has more than {_MOST_ARGUMENTS:,} arguments")])
    problems = [
        FieldProblem(f"job.megatron_lm_args.{name}", f"not modelled: {str(arguments[name])[:80]}")
        for name, refuses in _REFUSED.items()
        if name in arguments and refuses(arguments[name])
    ] + _misspelt(arguments)
    if problems:
        raise JobError(problems)
    translated = from_megatron(arguments)
    translated.update(_derived(arguments))
    config: dict[str, Any] = {}
    for path, value in translated.items():
        section, _, name = path.partition(".")
        if section != "mixed_precision":
            config.setdefault(section, {})[name] = value
    config.setdefault("tokenizer", {})["vocab_size"] = None
    return config


def _derived(arguments: Mapping[str, Any]) -> Assignments:
    """What Megatron-LM computes from several arguments."""
    get = arguments.get
    gated = bool(get("swiglu"))
    dtype = "bfloat16" if get("bf16") else "float16" if get("fp16") else "float32"
    experts, latents = get("num_experts"), bool(get("multi_latent_attention"))
    result: Assignments = {
        "model._target_": _PROVIDERS[latents],
        "model.transformer_layer_spec": _BLOCK_SPEC if experts or latents else "default_layer_spec",
        "model.bf16": dtype == "bfloat16",
        "model.fp16": dtype == "float16",
        "model.params_dtype": dtype,
        "model.bias_activation_fusion": bool(get("bias_swiglu_fusion" if gated else "bias_gelu_fusion")),
        "model.activation_func": "silu" if gated else "squared_relu" if get("squared_relu") else "gelu",
        "model.gated_linear_unit": gated,
        "optimizer.bf16": dtype == "bfloat16",
        "optimizer.fp16": dtype == "float16",
        "optimizer.params_dtype": dtype,
        "ddp.grad_reduce_in_fp32": bool(get("accumulate_allreduce_grads_in_fp32")),
        "ddp.average_in_collective": bool(get("ddp_average_in_collective")),
        "ddp.check_for_nan_in_grad": bool(get("check_for_nan_in_loss_and_grad", True)),
        "rerun_state_machine.check_for_nan_in_loss": bool(get("check_for_nan_in_loss_and_grad", True)),
        "model.fp8": get("fp8"),
        "model.fp8_param": bool(get("fp8") and (get("fp8_param_gather") or get("fp8_param"))),
        "ddp.fp8_param_gather": bool(get("fp8") and get("fp8_param_gather")),
        "dataset.create_attention_mask": bool(get("create_attention_mask_in_dataloader", True)),
    }
    if get("group_query_attention") is False:
        result["model.num_query_groups"] = None
    for name in _DTYPE_FIELDS:
        if name in arguments:
            result[f"optimizer.{name}"] = _DTYPES.get(str(get(name)).removeprefix("torch."), get(name))
    for argument, name in (
        ("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage"),
        ("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage"),
        ("microbatch_group_size_per_virtual_pipeline_stage", "microbatch_group_size_per_vp_stage"),
    ):
        if get(argument) is not None:
            result[f"model.{name}"] = get(argument)
    return result
