"""Makes the released ``megatron-bridge`` importable on a machine without a GPU.

Bridge imports Transformer Engine, Triton and a few other CUDA-only packages at module level although building a recipe or
running ``runtime_config_update`` calls none of them.  ``prepare(hf_configs)`` puts placeholders in the place of those that
are not installed, answers ``AutoConfig.from_pretrained`` from a folder of ``ORG/NAME/config.json`` files instead of the
network, and lets torch describe a GPU of the kind that a recipe is written for.  Nothing here is used by the service; it is
for ``regenerate_catalog.py`` and for the tests that compare this project with the real package.
"""

from __future__ import annotations

import abc
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import time
import types
import typing
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ABSENT = (
    "triton",
    "transformer_engine",
    "transformer_engine_torch",
    "modelopt",
    "megatron.energon",
    "webdataset",
    "datasets",
    "PIL",
    "diffusers",
    "torchvision",
    "timm",
    "open_clip",
    "qwen_vl_utils",
)
"""Packages that Bridge imports and that a CPU installation lacks."""

PRETENDED_VERSIONS = {"transformer_engine": "2.17.0"}
"""Versions that ``is_te_min_version`` should see; anything else answers 99."""

CAPABILITY = {
    "a100": ("NVIDIA A100-SXM4-80GB", 8, 0),
    "h100": ("NVIDIA H100 80GB HBM3", 9, 0),
    "b200": ("NVIDIA B200", 10, 0),
    "b300": ("NVIDIA B300", 10, 3),
    "gb200": ("NVIDIA GB200", 10, 0),
    "gb300": ("NVIDIA GB300", 10, 3),
    "vr200": ("NVIDIA VR200", 10, 3),
    "r100": ("NVIDIA R100", 10, 3),
}
"""Device name and compute capability by the GPU kind in a recipe's name."""


class _PlaceholderType(abc.ABCMeta):
    """A class object that tolerates everything module-level code does with an imported name."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return placeholder(f"{cls.__name__}_{name}")

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "_is_placeholder" not in vars(cls):
            return super().__call__(*args, **kwargs)
        decorated = args[0] if len(args) == 1 and not kwargs else None
        return decorated if isinstance(decorated, (type, types.FunctionType)) else placeholder(cls.__name__)


def placeholder(name: str) -> Any:
    """A new class that can be called, subclassed, subscripted or used as a decorator."""
    return _PlaceholderType(name, (), {"_is_placeholder": True, "__module__": __name__})


class _FusedAdam:
    """Accepts the keyword names that ``OptimizerConfig.__post_init__`` looks for (megatron-core 0.19.2)."""

    def __init__(
        self,
        params: Any,
        *,
        master_weight_dtype: Any = None,
        exp_avg_dtype: Any = None,
        exp_avg_sq_dtype: Any = None,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        raise RuntimeError("placeholder: there is no optimizer here")


class _PlaceholderModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _FusedAdam if name == "FusedAdam" else placeholder(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: Sequence[str]) -> None:
        self.roots = tuple(roots)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if any(fullname == root or fullname.startswith(root + ".") for root in self.roots):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _PlaceholderModule(spec.name)
        module.__path__ = []
        module.__version__ = PRETENDED_VERSIONS.get(spec.name.partition(".")[0], "99.0.0")  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def describe_gpu(kind: str | None) -> None:
    """Let torch name a GPU of this kind (default h100); ``torch.cuda.is_available()`` stays as it is."""
    import torch

    name, major, minor = CAPABILITY.get(kind or "h100", CAPABILITY["h100"])
    properties = types.SimpleNamespace(name=name, major=major, minor=minor, total_memory=80 << 30)
    torch.cuda.get_device_properties = lambda *_, **__: properties
    torch.cuda.get_device_name = lambda *_, **__: name
    torch.cuda.get_device_capability = lambda *_, **__: (major, minor)
    torch.cuda.current_device = lambda: 0


def _serve_hf_configs(folder: Path) -> None:
    import transformers

    from megatron.bridge.models.hf_pretrained import safe_config_loader

    safe_config_loader.time = types.SimpleNamespace(sleep=lambda _: None, time=time.time)  # type: ignore[attr-defined]
    original = transformers.AutoConfig.from_pretrained.__func__
    original_generation = transformers.GenerationConfig.from_pretrained.__func__

    def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        local = folder / str(name)
        if (local / "config.json").is_file():
            kwargs.pop("revision", None)
            return original(cls, str(local), *args, **kwargs)
        if Path(str(name)).is_dir():
            return original(cls, name, *args, **kwargs)
        raise OSError(f"no config.json for {name} under {folder}")

    def generation(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        if (folder / str(name)).is_dir():
            raise OSError("no generation_config.json")
        return original_generation(cls, name, *args, **kwargs)

    transformers.AutoConfig.from_pretrained = classmethod(from_pretrained)
    transformers.GenerationConfig.from_pretrained = classmethod(generation)


def _tolerate_missing_quantization_files() -> None:
    """The 0.6.2 wheel lacks ``te_quant.cfg``, which five recipes read: an empty quantization recipe stands in for it."""
    from megatron.core.quantization.quant_config import RecipeConfig

    original = RecipeConfig.from_yaml_file

    def from_yaml_file(path: str) -> Any:
        return original(path) if Path(path).is_file() else RecipeConfig(matchers=[], config_dict={})

    RecipeConfig.from_yaml_file = staticmethod(from_yaml_file)


def prepare(hf_configs: Path | None = None, gpu: str = "h100") -> None:
    """Call before anything imports ``megatron.bridge``; calling again only adds another folder of configurations."""
    if "megatron.bridge" in sys.modules:
        if hf_configs is not None:
            _serve_hf_configs(hf_configs)
        describe_gpu(gpu)
        return
    warnings.filterwarnings("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
    if not hasattr(typing, "override"):  # Python 3.11; Bridge asks for 3.12
        import typing_extensions

        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    import torch
    import torch.utils._triton as torch_triton

    torch_triton.has_triton_package()  # cached before the placeholder could answer
    torch.compile = lambda model=None, **_: model if model is not None else (lambda function: function)
    finder = _Finder(ABSENT)
    sys.meta_path.append(finder)  # last: an installed package wins
    if importlib.util.find_spec("tensorboard") is None:
        for name in ("torch.utils.tensorboard", "torch.utils.tensorboard.writer"):
            sys.modules[name] = finder.create_module(importlib.machinery.ModuleSpec(name, finder, is_package=True))
    logging.disable(logging.CRITICAL)
    import megatron.bridge  # noqa: F401

    _tolerate_missing_quantization_files()
    if hf_configs is not None:
        _serve_hf_configs(hf_configs)
    describe_gpu(gpu)
