"""The option of backends to run under autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from perfladder.backend.base import BackendConfig

if TYPE_CHECKING:
    import torch

    from perfladder.tuning.graphs import GraphSpec


class AutocastConfig(BackendConfig):
    """Options of a backend that can run under autocast."""

    autocast_enabled: bool = Field(default=False, description="Run under autocast; outputs get their dtypes back.")
    autocast_dtype: Literal["float16", "bfloat16"] | None = Field(
        default=None, description="None: torch's own choice for the device."
    )

    @model_validator(mode="after")
    def _check(self) -> AutocastConfig:
        if self.autocast_dtype is not None and not self.autocast_enabled:
            raise ValueError("autocast_dtype is given, but autocast_enabled is not True")
        return self


def under_autocast(
    call: Callable[..., Any], config: AutocastConfig, graph: GraphSpec, device: torch.device
) -> Callable[..., Any]:
    """A call under autocast whose outputs have the dtypes that they have without; the call itself if that is not asked.

    Args:
        call: Takes the arguments of the module's forward.
        config: Whether, and in which dtype.
        graph: Has the dtypes of the outputs.
        device: Where it runs.
    """
    if not config.autocast_enabled:
        return call
    import torch

    from perfladder.tuning.tree import map_tensors

    dtype = torch.get_autocast_dtype(device.type)
    if config.autocast_dtype is not None:
        dtype = torch.float16 if config.autocast_dtype == "float16" else torch.bfloat16
    usual = [getattr(torch, output.dtype) for output in graph.outputs]

    def called(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype):
            result = call(*args, **kwargs)
        wanted = iter(usual)

        def restored(tensor: torch.Tensor) -> torch.Tensor:
            before = next(wanted, tensor.dtype)
            return tensor.to(before) if tensor.dtype == dtype and before.is_floating_point else tensor

        return map_tensors(result, restored)

    return called
