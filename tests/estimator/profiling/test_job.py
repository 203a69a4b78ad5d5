"""Jobs survive JSON, and what is wrong in one is named."""

import json
from dataclasses import replace

import pytest

from estimator.job.settings import RecomputeSettings
from estimator.profiling import job_from_dict, job_to_dict, settings_from_dict, settings_to_dict
from estimator.profiling.job import fingerprint

from .jobs import small_job, small_settings


@pytest.mark.parametrize(
    "settings",
    [
        small_settings(),
        small_settings(window_size=(1024, 0)),
        replace(small_settings(), recompute=RecomputeSettings("selective", recompute_modules=("core_attn", "mlp"))),
    ],
)
def test_settings_survive_json(settings):
    assert settings_from_dict(json.loads(json.dumps(settings_to_dict(settings)))) == settings


def test_jobs_survive_json():
    job = small_job(rank=3, memory_cap_bytes=7 * 2**30, extra_transformer_config={"fp8": "hybrid"}, tags=("fp8",))
    assert job_from_dict(json.loads(json.dumps(job_to_dict(job)))) == job


def test_fields_left_out_take_their_defaults():
    document = settings_to_dict(small_settings())
    del document["runtime"], document["stack"], document["sharding"]["check_for_nan_in_grad"]
    assert settings_from_dict(document) == small_settings()


@pytest.mark.parametrize(
    ("section", "field", "value", "named"),
    [
        ("model", "hiden_size", 1, "settings.model: unknown hiden_size"),
        ("model", "hidden_size", "64", "settings.model.hidden_size"),
        ("model", "hidden_size", True, "settings.model.hidden_size"),
        ("model", "add_qkv_bias", 1, "settings.model.add_qkv_bias"),
        ("sharding", "bucket_size", 1.5, "settings.sharding.bucket_size"),
        ("recompute", "recompute_modules", "mlp", "settings.recompute.recompute_modules"),
    ],
)
def test_what_is_wrong_is_named(section, field, value, named):
    document = settings_to_dict(small_settings())
    document[section][field] = value
    with pytest.raises(ValueError, match=named):
        settings_from_dict(document)


def test_a_missing_field_is_named():
    document = settings_to_dict(small_settings())
    del document["model"]["hidden_size"]
    with pytest.raises(ValueError, match="hidden_size"):
        settings_from_dict(document)


def test_fingerprint_says_what_was_measured():
    job = small_job()
    assert fingerprint(replace(job, run_id="other", tags=("x",))) == fingerprint(job)
    assert fingerprint(replace(job, rank=1)) != fingerprint(job)
    assert fingerprint(job.with_allocator("expandable_segments")) != fingerprint(job)


def test_allocator_setting_is_that_of_the_settings():
    job = small_job()
    assert job.allocator == "default"
    assert job.with_allocator("expandable_segments").settings.runtime.expandable_segments
    with pytest.raises(ValueError, match="expandable_segments"):
        job.with_allocator("expandable")
