"""Convolutions of images in channels-last layout, which some libraries have better kernels for."""

from __future__ import annotations

from typing import Any

import torch

from perfladder.kernels.base import KernelProvider


class ChannelsLastConvolutionKernelProvider(KernelProvider):
    """Brings input and weight into that layout, and the output back, so that what comes after sees no difference.

    Where many convolutions follow one another, `memory_format="channels_last"` of a backend saves these copies.
    """

    name = "channels_last"
    functions = ("conv2d", "conv_transpose2d")

    def why_not_for(self, *args: Any, **kwargs: Any) -> str | None:
        """Of images only, which are not in that layout already."""
        image = args[0] if args else kwargs.get("input")
        if not isinstance(image, torch.Tensor) or image.dim() != 4:
            return "it takes images of 4 axes"
        if image.is_contiguous(memory_format=torch.channels_last) and not image.is_contiguous():
            return "the input is in channels-last layout already"
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The same function on copies."""
        args = tuple(_channels_last(value) for value in args)
        kwargs = {name: _channels_last(value) for name, value in kwargs.items()}
        return self.original(*args, **kwargs).contiguous()


def _channels_last(value: Any) -> Any:
    is_image = isinstance(value, torch.Tensor) and value.dim() == 4
    return value.contiguous(memory_format=torch.channels_last) if is_image else value
