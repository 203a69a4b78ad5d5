"""What one profiled run is asked to do, and its JSON form.

A job is ``Settings`` (never a Bridge object), so that it runs where Megatron-Bridge is not installed. Fields that
``Settings`` does not know yet travel in the ``extra_*`` dictionaries under Megatron-Core's own names; dtypes there are
strings as in ``Settings``.
"""

from __future__ import annotations

import hashlib
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

from estimator.job.settings import Settings

GIB = 2**30
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ProfileJob:
    """One run of the profiler: one process, one rank."""

    run_id: str
    settings: Settings
    rank: int = 0
    """Rank of the simulated world; ignored in a real run, where the launcher says it."""
    simulate: bool = True
    """One GPU plays rank ``rank`` of ``settings.parallel.world_size`` through torch's fake process group."""
    iterations: int = 2
    memory_cap_bytes: int | None = None
    """What the caching allocator may reserve; None = the whole card."""
    exclusive: bool = False
    """Alone on the card: device use and step time are measured too."""
    trace: bool = False
    """Keep the allocator's history (large: a file of its own)."""
    extra_transformer_config: dict[str, Any] = field(default_factory=dict)
    extra_ddp_config: dict[str, Any] = field(default_factory=dict)
    extra_optimizer_config: dict[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    """Groups that the run was drawn for; no effect on the run."""

    @property
    def allocator(self) -> str:
        return "expandable_segments" if self.settings.runtime.expandable_segments else "default"

    def with_allocator(self, allocator: str) -> ProfileJob:
        """The same job under ``default`` or ``expandable_segments``."""
        if allocator not in ("default", "expandable_segments"):
            raise ValueError(f"unknown allocator setting {allocator!r}: default or expandable_segments")
        runtime = replace(self.settings.runtime, expandable_segments=allocator == "expandable_segments")
        return replace(self, settings=replace(self.settings, runtime=runtime))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _typed(hint: Any, value: Any, path: str) -> Any:
    """``value`` from JSON as the annotation ``hint`` wants it; raises ``ValueError`` naming ``path``."""
    if isinstance(hint, type) and is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ValueError(f"{path}: an object is expected, not {type(value).__name__}")
        return _from_dict(hint, value, path)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        remaining = [a for a in arguments if a is not type(None)]
        if len(remaining) == 1:
            return _typed(remaining[0], value, path)
        return tuple(value) if isinstance(value, list) else value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{path}: a list is expected, not {type(value).__name__}")
        return tuple(tuple(item) if isinstance(item, list) else item for item in value)
    if hint is bool and not isinstance(value, bool):
        raise ValueError(f"{path}: true or false is expected, not {value!r}")
    if hint is int and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"{path}: an integer is expected, not {value!r}")
    if hint is float and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"{path}: a number is expected, not {value!r}")
    if hint is str and not isinstance(value, str):
        raise ValueError(f"{path}: text is expected, not {value!r}")
    return float(value) if hint is float else value


def _from_dict(cls: type[_T], document: Mapping[str, Any], path: str) -> _T:
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(document) - set(hints))
    if unknown:
        raise ValueError(f"{path}: unknown {', '.join(unknown)}")
    arguments = {name: _typed(hints[name], value, f"{path}.{name}") for name, value in document.items()}
    try:
        return cls(**arguments)
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from None


def settings_to_dict(settings: Settings) -> dict[str, Any]:
    """``Settings`` as JSON would hold it, every field written."""
    document: dict[str, Any] = _plain(settings)
    return document


def settings_from_dict(document: Mapping[str, Any]) -> Settings:
    """The inverse of ``settings_to_dict``. Fields left out take their defaults, so that records outlive new fields.

    Raises ``ValueError`` naming the field for an unknown name or a wrong type.
    """
    return _from_dict(Settings, document, "settings")


def job_to_dict(job: ProfileJob) -> dict[str, Any]:
    document: dict[str, Any] = _plain(job)
    return document


def job_from_dict(document: Mapping[str, Any]) -> ProfileJob:
    """One line of a sweep file. Raises ``ValueError`` naming the field."""
    return _from_dict(ProfileJob, document, "job")


def fingerprint(job: ProfileJob) -> str:
    """Twelve hexadecimal digits of what decides the measurement: everything but ``run_id`` and ``tags``."""
    document = {key: value for key, value in job_to_dict(job).items() if key not in ("run_id", "tags")}
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:12]
