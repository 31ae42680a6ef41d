"""Backends by name: those here, those that users register, and those of installed packages."""

from __future__ import annotations

from typing import Final

from perfladder.backend.base import Backend
from perfladder.registry import Registry

_OWN: Final = {
    "eager": "perfladder.backend.eager:TorchEagerBackend",
    "inductor_aot": "perfladder.backend.inductor_aot:TorchInductorAotBackend",
    "inductor_jit": "perfladder.backend.inductor_jit:TorchInductorJitBackend",
    "kernel_selector": "perfladder.backend.kernel_selector:KernelSelectorBackend",
    "onnxruntime": "perfladder.backend.onnxruntime:ONNXRuntimeBackend",
    "tensorrt": "perfladder.backend.tensorrt:TensorRTBackend",
    "torch_tensorrt_aot": "perfladder.backend.torch_tensorrt_aot:TorchTensorRTAotBackend",
    "torch_tensorrt_jit": "perfladder.backend.torch_tensorrt_jit:TorchTensorRTJitBackend",
    "torchao": "perfladder.backend.torchao:TorchAOBackend",
}
_backends: Final = Registry[Backend](
    Backend,  # type: ignore[type-abstract]
    _OWN,
    group="perfladder.backends",
    noun="backend",
    base="pl.backend.Backend",
    register="pl.backend.register_backend",
)


def register_backend(kind: type[Backend]) -> type[Backend]:
    """Make a backend known by its name; usable as a decorator.

    Raises:
        InputError: It is no backend, has no name, or the name belongs to another one.
    """
    return _backends.register(kind)


def find_backend(name: str) -> type[Backend]:
    """The backend of that name.

    Raises:
        InputError: There is none; near names are told.
    """
    return _backends.find(name)
