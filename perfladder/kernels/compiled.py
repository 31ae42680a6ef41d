"""A single call compiled by Inductor, in a module that stays eager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import Field

from perfladder.backend.inductor_jit import compile_call, inductor_is_missing
from perfladder.functional.samples import copied_arguments
from perfladder.kernels.base import KernelProvider, KernelProviderConfig

if TYPE_CHECKING:
    from perfladder.functional.samples import Arguments


class CompiledCallConfig(KernelProviderConfig):
    """Options of a compiled call."""

    functions: tuple[str, ...] = Field(min_length=1, description="Names of the functions to compile calls of.")
    mode: Literal["default", "max-autotune-no-cudagraphs"] | None = None


class CompiledCallKernelProvider(KernelProvider):
    """`torch.compile` of the function alone, once for each form of call; each takes seconds to prepare.

    Inside a module that is compiled as a whole its calls are compiled anyway.
    """

    name = "compiled"
    config_class: ClassVar = CompiledCallConfig
    is_traceable = False

    @property
    def functions(self) -> Sequence[str]:  # type: ignore[override]
        """Those of the config."""
        names: tuple[str, ...] = self.config.functions
        return names

    def why_not(self, device: torch.device) -> str | None:
        """Besides the device: Inductor needs a C++ compiler on a CPU, and Triton on a GPU."""
        return super().why_not(device) or inductor_is_missing(device)

    def prepare(self, samples: Sequence[Arguments]) -> None:
        """Compile, without gradients and in inference mode: the caller may be in either, which torch tells apart."""
        self._call = compile_call(self.original, mode=self.config.mode, dynamic=False, fullgraph=True)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                args, kwargs = copied_arguments(samples[0])
                self._call(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run what was compiled."""
        return self._call(*args, **kwargs)
