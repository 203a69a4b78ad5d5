"""The allocator's settings, and how they are written in PYTORCH_CUDA_ALLOC_CONF.

Source: c10/core/AllocatorConfig.cpp (pytorch/pytorch commit 065861fba759), c10/cuda/CUDAAllocatorConfig.cpp (commit
01f9ef32eae5), AllocatorConfig.h as installed with torch 2.13. Not every option exists in every version between.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

MIB = 1 << 20
NUM_DIVISION_INTERVALS = 16
"""roundup_power2_divisions is kept for sizes from 1 MiB, 2 MiB, ... up to 64 GiB (kRoundUpPowerOfTwoIntervals)."""

_MAX_CHARACTERS = 2000
_TOKEN = re.compile(r"[^,:\[\]]+|[,:\[\]]")
_NUMBER = re.compile(r"[0-9]{1,9}")
_DECIMAL = re.compile(r"[0-9]{0,3}\.?[0-9]{0,12}")
_IGNORED = frozenset(
    {
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "pinned_num_register_threads",
        "pinned_use_background_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb",
        "graph_capture_record_stream_reuse",
    }
)
"""Options that do not change how much device memory is reserved outside CUDA graphs."""


class AllocatorSettingsError(ValueError):
    """A PYTORCH_CUDA_ALLOC_CONF that PyTorch refuses, or that is not modelled; the message says which part."""


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """What of PyTorch's allocator configuration decides reserved bytes."""

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    """Larger blocks are not split; None: no such size."""
    roundup_power2_divisions: tuple[int, ...] = (0,) * NUM_DIVISION_INTERVALS
    """By size interval (1 MiB and less, 2 MiB, ... 32 GiB and more); 0 and 1: no rounding beyond 512 bytes."""
    garbage_collection_threshold: float = 0.0
    """Part of the limit above which old segments are freed; acts only where a memory fraction is set."""
    max_non_split_rounding_bytes: int = 20 * MIB
    large_segment_bytes: int = 20 * MIB
    """Segment size for requests under 10 MiB, and the page size of expandable segments."""
    per_process_memory_fraction: float = 1.0

    def rounded(self, num_bytes: int) -> int:
        """Bytes that a request of ``num_bytes`` takes (round_size)."""
        if num_bytes < 512:
            return 512
        interval = min(max(num_bytes.bit_length() - 21, 0), NUM_DIVISION_INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        if divisions > 1 and num_bytes > 512 * divisions:
            floor = 1 << (num_bytes.bit_length() - 1)
            step = floor >> (divisions.bit_length() - 1)
            return -(-num_bytes // step) * step
        return -(-num_bytes // 512) * 512


DEFAULT = AllocatorSettings()
EXPANDABLE_SEGMENTS = AllocatorSettings(expandable_segments=True)


def parse_alloc_conf(text: str) -> AllocatorSettings:
    """Reads a value of PYTORCH_CUDA_ALLOC_CONF (or PYTORCH_ALLOC_CONF), such as ``expandable_segments:True``.

    Raises AllocatorSettingsError for whatever PyTorch would refuse at start-up, and for the cudaMallocAsync backend.
    """
    if len(text) > _MAX_CHARACTERS:
        raise AllocatorSettingsError(f"longer than {_MAX_CHARACTERS} characters")
    tokens = _Tokens(_TOKEN.findall("".join(text.split())))
    values: dict[str, object] = {}
    while not tokens.at_end():
        name = tokens.take("an option name")
        tokens.expect(":", f"after {_shown(name)}")
        if name in _IGNORED:
            tokens.take(f"a value for {name}")
        elif name == "backend":
            _read_backend(tokens)
        elif name in _READERS:
            field, read = _READERS[name]
            values[field] = read(tokens, name)
        else:
            raise AllocatorSettingsError(f"unrecognized option {_shown(name)}")
        if not tokens.at_end():
            tokens.expect(",", f"after the value of {name}")
            if tokens.at_end():
                raise AllocatorSettingsError("ends with a comma")
    return AllocatorSettings(**values)  # type: ignore[arg-type]


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 60 else text[:57] + "...")


class _Tokens:
    """ConfigTokenizer: words and the signs , : [ ]; spaces do not count."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0

    def at_end(self) -> bool:
        return self._at >= len(self._tokens)

    def take(self, what: str) -> str:
        if self.at_end():
            raise AllocatorSettingsError(f"ends where {what} should follow")
        token = self._tokens[self._at]
        if token in ",:[]" and what != "a value or [":
            raise AllocatorSettingsError(f"{token!r} where {what} should be")
        self._at += 1
        return token

    def expect(self, sign: str, where: str) -> None:
        found = "the end" if self.at_end() else _shown(self._tokens[self._at])
        if self.at_end() or self._tokens[self._at] != sign:
            raise AllocatorSettingsError(f"expected {sign!r} {where}, found {found}")
        self._at += 1

    def accept(self, sign: str) -> bool:
        if not self.at_end() and self._tokens[self._at] == sign:
            self._at += 1
            return True
        return False


def _number(text: str, name: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise AllocatorSettingsError(f"{name}: {_shown(text)} is not a whole number")
    return int(text)


def _read_bool(tokens: _Tokens, name: str) -> bool:
    text = tokens.take(f"True or False for {name}")
    if text not in ("True", "False"):
        raise AllocatorSettingsError(f"{name}: expected True or False, found {_shown(text)}")
    return text == "True"


def _read_mib(tokens: _Tokens, name: str) -> int:
    value = _number(tokens.take(f"a number of MiB for {name}"), name)
    if value < 20:
        raise AllocatorSettingsError(f"{name}: {value} is too small, must be at least 20")
    return value * MIB


def _read_fraction(tokens: _Tokens, name: str) -> float:
    text = tokens.take(f"a fraction for {name}")
    if not _DECIMAL.fullmatch(text) or not any(c.isdigit() for c in text):
        raise AllocatorSettingsError(f"{name}: {_shown(text)} is not a number")
    value = float(text)
    highest = 1.0 if name == "per_process_memory_fraction" else math.nextafter(1.0, 0.0)
    if not 0.0 < value <= highest:
        raise AllocatorSettingsError(f"{name}: {_shown(text)} is out of range, set it in (0, 1)")
    return value


def _power_of_2(value: int, name: str) -> int:
    if value & (value - 1):
        raise AllocatorSettingsError(f"{name}: {value} is not a power of 2")
    return value


def _read_divisions(tokens: _Tokens, name: str) -> tuple[int, ...]:
    """``8``, or by upper end of the interval in MiB: ``[256:1,512:2,>:4]``."""
    if not tokens.accept("["):
        return (_power_of_2(_number(tokens.take(f"a number for {name}"), name), name),) * NUM_DIVISION_INTERVALS
    divisions = [0] * NUM_DIVISION_INTERVALS
    last, first = 0, True
    while not tokens.accept("]"):
        key = tokens.take(f"an interval of {name}")
        tokens.expect(":", f"after the interval {_shown(key)}")
        value = _power_of_2(_number(tokens.take(f"a number for {name}"), name), name)
        if key == ">":
            divisions[last:] = [value] * (NUM_DIVISION_INTERVALS - last)
        else:
            size = _power_of_2(_number(key, name), name)
            last = min(max(size.bit_length() - 1, 0), NUM_DIVISION_INTERVALS - 1)
            if first:
                divisions[:last] = [value] * last
                first = False
            divisions[last] = value
        if not tokens.accept(","):
            tokens.expect("]", f"at the end of {name}")
            break
    return tuple(divisions)


def _read_backend(tokens: _Tokens) -> None:
    backend = tokens.take("a backend")
    if backend == "cudaMallocAsync":
        raise AllocatorSettingsError(
            "backend:cudaMallocAsync is not modelled: the driver allocates, not this allocator"
        )
    if backend != "native":
        raise AllocatorSettingsError(f"unknown backend {_shown(backend)}")


_READERS = {
    "expandable_segments": ("expandable_segments", _read_bool),
    "max_split_size_mb": ("max_split_size_bytes", _read_mib),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _read_mib),
    "large_segment_size_mb": ("large_segment_bytes", _read_mib),
    "garbage_collection_threshold": ("garbage_collection_threshold", _read_fraction),
    "per_process_memory_fraction": ("per_process_memory_fraction", _read_fraction),
    "roundup_power2_divisions": ("roundup_power2_divisions", _read_divisions),
}
"""Option -> field and how its value is read."""
