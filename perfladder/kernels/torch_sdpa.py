"""One of torch's own kernels for attention, where torch would take another one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import torch
from pydantic import field_validator
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from perfladder._torch_private import record_operators, sdpa_math_operator
from perfladder.functional.samples import copied_arguments
from perfladder.kernels.attention import ATTENTION, AttentionCall
from perfladder.kernels.base import KernelProvider, KernelProviderConfig

if TYPE_CHECKING:
    from perfladder.functional.samples import Arguments

Kernel = Literal["flash", "efficient", "cudnn", "math"]

_BACKENDS: Final = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_DEVICES: Final = {
    "flash": ("cpu", "cuda"),
    "efficient": ("cuda",),
    "cudnn": ("cuda",),
    "math": ("cpu", "cuda"),
}
_settings_lock: Final = threading.Lock()


class TorchSDPAConfig(KernelProviderConfig):
    """Options of torch's kernels for attention."""

    backend: Kernel = "flash"

    @field_validator("backend", mode="before")
    @classmethod
    def _by_member(cls, value: Any) -> Any:
        """Members of torch's own enumeration are taken too."""
        return next((name for name, member in _BACKENDS.items() if value is member), value)


class TorchSDPAKernelProvider(KernelProvider):
    """The kernel that torch takes under `torch.nn.attention.sdpa_kernel`.

    That setting is the process's, so that other threads would see it. It is made once, when the call is prepared: what
    torch does under it is recorded as operators, and these are what later calls run.
    """

    name = "torch_sdpa"
    functions = (ATTENTION,)
    config_class: ClassVar = TorchSDPAConfig

    def why_not(self, device: torch.device) -> str | None:
        """Some of the kernels are of a GPU only."""
        devices = _DEVICES[self.config.backend]
        if device.type not in devices:
            return f"torch has its {self.config.backend} kernel on {' and '.join(devices)}, not on {device.type}"
        return None

    def prepare(self, samples: Sequence[Arguments]) -> None:
        """Record what torch runs.

        Raises:
            RuntimeError: Torch has no such kernel for this call.
        """
        args, kwargs = copied_arguments(samples[0])
        mask = AttentionCall(*args, **kwargs).attn_mask
        # The operator adds its mask; one of flags has to be made numbers first, as what is recorded does.
        is_added = mask is None or mask.dtype != torch.bool
        math = sdpa_math_operator() if self.config.backend == "math" and is_added else None
        self._run: Callable[..., Any]
        if math is not None:
            self._run = _of_operator(math)
        else:
            with _settings_lock, torch.no_grad(), sdpa_kernel(_BACKENDS[self.config.backend]):
                self._run = _recorded(args, kwargs)
        self._run(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the recorded operators."""
        return self._run(*args, **kwargs)


def _of_operator(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of matrix products; one operator costs the host less than all that it is made of."""

    def run(*args: Any, **kwargs: Any) -> Any:
        call = AttentionCall(*args, **kwargs)
        output, _ = operator(
            call.query,
            call.key,
            call.value,
            call.attn_mask,
            call.dropout_p,
            call.is_causal,
            scale=call.scale,
            enable_gqa=call.enable_gqa,
        )
        return output

    return run


def _recorded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """What torch does with these arguments; numbers and flags are built in, tensors are taken in their order."""
    places = [index for index, value in enumerate(args) if isinstance(value, torch.Tensor)]
    names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]

    def attention(*tensors: torch.Tensor) -> torch.Tensor:
        by_place, by_name = list(args), dict(kwargs)
        for index, tensor in zip(places, tensors[: len(places)], strict=True):
            by_place[index] = tensor
        by_name.update(zip(names, tensors[len(places) :], strict=True))
        return scaled_dot_product_attention(*by_place, **by_name)

    # Apart, since what is one tensor here may be several in another call.
    tensors = [args[index].clone() for index in places] + [kwargs[name].clone() for name in names]
    recorded = record_operators(attention, tensors)

    def run(*args: Any, **kwargs: Any) -> Any:
        return recorded(*[args[index] for index in places], *[kwargs[name] for name in names])

    return run
