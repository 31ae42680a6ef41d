"""Ways to make a module faster, one file each; names are imported when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfladder.backend.base import Backend as Backend
    from perfladder.backend.base import BackendConfig as BackendConfig
    from perfladder.backend.base import BuildRequest as BuildRequest
    from perfladder.backend.base import Built as Built
    from perfladder.backend.eager import TorchEagerBackend as TorchEagerBackend
    from perfladder.backend.eager import TorchEagerBackendConfig as TorchEagerBackendConfig
    from perfladder.backend.inductor_aot import TorchInductorAotBackend as TorchInductorAotBackend
    from perfladder.backend.inductor_aot import TorchInductorAotBackendConfig as TorchInductorAotBackendConfig
    from perfladder.backend.inductor_jit import TorchInductorJitBackend as TorchInductorJitBackend
    from perfladder.backend.inductor_jit import TorchInductorJitBackendConfig as TorchInductorJitBackendConfig
    from perfladder.backend.kernel_selector import KernelSelectorBackend as KernelSelectorBackend
    from perfladder.backend.kernel_selector import KernelSelectorBackendConfig as KernelSelectorBackendConfig
    from perfladder.backend.onnxruntime import ONNXRuntimeBackend as ONNXRuntimeBackend
    from perfladder.backend.onnxruntime import ONNXRuntimeBackendConfig as ONNXRuntimeBackendConfig
    from perfladder.backend.registry import find_backend as find_backend
    from perfladder.backend.registry import register_backend as register_backend
    from perfladder.backend.torchao import TorchAOBackend as TorchAOBackend
    from perfladder.backend.torchao import TorchAOBackendConfig as TorchAOBackendConfig

_LAZY = {
    "Backend": "base",
    "BackendConfig": "base",
    "BuildRequest": "base",
    "Built": "base",
    "KernelSelectorBackend": "kernel_selector",
    "KernelSelectorBackendConfig": "kernel_selector",
    "ONNXRuntimeBackend": "onnxruntime",
    "ONNXRuntimeBackendConfig": "onnxruntime",
    "TorchAOBackend": "torchao",
    "TorchAOBackendConfig": "torchao",
    "TorchEagerBackend": "eager",
    "TorchEagerBackendConfig": "eager",
    "TorchInductorAotBackend": "inductor_aot",
    "TorchInductorAotBackendConfig": "inductor_aot",
    "TorchInductorJitBackend": "inductor_jit",
    "TorchInductorJitBackendConfig": "inductor_jit",
    "find_backend": "registry",
    "register_backend": "registry",
}

__all__ = [*_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"perfladder.backend.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'perfladder.backend' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
