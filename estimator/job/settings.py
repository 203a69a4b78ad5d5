"""The settings of one job that decide its memory, as frozen dataclasses with Megatron-Core's names.

They are read from the *effective* document: after mixed_precision, comm_overlap and validate() have overwritten what
they overwrite (``estimator.job.effective``), so that the estimate is made for what the real Megatron-Bridge would run.
dtypes are strings ("bfloat16", "float32", "float16"); activation functions are Megatron's names ("silu", "gelu",
"fast_gelu", "squared_relu", "quick_gelu").
"""

from __future__ import annotations

from dataclasses import dataclass, field

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "float64": 8}


@dataclass(frozen=True, slots=True)
class Fp8Settings:
    """Decoder layers whose products run in FP8."""

    recipe: str
    """delayed | tensorwise | blockwise."""
    primary_weights: bool = False
    """fp8_param (fp8_param_gather): the weights themselves are FP8."""
    num_layers_at_start_in_bf16: int = 0
    num_layers_at_end_in_bf16: int = 0

    def applies_to(self, layer: int, num_layers: int) -> bool:
        """Whether this layer of the whole model is in FP8 (megatron-core 0.19.2, fp8_utils.py:673)."""
        return self.num_layers_at_start_in_bf16 <= layer < num_layers - self.num_layers_at_end_in_bf16


@dataclass(frozen=True, slots=True)
class MlaSettings:
    """Multi-latent attention: widths of the latent projections and of a head's parts."""

    q_lora_rank: int | None
    """None: queries come straight from the hidden states."""
    kv_lora_rank: int
    qk_head_dim: int
    """Of a query's head, the part without positions."""
    qk_pos_emb_head_dim: int
    v_head_dim: int

    @property
    def query_head_dim(self) -> int:
        return self.qk_head_dim + self.qk_pos_emb_head_dim


DEEPEP_RECEIVED_TOKENS = {
    **dict.fromkeys((2, 4, 8), 256),
    **dict.fromkeys((16, 24, 32, 48, 64), 288),
    96: 480,
    128: 560,
    144: 720,
    160: 720,
}
"""Ranks that DeepEP has settings for -> tokens that a channel holds for one sender of the node (DeepEP
deep_ep/buffers/legacy.py:233-290)."""


@dataclass(frozen=True, slots=True)
class MoeSettings:
    """Mixture of experts: the layers that have one, its router, dispatcher and experts."""

    num_experts: int
    ffn_hidden_size: int
    topk: int
    pattern: tuple[int, ...]
    """1 for each layer with experts, 0 for each dense one."""
    dispatcher: str = "alltoall"
    """alltoall | deepep | hybridep."""
    permute_fusion: bool = False
    router_dtype: str = "bfloat16"
    router_fusion: bool = False
    score_function: str = "softmax"
    aux_losses: int = 0
    """How many balancing losses are added."""
    expert_bias: bool = False
    force_load_balancing: bool = False
    shared_size: int = 0
    """FFN width of the shared experts, 0 for none."""
    shared_overlap: bool = False
    shared_gate: bool = False
    latent_size: int | None = None
    num_groups: int = 0
    """Groups of experts, of which a token chooses ``group_topk`` first."""
    group_topk: int = 0
    dispatcher_sms: int = 20
    """Multiprocessors that DeepEP uses: they decide its buffers."""
    nvlink_ranks: int = 8
    """Ranks that HybridEP reaches over NVLink."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Dimensions and implementation of a GPT model; h, f, a, g, d, V, L, s of the formulas in ``estimator.model``."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    """Size of the embedding table as the model builds it, already padded for the tensor-parallel size."""
    seq_length: int
    normalization: str = "RMSNorm"
    activation_func: str = "silu"
    gated_linear_unit: bool = True
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    share_embeddings_and_output_weights: bool = False
    position_embedding_type: str = "rope"
    rotary_percent: float = 1.0
    window_size: tuple[int, int] | None = None
    attention_output_gate: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    transformer_impl: str = "transformer_engine"
    attention_backend: str = "auto"
    apply_rope_fusion: bool = True
    bias_activation_fusion: bool = True
    bias_dropout_fusion: bool = True
    masked_softmax_fusion: bool = True
    cross_entropy_loss_fusion: bool = True
    cross_entropy_fusion_impl: str = "native"
    gradient_accumulation_fusion: bool = True
    calculate_per_token_loss: bool = False
    init_model_with_meta_device: bool = False
    use_cpu_initialization: bool = False
    post_layer_norms: bool = False
    """Gemma 2/3: extra norms after attention and MLP."""
    model_class: str = "GPTModelProvider"
    fp8: Fp8Settings | None = None
    mla: MlaSettings | None = None
    moe: MoeSettings | None = None
    mtp_num_layers: int = 0
    """Depths of multi-token prediction, all on the last stage."""

    def has_experts(self, layer: int) -> bool:
        """Whether this layer of the whole model is a mixture of experts."""
        return self.moe is not None and self.moe.pattern[layer] == 1


@dataclass(frozen=True, slots=True)
class ParallelSettings:
    """How the ranks are laid out. Data-parallel size = world_size / (t p c)."""

    world_size: int
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    virtual_pipeline_model_parallel_size: int | None = None
    pipeline_model_parallel_layout: str | tuple[tuple[str, ...], ...] | None = None
    microbatch_group_size_per_vp_stage: int | None = None
    """Contiguous microbatches of a virtual stage; None = the number of pipeline stages."""
    overlap_p2p_comm: bool = False

    @property
    def num_model_chunks(self) -> int:
        """Model chunks a rank; 1 without interleaving."""
        interleaved = self.pipeline_model_parallel_size > 1
        return (self.virtual_pipeline_model_parallel_size or 1) if interleaved else 1

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // (
            self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        )

    @property
    def data_context_parallel_size(self) -> int:
        """Ranks that shard dense states: DP * CP."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def expert_data_parallel_size(self) -> int:
        """Ranks that hold the same experts, and shard their states: world / (PP EP ETP)."""
        return self.world_size // (
            self.pipeline_model_parallel_size * self.expert_model_parallel_size * self.expert_tensor_parallel_size
        )

    @property
    def weight_split(self) -> tuple[int, int, int]:
        """Over how many ranks weights are split: TP, EP, ETP."""
        return self.tensor_model_parallel_size, self.expert_model_parallel_size, self.expert_tensor_parallel_size


@dataclass(frozen=True, slots=True)
class ShardingSettings:
    """Data parallelism: who keeps which state, and the buffers around communication."""

    strategy: str
    """ddp | distopt | no_shard | optim | optim_grads | optim_grads_params (the last four: Megatron FSDP)."""
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    bucket_size: int | None = None
    """Elements a bucket, as ``_ddp_wrap`` ends up with it; None = one bucket."""
    grad_reduce_in_fp32: bool = True
    average_in_collective: bool = False
    check_for_nan_in_grad: bool = True
    num_distributed_optimizer_instances: int = 1
    suggested_communication_unit_size: int | None = None
    fsdp_double_buffer: bool = False
    main_params_dtype: str | None = "float32"
    main_grads_dtype: str | None = None
    """megatron_fsdp_main_grads_dtype; None = the parameters' dtype."""
    grad_comm_dtype: str | None = None
    use_decoupled_grad: bool = False
    outer_dp_sharding_strategy: str = "no_shard"
    """Megatron FSDP with several instances: "optim" shards main weights and optimizer states over all of them."""

    @property
    def shards_states_over_instances(self) -> bool:
        instances = self.num_distributed_optimizer_instances
        return instances > 1 and self.strategy == "optim_grads_params" and self.outer_dp_sharding_strategy == "optim"

    @property
    def is_megatron_fsdp(self) -> bool:
        return self.strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params")


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    optimizer: str = "adam"
    use_precision_aware_optimizer: bool = False
    main_params_dtype: str = "float32"
    main_grads_dtype: str = "float32"
    exp_avg_dtype: str = "float32"
    exp_avg_sq_dtype: str = "float32"
    store_param_remainders: bool = True
    clip_grad: float = 1.0
    clipping_active: bool = True
    """Whether the gradient norm exceeds clip_grad in the step looked at: then clipping makes a temporary (see
    ``estimator.sharding.base``). Nobody knows before the run, so True is assumed."""


@dataclass(frozen=True, slots=True)
class RecomputeSettings:
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: tuple[str, ...] = ()
    distribute_saved_activations: bool = False


@dataclass(frozen=True, slots=True)
class BatchSettings:
    micro_batch_size: int
    global_batch_size: int

    def num_microbatches(self, data_parallel_size: int) -> int:
        """Microbatches one rank runs in a step."""
        return max(1, self.global_batch_size // (self.micro_batch_size * data_parallel_size))


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """What is outside the model but takes or shapes memory."""

    params_dtype: str = "bfloat16"
    expandable_segments: bool = False
    allocator_source: str = "PyTorch's default"
    empty_unused_memory_level: int = 0
    cuda_device_max_connections: str | None = None
    checkpoint_save: bool = True
    check_for_nan_in_loss: bool = True
    cublas_workspace_config: str | None = None
    """CUBLAS_WORKSPACE_CONFIG; None = torch's default sizes."""

    @property
    def allocator(self) -> str:
        """Setting of the caching allocator: "default" or "expandable_segments"."""
        return "expandable_segments" if self.expandable_segments else "default"


@dataclass(frozen=True, slots=True)
class Stack:
    """Software the job runs on; memory behaviour is keyed on it where it differs."""

    megatron_core: str = "0.19.2"
    megatron_bridge: str = "0.6.2"
    transformer_engine: str = "2.12.0"
    torch: str = "2.11.0"


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything the estimate is a function of, beside the cluster."""

    model: ModelSettings
    parallel: ParallelSettings
    sharding: ShardingSettings
    optimizer: OptimizerSettings
    recompute: RecomputeSettings
    batch: BatchSettings
    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)
    stack: Stack = field(default_factory=Stack)
    moe_load_imbalance: float = 1.0
    """Tokens that the experts of the fullest rank receive, over the mean of all ranks: an assumption."""

    @property
    def num_microbatches(self) -> int:
        return self.batch.num_microbatches(self.parallel.data_parallel_size)
