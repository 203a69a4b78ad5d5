"""PYTORCH_CUDA_ALLOC_CONF: what is read, and what is refused with which words."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.allocator import (
    DEFAULT,
    EXPANDABLE_SEGMENTS,
    AllocatorSettings,
    AllocatorSettingsError,
    parse_alloc_conf,
)

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", DEFAULT),
        ("expandable_segments:True", EXPANDABLE_SEGMENTS),
        (" expandable_segments : True ", EXPANDABLE_SEGMENTS),
        ("expandable_segments:True,expandable_segments:False", DEFAULT),
        ("max_split_size_mb:128", AllocatorSettings(max_split_size_bytes=128 * MIB)),
        ("garbage_collection_threshold:0.8", AllocatorSettings(garbage_collection_threshold=0.8)),
        ("roundup_power2_divisions:8", AllocatorSettings(roundup_power2_divisions=(8,) * 16)),
        # The example of torch's docs/source/notes/cuda.rst.
        (
            "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
            # ">" also fills the interval named last (parseRoundUpPower2Divisions).
            AllocatorSettings(roundup_power2_divisions=(1,) * 9 + (2,) + (8,) * 6),
        ),
        ("pinned_num_register_threads:8,release_lock_on_cudamalloc:True,backend:native", DEFAULT),
    ],
)
def test_reads(text: str, expected: AllocatorSettings) -> None:
    assert parse_alloc_conf(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("expandable_segments", "expected ':'"),
        ("expandable_segments:", "ends where"),
        ("expandable_segments:true", "expected True or False"),
        ("expandable_segments:True,", "ends with a comma"),
        ("expandable_segments:True max_split_size_mb:64", "expected True or False"),
        ("max_split_size_mb:19", "at least 20"),
        ("max_split_size_mb:-64", "not a whole number"),
        ("max_split_size_mb:1e99", "not a whole number"),
        ("max_split_size_mb:" + "9" * 400, "not a whole number"),
        ("max_split_size_mb:٣٢", "not a whole number"),
        ("garbage_collection_threshold:1.0", "out of range"),
        ("garbage_collection_threshold:nan", "not a number"),
        ("garbage_collection_threshold:.", "not a number"),
        ("roundup_power2_divisions:6", "not a power of 2"),
        ("roundup_power2_divisions:[256:2", "expected ']'"),
        ("roundup_power2_divisions:[300:2]", "not a power of 2"),
        ("backend:cudaMallocAsync", "not modelled"),
        ("backend:jemalloc", "unknown backend"),
        ("speed:fast", "unrecognized option 'speed'"),
        ("a" * 3000, "longer than"),
        ("::::", "where an option name should be"),
        ("\x00:True", r"unrecognized option '\\x00'"),
    ],
)
def test_refuses(text: str, words: str) -> None:
    with pytest.raises(AllocatorSettingsError, match=words.replace("[", r"\[")):
        parse_alloc_conf(text)


PIECES = [*",:[]> 0123456789.", "expandable_segments", "True", "roundup_power2_divisions", "max_split_size_mb"]


@given(st.lists(st.sampled_from(PIECES)).map("".join) | st.text())
def test_whatever_is_written_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(AllocatorSettingsError):
        assert isinstance(parse_alloc_conf(text), AllocatorSettings)


@pytest.mark.parametrize(
    ("num_bytes", "divisions", "expected"),
    [
        (1, 0, 512),
        (512, 0, 512),
        (513, 0, 1024),
        (1200 * MIB, 4, 1280 * MIB),  # the example beside roundup_power2_next_division
        (1024 * MIB, 4, 1024 * MIB),
        (1024 * MIB + 1, 4, 1280 * MIB),
        (3 * MIB, 2, 3 * MIB),
        (1500, 4, 1536),
    ],
)
def test_rounding(num_bytes: int, divisions: int, expected: int) -> None:
    assert AllocatorSettings(roundup_power2_divisions=(divisions,) * 16).rounded(num_bytes) == expected
