"""Shared by all tests: which of them this environment can run, and why the others are skipped."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
from hypothesis import settings

# A run in CI tries the same examples every time; runs by hand go on searching.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def _missing(module: str) -> bool:
    try:
        return find_spec(module) is None
    except ModuleNotFoundError:
        return True


# The virtual environment of the real Megatron-Bridge (make bridge) holds no web framework.
collect_ignore = ["app"] if _missing("fastapi") else []


def _cuda_missing() -> bool:
    if _missing("torch"):
        return True
    import torch

    return not torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a package or a device that is not here, with the way to get it."""
    no_bridge = _missing("megatron.bridge") and _missing("megatron.core")
    no_cuda: bool | None = None
    for item in items:
        if item.get_closest_marker("bridge") and no_bridge:
            item.add_marker(pytest.mark.skip(reason="real megatron-bridge not installed here: make bridge-test"))
        if item.get_closest_marker("gpu"):
            no_cuda = _cuda_missing() if no_cuda is None else no_cuda
            if no_cuda:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device and the extra 'profile'"))
