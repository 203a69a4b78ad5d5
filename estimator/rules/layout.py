"""Rules of layout arithmetic: which sizes must divide which (A18, A21, L1 to L10); paths as in megatron_fsdp.

L rules are this project's own numbers for divisions that the packages assert without a common list.
"""

from __future__ import annotations

from estimator.layout.layout_string import parse_layout
from estimator.rules.facts import Facts
from estimator.rules.rule import Rule


def uneven_layers(f: Facts) -> bool:
    """Whether the layers do not spread over the pipeline stages (and virtual stages) as the job asks."""
    model = f.model.get
    layers = model("num_layers") or 0
    if f.pp == 1 or not layers or model("pipeline_model_parallel_layout") is not None or model("is_hybrid_model"):
        return False
    first, last = model("num_layers_in_first_pipeline_stage"), model("num_layers_in_last_pipeline_stage")
    stages = f.pp
    for given in (first, last):
        if given is not None:
            if given <= 0 or given % f.vp != 0:
                return True
            layers -= given
            stages -= 1
    if first is None and last is None:
        layers += bool(model("account_for_embedding_in_pipeline_split"))
        layers += bool(model("account_for_loss_in_pipeline_split"))
    if bool(layers) != bool(stages) or layers < 0:
        return True
    return bool(stages) and (layers % stages != 0 or (layers // stages) % f.vp != 0)


def group_does_not_fit(f: Facts) -> bool:
    """Whether the interleaved schedule refuses this number of microbatches."""
    if f.vp == 1 or f.pp == 1 or not f.micro:
        return False
    group = f.model.get("microbatch_group_size_per_vp_stage") or f.pp
    return not f.pp <= group <= f.micro or 0 < f.micro % group < f.pp


def written_layout_does_not_fit(f: Facts) -> bool:
    """Whether pipeline_model_parallel_layout is no layout of this model on these stages."""
    layout = f.model.get("pipeline_model_parallel_layout")
    if layout is None or f.pp == 1:
        return False
    try:
        stages = parse_layout(layout)
    except ValueError:
        return True
    text = "".join(stages)
    counts = (text.count("E"), text.count("L"), text.count("t"), text.count("m"))
    wanted = (1, 1, f.model.get("num_layers"), f.model.get("mtp_num_layers") or 0)
    return len(stages) != f.pp * f.vp or counts != wanted or text[0] != "E" or text[-1] != "L"


def vocabulary_does_not_divide(f: Facts) -> bool:
    """Whether the embedding table, as the model builds it, cannot be split over TP. Padding makes it divide."""
    vocab_size = f.model.get("vocab_size")
    return bool(vocab_size and not f.model.get("should_pad_vocab") and vocab_size % f.tp != 0)


def evaluation_batch_does_not_divide(f: Facts) -> bool:
    """Whether eval_global_batch_size (default: the training one) is no multiple of eval_micro_batch_size * DP."""
    batch = f.validation.get("eval_global_batch_size") or f.gbs
    micro = f.validation.get("eval_micro_batch_size") or f.mbs
    cp = f.dist.get("eval_context_parallel_size") or f.cp
    parallel = f.tp * f.pp * cp
    dp = f.world // parallel if f.world % parallel == 0 else 0
    return not dp or not micro or batch % (micro * dp) != 0


LAYOUT_RULES: tuple[Rule, ...] = (
    Rule(
        "A18",
        "error",
        ("model.tensor_model_parallel_size", "model.pipeline_model_parallel_size", "model.context_parallel_size"),
        lambda f: not f.dp,
        "{f.world} GPUs are no multiple of TP x PP x CP = {f.tp} x {f.pp} x {f.cp}.",
        "Choose sizes whose product divides the number of GPUs.",
        "B/training/config.py:1024",
    ),
    Rule(
        "A18",
        "error",
        ("validation.eval_global_batch_size", "validation.eval_micro_batch_size"),
        lambda f: (
            f.dp
            and f.micro
            and (
                f.validation.get("eval_global_batch_size")
                or f.validation.get("eval_micro_batch_size")
                or f.dist.get("eval_context_parallel_size")
            )
            and evaluation_batch_does_not_divide(f)
        ),
        "The evaluation batch does not divide by its micro batch times the data-parallel size.",
        "Set validation.eval_global_batch_size to a multiple of eval_micro_batch_size x DP.",
        "B/training/config.py:1310-1339",
    ),
    Rule(
        "A21",
        "error",
        ("model.seq_length", "model.context_parallel_size"),
        lambda f: f.cp > 1 and f.model.get("seq_length") and f.model["seq_length"] % (2 * f.cp),
        "The sequence length {f.model[seq_length]} is no multiple of 2 x CP (CP = {f.cp}).",
        "Choose a sequence length that is a multiple of 2 x context_parallel_size.",
        "B/training/config.py:1435",
    ),
    Rule(
        "A21",
        "error",
        ("dataset.seq_length", "model.seq_length"),
        lambda f: (
            f.dataset.get("seq_length") is not None
            and f.model.get("seq_length") is not None
            and f.dataset["seq_length"] != f.model["seq_length"]
        ),
        "The dataset has sequences of {f.dataset[seq_length]} tokens, the model of {f.model[seq_length]}.",
        "Set dataset.seq_length and model.seq_length to the same number.",
        "B/training/config.py:1505",
    ),
    Rule(
        "A31",
        "warning",
        ("model.sequence_parallel",),
        lambda f: f.tp == 1 and f.written("model", "sequence_parallel"),
        "Sequence parallelism is switched off silently, because TP is 1.",
        "Set model.sequence_parallel = False, or use tensor parallelism.",
        "B/models/transformer_config.py:179,255",
    ),
    Rule(
        "L1",
        "error",
        ("model.num_attention_heads",),
        lambda f: f.model.get("num_attention_heads") == 0 and not f.model.get("kv_channels"),
        "The model has no attention heads yet, so a head has no size.",
        "Set model.num_attention_heads and the other dimensions.",
        "C/transformer/transformer_config.py:1332-1333",
    ),
    Rule(
        "L1",
        "error",
        ("model.num_attention_heads", "model.tensor_model_parallel_size"),
        lambda f: f.tp > 1 and (f.model.get("num_attention_heads") or 0) % f.tp,
        "{f.model[num_attention_heads]} attention heads do not divide over TP = {f.tp}.",
        "Choose a tensor_model_parallel_size that divides num_attention_heads.",
        "C/transformer/transformer_config.py:1323-1327",
    ),
    Rule(
        "L2",
        "error",
        ("model.num_query_groups", "model.tensor_model_parallel_size"),
        lambda f: (
            f.tp > 1 and (groups := f.model.get("num_query_groups")) and groups % f.tp != 0 and f.tp % groups != 0
        ),
        "TP = {f.tp} is neither a multiple nor a divisor of {f.model[num_query_groups]} query groups.",
        "Choose a tensor_model_parallel_size that is a multiple or a divisor of num_query_groups.",
        "C/transformer/transformer_config.py:1338-1345",
    ),
    Rule(
        "L3",
        "error",
        ("model.num_layers", "model.pipeline_model_parallel_size", "model.virtual_pipeline_model_parallel_size"),
        uneven_layers,
        "{f.model[num_layers]} layers do not spread over {f.pp} pipeline stages of {f.vp} virtual stages as asked.",
        "Choose sizes that divide num_layers, or set num_layers_in_first_pipeline_stage and ..._last_....",
        "C/transformer/transformer_config.py:1991-2110; C/transformer/transformer_block.py:123-173",
    ),
    Rule(
        "L4",
        "error",
        ("model.seq_length", "model.tensor_model_parallel_size", "model.sequence_parallel"),
        lambda f: f.tp > 1 and f.model.get("sequence_parallel") and (f.model.get("seq_length") or 0) % (f.tp * f.cp),
        "The sequence length {f.model[seq_length]} does not divide over TP x CP = {f.tp} x {f.cp}.",
        "Choose a sequence length that is a multiple of TP x CP.",
        "C/tensor_parallel/mappings.py:72-74",
    ),
    Rule(
        "L5",
        "error",
        ("train.global_batch_size", "train.micro_batch_size"),
        lambda f: f.dp and f.gbs and f.mbs and not f.micro and not f.train.get("decrease_batch_size_if_needed"),
        "The global batch size {f.gbs} is no multiple of micro batch x DP = {f.mbs} x {f.dp}.",
        "Choose a global_batch_size that is a multiple of micro_batch_size x data-parallel size.",
        "C/num_microbatches_calculator.py:380-387",
    ),
    Rule(
        "L6",
        "error",
        ("model.vocab_size", "model.tensor_model_parallel_size"),
        lambda f: f.tp > 1 and vocabulary_does_not_divide(f),
        "A vocabulary of {f.model[vocab_size]} does not divide over TP = {f.tp}, and should_pad_vocab is off.",
        "Set model.should_pad_vocab = True.",
        "B/models/gpt_provider.py:265-270; C/utils.py:557-558",
    ),
    Rule(
        "L7",
        "error",
        ("model.virtual_pipeline_model_parallel_size", "model.pipeline_model_parallel_size"),
        lambda f: f.vp > 1 and f.pp == 1,
        "{f.vp} virtual pipeline stages need a pipeline, and its size is 1.",
        "Set model.virtual_pipeline_model_parallel_size = None.",
        "C/parallel_state.py (virtual pipeline needs pipeline_model_parallel_size > 1)",
    ),
    Rule(
        "L9",
        "error",
        ("train.global_batch_size", "model.microbatch_group_size_per_vp_stage"),
        group_does_not_fit,
        "{f.micro} microbatches do not fit an interleaved pipeline of {f.pp} stages.",
        "Choose a global batch whose microbatches are a multiple of the group (the pipeline size unless set).",
        "C/pipeline_parallel/schedules.py:1126-1148",
    ),
    Rule(
        "L10",
        "error",
        ("model.pipeline_model_parallel_layout",),
        written_layout_does_not_fit,
        "The pipeline layout does not describe {f.model[num_layers]} layers on {f.pp} stages of {f.vp} virtual stages.",
        "Begin with E, end with L, and write one t for each layer in pipeline x virtual stages, separated by bars.",
        "C/transformer/pipeline_parallel_layer_layout.py:30-130",
    ),
    Rule(
        "L8",
        "error",
        ("model.expert_model_parallel_size", "model.num_moe_experts"),
        lambda f: f.ep > 1 and (not f.expert_dp or (f.model.get("num_moe_experts") or 0) % f.ep != 0),
        "EP = {f.ep} does not divide the {f.model[num_moe_experts]} experts, or ETP x EP x PP the {f.world} GPUs.",
        "Choose an expert_model_parallel_size that divides the experts and the GPUs.",
        "C/transformer/transformer_config.py:2350; C/parallel_state.py:883",
    ),
    Rule(
        "L11",
        "error",
        ("model.sequence_parallel", "model.tensor_model_parallel_size", "model.num_moe_experts"),
        lambda f: f.tp > 1 and f.model.get("num_moe_experts") and not f.model.get("sequence_parallel"),
        "A mixture of experts trains under tensor parallelism only with sequence parallelism.",
        "Set model.sequence_parallel = True.",
        "C/transformer/moe/moe_layer.py:611-616",
    ),
)
