"""Runs code written for CUDA on a CPU build of torch, so that mistakes are found before GPU time is spent.

A rehearsal with tiny models: devices named "cuda" become the CPU, streams and events do nothing. It measures nothing.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


class _Stream:
    """A CUDA stream or event that is always done."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0
    device_type = 1

    def __init__(self, *_arguments: Any, **_named: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_details: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, *_arguments: Any) -> _Stream:
        return self

    def elapsed_time(self, _other: Any) -> float:
        return 0.0

    def __getattr__(self, _name: str) -> Any:
        return lambda *_arguments, **_named: None


def _on_cpu(value: Any) -> Any:
    import torch

    if isinstance(value, str) and value.startswith("cuda"):
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


class _Module(types.ModuleType):
    """A package whose every attribute is a harmless decorator, type and value at once."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name, side_effect=_decorate)


def _decorate(*arguments: Any, **_named: Any) -> Any:
    return arguments[0] if arguments and callable(arguments[0]) else _decorate


def provide_triton() -> None:
    """Megatron-Core imports triton when it is imported itself; CPU builds of torch come without it."""
    if not hasattr(typing, "override"):  # Python 3.11
        typing.override = lambda function: function  # type: ignore[attr-defined]
    if importlib.util.find_spec("triton") is not None:
        return
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    importlib.import_module("torch._dynamo")  # looks for the real triton, so it comes first
    importlib.import_module("torch._inductor.utils")
    for name in ("triton", "triton.language", "triton.language.extra", "triton.language.extra.cuda"):
        module = _Module(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        vars(module)["__version__"] = "0.0"
        sys.modules[name] = module
    sys.modules["triton"].language = sys.modules["triton.language"]  # type: ignore[attr-defined]


@contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """While active, torch's CUDA calls act on the CPU (a build of torch without CUDA is enough)."""
    provide_triton()
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.overrides import TorchFunctionMode

    class Redirect(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            named = dict(kwargs or {})
            name = getattr(function, "__name__", "")
            if name == "cuda":
                return args[0]
            if "device" in named:
                named["device"] = _on_cpu(named["device"])
                if isinstance(named["device"], int):
                    named["device"] = "cpu"
            if name == "to":
                args = tuple(_on_cpu(value) for value in args)
            if name == "pin_memory":
                return args[0]
            if name == "record_stream":
                return None
            if name == "backward":
                with self:  # recomputation builds tensors inside; the mode is off while a function runs
                    return _backward(torch, *args, **named)
            result = function(*args, **named)
            if name == "type" and isinstance(result, str):  # the optimizer tells parameters by their type's name
                return result.replace("torch.", "torch.cuda.", 1)
            return result

    stream = _Stream()
    replacements: dict[str, Any] = {
        "Stream": _Stream,
        "Event": _Stream,
        "current_device": lambda: 0,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda *_: stream,
        "set_device": lambda *_: None,
        "set_stream": lambda *_: None,
        "device_count": lambda: 1,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "get_device_capability": lambda *_: (9, 0),
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "is_current_stream_capturing": lambda: False,
        "get_device_properties": lambda *_: mock.Mock(total_memory=1 << 40, multi_processor_count=1, name="cpu"),
    }
    generator = mock.patch.object(torch.cuda.random, "get_rng_state", replacements["get_rng_state"])
    from_group = DeviceMesh.from_group

    def from_group_on_cpu(group: Any, device_type: str, *rest: Any, **named: Any) -> Any:
        # torch FSDP2 (one group) asks that parameters lie on its mesh's device; Megatron FSDP (a list) does not look.
        device_type = device_type if isinstance(group, list) else "cpu"
        return from_group(group, device_type, *rest, **named)

    mesh = mock.patch.object(DeviceMesh, "from_group", from_group_on_cpu)
    queue = mock.patch.object(torch.cuda, "_lazy_call", return_value=None)
    with mock.patch.multiple(torch.cuda, **replacements), generator, mesh, queue, _tensor_cuda(torch), Redirect():
        yield


def _backward(torch: Any, tensors: Any, gradients: Any = None, *_rest: Any, **named: Any) -> None:
    """``torch.autograd.backward`` without its own look for modes, which would come back here."""
    gradients = gradients if gradients is not None else named.get("grad_tensors", named.get("gradient"))
    tensors = tuple(tensors) if isinstance(tensors, tuple | list) else (tensors,)
    given = tuple(gradients) if isinstance(gradients, tuple | list) else (gradients,) * len(tensors)
    seeds = tuple(torch.ones_like(t) if g is None else g for t, g in zip(tensors, given, strict=True))
    torch.autograd.Variable._execution_engine.run_backward(
        tensors, seeds, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


@contextmanager
def _tensor_cuda(torch: Any) -> Iterator[None]:
    """Modules and tensors stay where they are when they are sent to CUDA."""
    identity = mock.patch.object(torch.nn.Module, "cuda", lambda self, *_arguments, **_named: self)
    with identity, mock.patch.object(torch.Tensor, "cuda", lambda self, *_arguments, **_named: self):
        yield
