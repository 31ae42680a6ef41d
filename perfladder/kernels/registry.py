"""Kernel providers by name, and those that are tried where nobody names any."""

from __future__ import annotations

import importlib
from typing import Final

from perfladder.kernels.base import KernelProvider
from perfladder.registry import Registry

_OWN: Final = {
    "channels_last": "perfladder.kernels.channels_last:ChannelsLastConvolutionKernelProvider",
    "compiled": "perfladder.kernels.compiled:CompiledCallKernelProvider",
    "diffusers_attention": "perfladder.kernels.diffusers_attention:DiffusersAttentionKernelProvider",
    "flash_attention": "perfladder.kernels.flash_attention:FlashAttentionKernelProvider",
    "sage_attention": "perfladder.kernels.flash_attention:SageAttentionKernelProvider",
    "torch_sdpa": "perfladder.kernels.torch_sdpa:TorchSDPAKernelProvider",
}
_providers: Final = Registry[KernelProvider](
    KernelProvider,  # type: ignore[type-abstract]
    _OWN,
    group="perfladder.kernel_providers",
    noun="kernel provider",
    base="pl.kernels.KernelProvider",
    register="pl.kernels.register_provider",
)


def register_provider(kind: type[KernelProvider]) -> type[KernelProvider]:
    """Make a provider known by its name, so that plans with it can be loaded; usable as a decorator.

    Raises:
        InputError: It is no provider, has no name, or the name belongs to another one.
    """
    return _providers.register(kind)


def find_provider(name: str) -> type[KernelProvider]:
    """The provider of that name.

    Raises:
        InputError: There is none; near names are told.
    """
    return _providers.find(name)


def default_providers() -> list[KernelProvider]:
    """What is tried where nobody names providers; what is missing here says so when it is tried.

    `CompiledCallKernelProvider` is not among them: each form of call takes it seconds.
    """
    kernels = importlib.import_module("perfladder.kernels")
    return [
        *(kernels.TorchSDPAKernelProvider(backend=name) for name in ("flash", "efficient", "cudnn", "math")),
        kernels.FlashAttentionKernelProvider(),
        kernels.FlashAttentionKernelProvider(version=3),
        kernels.FlashAttentionKernelProvider(version=4),
        kernels.SageAttentionKernelProvider(),
        kernels.ChannelsLastConvolutionKernelProvider(),
    ]
