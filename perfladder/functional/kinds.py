"""What makes two modules the same but for the values of their weights."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import chain

from torch import nn
from torch.nn.parameter import is_lazy


def kinds_of_numbered(modules: Mapping[str, nn.Module]) -> dict[str, Hashable]:
    """Return the kind of each module whose name ends in a number: classes inside, and shapes and dtypes of weights."""
    return {name: _kind(module) for name, module in modules.items() if name.rpartition(".")[2].isdecimal()}


def _kind(module: nn.Module) -> Hashable:
    classes = tuple((name, type(inner).__qualname__) for name, inner in module.named_modules())
    # A lazy weight has no shape; its module never ran.
    weights = tuple(
        (name, () if is_lazy(value) else tuple(value.shape), str(value.dtype))
        for name, value in chain(module.named_parameters(), module.named_buffers())
    )
    return classes, weights
