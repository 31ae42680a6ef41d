"""A recorded tensor at other sizes: cut, or filled up with what it holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def resized(tensor: torch.Tensor, sizes: Sequence[int], multipliers: Sequence[int | None]) -> torch.Tensor:
    """A copy of a tensor at other sizes, in the memory format it had; it requires no gradient.

    Where an axis holds several entries for each sample, as inputs doubled for classifier-free guidance do, it consists
    of that many blocks of all samples, and each block is cut or filled up by itself.

    Args:
        tensor: Of any shape.
        sizes: Of the copy.
        multipliers: For each axis, entries for each sample; None for an axis that does not follow the batch.
    """
    result = tensor.detach()
    for axis, (size, times) in enumerate(zip(sizes, multipliers, strict=True)):
        if result.shape[axis] != size:
            result = _resized_axis(result, axis, size, times or 1)
    return result.clone(memory_format=_memory_format(tensor))


def _resized_axis(tensor: torch.Tensor, axis: int, size: int, times: int) -> torch.Tensor:
    old = tensor.shape[axis]
    if old == 0:
        return tensor.new_zeros((*tensor.shape[:axis], size, *tensor.shape[axis + 1 :]))
    if old % times or size % times:
        times = 1
    within = torch.arange(size // times, device=tensor.device) % (old // times)
    starts = torch.arange(times, device=tensor.device) * (old // times)
    return tensor.index_select(axis, (starts[:, None] + within).flatten())


def _memory_format(tensor: torch.Tensor) -> torch.memory_format:
    if not tensor.is_contiguous():
        if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
            return torch.channels_last
        if tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
            return torch.channels_last_3d
    return torch.preserve_format
