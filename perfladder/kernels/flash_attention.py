"""Attention by the libraries FlashAttention and SageAttention, where they are installed; nothing is downloaded."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from perfladder.kernels.attention import ATTENTION, AttentionCall, why_not_half_precision
from perfladder.kernels.base import KernelProvider, KernelProviderConfig

if TYPE_CHECKING:
    import torch

    from perfladder.functional.samples import Arguments

_LIBRARIES: Final = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}
"""Modules that hold `flash_attn_func`, by FlashAttention's version."""
_INSTALL: Final = {
    2: "pip install flash-attn",
    3: "build it from its sources (folder hopper)",
    4: "install flash-attn-4",
}
_MAX_HEAD_SIZE: Final = 256


class FlashAttentionConfig(KernelProviderConfig):
    """Options of FlashAttention."""

    version: Literal[2, 3, 4] = 2


class FlashAttentionKernelProvider(KernelProvider):
    """`flash_attn_func` of FlashAttention 2, 3 or 4."""

    name = "flash_attention"
    functions = (ATTENTION,)
    config_class: ClassVar = FlashAttentionConfig
    device_types = ("cuda",)

    def why_not(self, device: torch.device) -> str | None:
        """Besides the device: the library."""
        version = self.config.version
        return super().why_not(device) or _missing(_LIBRARIES[version], f"FlashAttention {version}", _INSTALL[version])

    def why_not_for(self, *args: Any, **kwargs: Any) -> str | None:
        """It knows 16-bit numbers and no masks but the causal one."""
        if reason := why_not_half_precision(*args, **kwargs):
            return reason
        size = AttentionCall(*args, **kwargs).query.shape[-1]
        return f"it takes heads of up to {_MAX_HEAD_SIZE}, not of {size}" if size > _MAX_HEAD_SIZE else None

    def prepare(self, samples: Sequence[Arguments]) -> None:
        """Import the library."""
        self._attention: Callable[..., Any] = importlib.import_module(_LIBRARIES[self.config.version]).flash_attn_func

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Attention of [B, H, S, D] by a library that takes [B, S, H, D]; heads may be shared as with `enable_gqa`."""
        call = AttentionCall(*args, **kwargs)
        output = self._attention(*call.heads_last, softmax_scale=call.scale, causal=call.is_causal)
        # Some versions return the logarithms of the sums too.
        return (output[0] if isinstance(output, tuple) else output).transpose(1, 2)


class SageAttentionKernelProvider(KernelProvider):
    """`sageattn` of SageAttention: products of 8-bit integers, which cost accuracy that validation may not accept."""

    name = "sage_attention"
    functions = (ATTENTION,)
    device_types = ("cuda",)

    def why_not(self, device: torch.device) -> str | None:
        """Besides the device: the library."""
        return super().why_not(device) or _missing("sageattention", "SageAttention", "pip install sageattention")

    def why_not_for(self, *args: Any, **kwargs: Any) -> str | None:
        """It knows 16-bit numbers and no masks but the causal one."""
        return why_not_half_precision(*args, **kwargs)

    def prepare(self, samples: Sequence[Arguments]) -> None:
        """Import the library."""
        self._attention: Callable[..., Any] = importlib.import_module("sageattention").sageattn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Attention of [B, H, S, D]."""
        call = AttentionCall(*args, **kwargs)
        return self._attention(
            call.query, call.key, call.value, tensor_layout="HND", is_causal=call.is_causal, sm_scale=call.scale
        )


def _missing(module: str, library: str, remedy: str) -> str | None:
    try:
        is_there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        is_there = False
    return None if is_there else f"{library} is not installed: {remedy}"
