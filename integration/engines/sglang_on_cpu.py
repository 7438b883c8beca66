"""Let SGLang start on a machine without CUDA: stand-ins for modules and calls that only its kernels need.

Imported by every process of its virtual environment (sitecustomize). The HTTP front, tokenizer, scheduler, bootstrap,
Mooncake transfer and detokenizer stay the real code; attention runs on torch; CUDA events and streams do nothing.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from typing import Any, Self

KERNELS = {
    "cutlass",
    "deep_ep",
    "deep_gemm",
    "flashinfer",
    "humming",
    "quack",
    "sgl_kernel",
    "tilelang",
    "torch_memory_saver",
}


class Anything(type):
    """A class whose every attribute is another such class, and which gives itself when called."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {"__init__": lambda *_, **__: None})

    def __call__(cls, *_: Any, **__: Any) -> Any:
        return cls


class KernelModule(types.ModuleType):
    """A module that has every name asked of it."""

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "99.0"
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class KernelFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of ``KERNELS`` and all their submodules."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        """A spec for a stand-in, or None for any other module."""
        if name.partition(".")[0] in KERNELS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """The stand-in, a package."""
        module = KernelModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


class Event:
    """A CUDA event that has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any, **__: Any) -> None: ...

    wait = synchronize = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class Stream(Event):
    """A CUDA stream on which everything has run."""

    cuda_stream = 0
    wait_stream = wait_event = Event.record

    def record_event(self, *_: Any) -> Event:
        return Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


class CudaRuntime:
    """The two calls of the CUDA runtime that pin host memory."""

    def cudaHostRegister(self, *_: Any) -> int:  # noqa: N802 - CUDA's name
        return 0

    cudaHostUnregister = cudaHostRegister  # noqa: N815 - CUDA's name


def without_pinning(function: Any) -> Any:
    """``function`` deaf to ``pin_memory``, which needs CUDA."""

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return call


def patch_torch() -> object:
    """Replace what SGLang calls of CUDA; returns what must stay alive."""
    import torch  # noqa: PLC0415 - the finder must be in place first

    # torchvision's wheel is a CUDA build whose operators do not load beside a CPU torch: declare what its import needs.
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    makers = "arange as_tensor empty empty_like empty_strided full ones rand randn tensor zeros zeros_like"
    for name in makers.split():
        setattr(torch, name, without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    torch.cuda.cudart = CudaRuntime
    torch.cuda.Event, torch.cuda.Stream = Event, Stream
    torch.cuda.stream = lambda *_, **__: contextlib.nullcontext()
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_, **__: Stream()
    torch.cuda.synchronize = lambda *_, **__: None
    return operators


if os.environ.get("SGLANG_ON_CPU") == "on":
    sys.meta_path.append(KernelFinder())
    OPERATORS = patch_torch()
