"""Attention by one of the backends of diffusers' dispatch, which know libraries that are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, field_validator

from perfladder.kernels.attention import ATTENTION, AttentionCall
from perfladder.kernels.base import KernelProvider, KernelProviderConfig
from perfladder.text import clause

if TYPE_CHECKING:
    import torch

    from perfladder.functional.samples import Arguments


class DiffusersAttentionConfig(KernelProviderConfig):
    """Options of diffusers' dispatch."""

    backend: str = Field(default="native", description="As diffusers calls it: flash, sage, xformers, _native_cudnn.")

    @field_validator("backend")
    @classmethod
    def _check(cls, value: str) -> str:
        if "hub" in value.split("_"):
            raise ValueError("backends of the hub download kernels, which perfladder never does; name an installed one")
        return value


class DiffusersAttentionKernelProvider(KernelProvider):
    """`dispatch_attention_fn` of diffusers, for models of any library."""

    name = "diffusers_attention"
    functions = (ATTENTION,)
    config_class: ClassVar = DiffusersAttentionConfig

    def why_not(self, device: torch.device) -> str | None:
        """Diffusers, its backend of that name, and what that needs."""
        if importlib.util.find_spec("diffusers") is None:
            return "diffusers is not installed: pip install diffusers"
        from diffusers.models import attention_dispatch

        backend = self.config.backend
        known = [entry.value for entry in attention_dispatch.AttentionBackendName if "hub" not in entry.value]
        if backend not in known:
            return f"this diffusers has no attention backend {backend!r}; it has {', '.join(known)}"
        try:  # diffusers has no public way to ask for it without setting it
            attention_dispatch._check_attention_backend_requirements(attention_dispatch.AttentionBackendName(backend))
        except (AttributeError, RuntimeError) as error:
            return clause(error)
        return None

    def why_not_for(self, *args: Any, **kwargs: Any) -> str | None:
        """It takes tensors of four axes."""
        num_axes = AttentionCall(*args, **kwargs).query.dim()
        return None if num_axes == 4 else f"it takes tensors of 4 axes, not of {num_axes}"

    def prepare(self, samples: Sequence[Arguments]) -> None:
        """Import the library."""
        from diffusers.models import attention_dispatch

        self._dispatch: Callable[..., Any] = attention_dispatch.dispatch_attention_fn
        self._backend = attention_dispatch.AttentionBackendName(self.config.backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Attention of [B, H, S, D] by a library that takes [B, S, H, D]."""
        call = AttentionCall(*args, **kwargs)
        output = self._dispatch(
            *call.heads_last,
            attn_mask=call.attn_mask,
            dropout_p=call.dropout_p,
            is_causal=call.is_causal,
            scale=call.scale,
            enable_gqa=call.enable_gqa,
            backend=self._backend,
        )
        return output.transpose(1, 2)
