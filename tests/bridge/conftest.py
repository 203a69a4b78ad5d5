"""The real Megatron-Bridge for tests marked ``bridge``: recipes, three ways to apply an override, validation.

It runs on the CPU, with placeholders for GPU-only packages (``scripts/bridge_stubs.py``). Recipes that ask Hugging
Face for a ``config.json`` get one made from ``hf_dimensions.json``. Where Bridge is not installed every such test is
skipped by the top-level conftest.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # modules that several tests here share
SCRIPTS = HERE.parent.parent / "scripts"
ENVIRONMENT = {"RANK": "0", "LOCAL_RANK": "0"}
CLEARED = ("CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_CPU_OFFLOAD_V1", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def write_hf_configs(folder: Path) -> None:
    """One ``ORG/NAME/config.json`` for each row of the table."""
    table = json.loads((HERE / "hf_dimensions.json").read_text())
    for name, (family, *row) in table["models"].items():
        *dimensions, extra = row
        config = {**table["families"][family], **dict(zip(table["columns"], dimensions, strict=True)), **extra}
        config |= {"hidden_act": "silu", "initializer_range": 0.02, "torch_dtype": "bfloat16", "attention_dropout": 0.0}
        if factor := config.pop("rope_factor", None):
            config["rope_scaling"] = {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config))


class RealBridge:
    """megatron-bridge as installed. The process's environment stays as it was."""

    def __init__(self, folder: Path, catalogue: ModuleType) -> None:
        self.folder = folder
        self.plain: Callable[[Any], Any] = catalogue.plain

    def recipe(self, name: str, module: str) -> Any:
        """A fresh ConfigContainer."""
        return getattr(importlib.import_module(module), name)()

    def with_python(self, cfg: Any, text: str | None) -> Any:
        """The Python form, executed as in a user's script."""
        if text is not None:
            exec(compile(text, "<override>", "exec"), {"cfg": cfg})
        return cfg

    def with_cli(self, cfg: Any, arguments: list[str]) -> Any:
        """The command-line form, through Bridge's own code."""
        from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

        return process_config_with_overrides(cfg, cli_overrides=arguments or None)

    def with_yaml(self, cfg: Any, text: str | None) -> Any:
        """The YAML form, through Bridge's own merge."""
        from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

        path = None
        if text is not None:
            path = self.folder / "override.yaml"
            path.write_text(text)
        return process_config_with_overrides(cfg, config_filepath=None if path is None else str(path))

    def validated(self, cfg: Any, world_size: int, env: Mapping[str, str | None]) -> tuple[Any, dict[str, str]]:
        """``runtime_config_update`` on that many ranks with ``env`` exported: (config, environment after it)."""
        from megatron.bridge.training.config import runtime_config_update

        with environment(world_size, env), contextlib.redirect_stdout(io.StringIO()):
            runtime_config_update(cfg)
            return cfg, dict(os.environ)

    def document(self, cfg: Any) -> Any:
        """The config as the document that ``estimator.job`` works on."""
        return self.plain(cfg)


@contextlib.contextmanager
def environment(world_size: int, env: Mapping[str, str | None]) -> Iterator[None]:
    """The process's environment as torchrun and the launch form would leave it, for the time of a ``with``."""
    before = dict(os.environ)
    try:
        for name in CLEARED:
            os.environ.pop(name, None)
        os.environ.update(ENVIRONMENT, WORLD_SIZE=str(world_size))
        for name, value in env.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def load_bridge(folder: Path) -> RealBridge:
    """The real package, imported; ``folder`` takes what it reads and writes.

    OOMBUDSMAN_HF_CONFIGS names a folder with more ``ORG/NAME/config.json`` files.
    """
    write_hf_configs(folder / "hf")
    if more := os.environ.get("OOMBUDSMAN_HF_CONFIGS"):
        shutil.copytree(more, folder / "hf", dirs_exist_ok=True)
    sys.path.insert(0, str(SCRIPTS))
    try:
        catalogue = importlib.import_module("regenerate_catalog")
        importlib.import_module("bridge_stubs").prepare(folder / "hf")
    finally:
        sys.path.remove(str(SCRIPTS))
    return RealBridge(folder, catalogue)


@pytest.fixture(scope="session")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> RealBridge:
    """The real package, imported once for the session."""
    return load_bridge(tmp_path_factory.mktemp("bridge"))
