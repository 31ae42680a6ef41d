"""Recorded calls: arguments as they were, of which copies can be had."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from perfladder.tuning.tree import copied


@dataclass(frozen=True, eq=False)
class Sample:
    """The arguments of one call, in memory of its own on the device they were on.

    Attributes:
        args: By position.
        kwargs: By name.
        batch_size: Samples that the recording put into the call; None if it did not tell.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch_size: int | None

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], batch_size: int | None) -> Sample:
        """Copy the arguments of a call; what is no tensor and in no known container stays the same object."""
        copied = copy_arguments(args, kwargs)
        return cls(*copied, batch_size)

    def fresh(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A copy that may be changed."""
        return copy_arguments(self.args, self.kwargs)


def copy_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with copies of their tensors and containers; what lies in two places stays one."""
    copied_args, copied_kwargs = copied((args, kwargs), _copy)
    return copied_args, copied_kwargs


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    # In inference mode a copy of an ordinary tensor would be another kind of tensor, which is compiled for apart.
    with torch.inference_mode(torch.is_inference_mode_enabled() and tensor.is_inference()), torch.no_grad():
        return tensor.detach().clone()
