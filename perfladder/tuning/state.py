"""What a module keeps between its calls, set back after trials, so that each candidate meets the same module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

import torch
from torch import nn

from perfladder._torch_private import MODULE_INTERNALS, set_buffer, small_buffers

_MAX_WEIGHT_BYTES: Final = 1 << 20
"""Persistent buffers above it count as weights, as those of quantized layers are."""

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))


class ModuleState:
    """Buffers, tensors, counters, flags, lists and dicts of a module and of those inside, as they are now.

    Objects of other classes in its attributes stay as calls leave them.

    Args:
        module: Whose.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = [(part, part.training, dict(_values(part)), set(vars(part))) for part in module.modules()]

    def restore(self) -> None:
        """Set all back; tensors are filled in place, since graphs of a compiler may hold on to their memory."""
        with torch.no_grad():
            for part, is_training, values, names in self._parts:
                part.training = is_training
                for name in [name for name, value in _attributes(part) if name not in names and _is_state(value)]:
                    del vars(part)[name]
                for name, (value, put_back) in values.items():
                    put_back()
                    if not set_buffer(part, name, value):
                        vars(part)[name] = value


def _values(part: nn.Module) -> Iterator[tuple[str, tuple[Any, Callable[[], None]]]]:
    for name, value in (*small_buffers(part, _MAX_WEIGHT_BYTES).items(), *_attributes(part)):
        if _is_state(value):
            yield name, (value, _keeper(value))


def _attributes(part: nn.Module) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(part).items() if name not in MODULE_INTERNALS]


def _is_state(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or type(value) in (*_PLAIN, list, dict, set)


def _keeper(value: Any) -> Callable[[], None]:
    """What gives an object the contents again that it has now."""
    if isinstance(value, torch.Tensor):
        return _tensor_keeper(value)
    kept = value.copy() if type(value) in (list, dict, set) else None

    def put_back() -> None:
        if kept is not None:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(kept)

    return put_back


def _tensor_keeper(tensor: torch.Tensor) -> Callable[[], None]:
    if tensor.device.type == "meta" or tensor.layout != torch.strided or tensor.is_nested:
        return lambda: None
    kept = tensor.detach().clone()

    def put_back() -> None:
        # Compared first: memory that nobody wrote to may be mapped from a file that nobody may write to.
        if tensor.shape != kept.shape or torch.equal(tensor, kept):
            return
        with suppress(RuntimeError):  # refused for tensors of inference mode, and for those that overlap themselves
            tensor.detach().copy_(kept)

    return put_back
