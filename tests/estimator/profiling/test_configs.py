"""Arguments of Megatron-Core's classes follow the settings and Bridge's habits."""

from dataclasses import replace

from estimator.profiling import ProfileJob, configs

from .jobs import small_job, small_settings

KNOWN = (
    "num_layers",
    "hidden_size",
    "sequence_parallel",
    "recompute_modules",
    "world_size",
    "tensor_model_parallel_size",
)


def test_fields_are_passed_by_name_and_extras_win():
    job = small_job(extra_transformer_config={"num_moe_experts": 8, "num_layers": 5})
    arguments = configs.transformer_arguments(job, KNOWN)
    assert arguments["hidden_size"] == 64
    assert arguments["num_layers"] == 5
    assert arguments["num_moe_experts"] == 8
    assert arguments["bf16"]
    assert arguments["pipeline_dtype"] == "bfloat16"
    assert "recompute_modules" not in arguments


def test_plain_ddp_has_no_distributed_optimizer():
    ddp = configs.ddp_arguments(ProfileJob("x", small_settings("ddp")))
    assert not ddp["use_distributed_optimizer"]
    assert not ddp["overlap_param_gather"]
    assert "use_megatron_fsdp" not in ddp


def test_megatron_fsdp_takes_its_dtypes_and_optimizer_follows():
    job = ProfileJob("x", small_settings("optim_grads"))
    job = replace(
        job, settings=replace(job.settings, sharding=replace(job.settings.sharding, main_grads_dtype="float32"))
    )
    ddp = configs.ddp_arguments(job)
    assert ddp["data_parallel_sharding_strategy"] == "optim_grads"
    assert ddp["megatron_fsdp_main_grads_dtype"] == "float32"
    optimizer = configs.optimizer_arguments(job, ddp)
    assert optimizer["use_distributed_optimizer"]
    assert "exp_avg_dtype" not in optimizer


def test_one_bucket_survives_ddp_wraps_default():
    job = small_job()
    sharding = replace(job.settings.sharding, bucket_size=None)
    one = configs.ddp_arguments(replace(job, settings=replace(job.settings, sharding=sharding)))
    assert one["bucket_size"] >= 10**15
    off = replace(sharding, overlap_grad_reduce=False)
    assert configs.ddp_arguments(replace(job, settings=replace(job.settings, sharding=off)))["bucket_size"] is None


def test_environment():
    plain = configs.environment_variables(small_job())
    assert plain["PYTORCH_CUDA_ALLOC_CONF"] is None
    assert plain["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    fsdp = configs.environment_variables(ProfileJob("x", small_settings("optim")).with_allocator("expandable_segments"))
    assert fsdp["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert fsdp["CUDA_DEVICE_MAX_CONNECTIONS"] is None


def test_steady_iteration_comes_after_graph_capture():
    assert configs.steady_iteration(small_job(), "none", 3) == 1
    assert configs.steady_iteration(small_job(), "transformer_engine", 3) == 4
