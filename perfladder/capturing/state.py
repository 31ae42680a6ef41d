"""The mutable state that a stage keeps between its calls: counters, caches, buffers, flags."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from perfladder import _torch_private
from perfladder.instrument import Site

_MAX_WEIGHT_BYTES: Final = 1 << 20


def read_state(site: Site) -> dict[str, Any]:
    """State by its dotted path below the stage's owner.

    Of a plain object, such as a scheduler, all attributes. Of a module the train/eval flags, the buffers, and the
    attributes of it and of every module inside. Parameters come from the factory, and so do persistent buffers above
    1 MiB: quantized weights are such buffers.
    """
    from torch import nn

    owner = site.owner
    if not isinstance(owner, nn.Module):
        return {name: value for name, value in getattr(owner, "__dict__", {}).items() if not callable(value)}
    return {
        f"{path}.{name}" if path else name: value
        for path, module in owner.named_modules()
        for name, value in _own_state(module)
    }


def _own_state(module: Any) -> Iterator[tuple[str, Any]]:
    yield "training", module.training
    yield from _torch_private.small_buffers(module, _MAX_WEIGHT_BYTES).items()
    for name, value in vars(module).items():
        if name not in _torch_private.MODULE_INTERNALS and not callable(value):
            yield name, value


def write_state(site: Site, values: Mapping[str, Any]) -> None:
    """Put state back; what has no owner here is left out.

    Tensors of a module that have the same form are filled in place, so that whoever else holds them agrees.
    """
    import torch
    from torch import nn

    if not isinstance(site.owner, nn.Module):
        vars(site.owner).update(values)
        return
    with torch.no_grad():
        for path, value in values.items():
            owner_path, _, name = path.rpartition(".")
            with contextlib.suppress(AttributeError):
                _write(site.owner.get_submodule(owner_path), name, value)


def _write(owner: Any, name: str, value: Any) -> None:
    import torch

    current = getattr(owner, name, None)
    if isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor) and _same_form(current, value):
        # Refused for tensors that overlap themselves, and for those of inference mode.
        with contextlib.suppress(RuntimeError):
            current.copy_(value)
            return
    if not _torch_private.set_buffer(owner, name, value):
        vars(owner)[name] = value


def _same_form(left: Any, right: Any) -> bool:
    forms = [(type(t), t.shape, t.dtype, t.device, t.stride()) for t in (left, right)]
    return bool(forms[0] == forms[1])


def weight_changes(site: Site) -> dict[str, int | None]:
    """How often each parameter of the stage was changed in place, as torch counts it."""
    from torch import nn

    if not isinstance(site.owner, nn.Module):
        return {}
    return {name: _torch_private.change_count(weight) for name, weight in site.owner.named_parameters()}
