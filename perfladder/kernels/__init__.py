"""Other kernels for single calls: chosen for each function and form of input, where they are right and faster."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfladder.kernels.base import KernelProvider as KernelProvider
    from perfladder.kernels.base import KernelProviderConfig as KernelProviderConfig
    from perfladder.kernels.channels_last import (
        ChannelsLastConvolutionKernelProvider as ChannelsLastConvolutionKernelProvider,
    )
    from perfladder.kernels.compiled import CompiledCallKernelProvider as CompiledCallKernelProvider
    from perfladder.kernels.diffusers_attention import (
        DiffusersAttentionKernelProvider as DiffusersAttentionKernelProvider,
    )
    from perfladder.kernels.export import export_benchmark as export_benchmark
    from perfladder.kernels.flash_attention import FlashAttentionKernelProvider as FlashAttentionKernelProvider
    from perfladder.kernels.flash_attention import SageAttentionKernelProvider as SageAttentionKernelProvider
    from perfladder.kernels.generator import KernelGenerationResult as KernelGenerationResult
    from perfladder.kernels.generator import KernelGenerator as KernelGenerator
    from perfladder.kernels.optimizer import KernelOptimizer as KernelOptimizer
    from perfladder.kernels.plan import KernelOptimizationPlan as KernelOptimizationPlan
    from perfladder.kernels.registry import default_providers as default_providers
    from perfladder.kernels.registry import find_provider as find_provider
    from perfladder.kernels.registry import register_provider as register_provider
    from perfladder.kernels.torch_sdpa import TorchSDPAKernelProvider as TorchSDPAKernelProvider

_LAZY = {
    "ChannelsLastConvolutionKernelProvider": "channels_last",
    "CompiledCallKernelProvider": "compiled",
    "DiffusersAttentionKernelProvider": "diffusers_attention",
    "FlashAttentionKernelProvider": "flash_attention",
    "KernelGenerationResult": "generator",
    "KernelGenerator": "generator",
    "KernelOptimizationPlan": "plan",
    "KernelOptimizer": "optimizer",
    "KernelProvider": "base",
    "KernelProviderConfig": "base",
    "SageAttentionKernelProvider": "flash_attention",
    "TorchSDPAKernelProvider": "torch_sdpa",
    "default_providers": "registry",
    "export_benchmark": "export",
    "find_provider": "registry",
    "register_provider": "registry",
}

__all__ = [*_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"perfladder.kernels.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'perfladder.kernels' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
