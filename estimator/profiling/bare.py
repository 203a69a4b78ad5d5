"""Lets ``estimator.job.settings`` be imported where what reads job documents (YAML, catalogue) cannot be.

A GPU machine without registries has torch and numpy; the profiler needs the dataclasses of ``Settings`` and no more
of ``estimator.job``. Importing this module stands in an empty ``estimator.job`` there, and does nothing elsewhere.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path


def provide_settings() -> bool:
    """True if an empty package had to stand in for ``estimator.job``."""
    try:
        importlib.import_module("estimator.job")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("estimator"):
            raise
        for name in [name for name in sys.modules if name.startswith("estimator.job")]:
            del sys.modules[name]
        package = types.ModuleType("estimator.job")
        package.__path__ = [str(Path(__file__).resolve().parents[1] / "job")]
        sys.modules["estimator.job"] = package
        return True
    return False


provide_settings()
