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
    from perfladder.backend.quantization import ONNXAutoCastConfig as ONNXAutoCastConfig
    from perfladder.backend.quantization import ONNXQuantizationConfig as ONNXQuantizationConfig
    from perfladder.backend.quantization import TorchQuantizationConfig as TorchQuantizationConfig
    from perfladder.backend.registry import find_backend as find_backend
    from perfladder.backend.registry import register_backend as register_backend
    from perfladder.backend.tensorrt import TensorRTBackend as TensorRTBackend
    from perfladder.backend.tensorrt import TensorRTBackendConfig as TensorRTBackendConfig
    from perfladder.backend.torch_tensorrt_aot import TorchTensorRTAotBackend as TorchTensorRTAotBackend
    from perfladder.backend.torch_tensorrt_aot import TorchTensorRTAotBackendConfig as TorchTensorRTAotBackendConfig
    from perfladder.backend.torch_tensorrt_jit import TorchTensorRTJitBackend as TorchTensorRTJitBackend
    from perfladder.backend.torch_tensorrt_jit import TorchTensorRTJitBackendConfig as TorchTensorRTJitBackendConfig
    from perfladder.backend.torchao import TorchAOBackend as TorchAOBackend
    from perfladder.backend.torchao import TorchAOBackendConfig as TorchAOBackendConfig
    from perfladder.backend.trt_engines import EngineBuild as EngineBuild
    from perfladder.backend.trt_engines import build_engine as build_engine
    from perfladder.backend.trt_engines import load_engine as load_engine
    from perfladder.backend.trt_profiles import TensorRTProfile as TensorRTProfile

_LAZY = {
    "Backend": "base",
    "BackendConfig": "base",
    "BuildRequest": "base",
    "Built": "base",
    "KernelSelectorBackend": "kernel_selector",
    "KernelSelectorBackendConfig": "kernel_selector",
    "EngineBuild": "trt_engines",
    "ONNXAutoCastConfig": "quantization",
    "ONNXQuantizationConfig": "quantization",
    "ONNXRuntimeBackend": "onnxruntime",
    "ONNXRuntimeBackendConfig": "onnxruntime",
    "TensorRTBackend": "tensorrt",
    "TensorRTBackendConfig": "tensorrt",
    "TensorRTProfile": "trt_profiles",
    "TorchAOBackend": "torchao",
    "TorchAOBackendConfig": "torchao",
    "TorchEagerBackend": "eager",
    "TorchEagerBackendConfig": "eager",
    "TorchInductorAotBackend": "inductor_aot",
    "TorchInductorAotBackendConfig": "inductor_aot",
    "TorchInductorJitBackend": "inductor_jit",
    "TorchInductorJitBackendConfig": "inductor_jit",
    "TorchQuantizationConfig": "quantization",
    "build_engine": "trt_engines",
    "TorchTensorRTAotBackend": "torch_tensorrt_aot",
    "TorchTensorRTAotBackendConfig": "torch_tensorrt_aot",
    "TorchTensorRTJitBackend": "torch_tensorrt_jit",
    "TorchTensorRTJitBackendConfig": "torch_tensorrt_jit",
    "find_backend": "registry",
    "load_engine": "trt_engines",
    "register_backend": "registry",
}

__all__ = [*_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"perfladder.backend.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'perfladder.backend' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
