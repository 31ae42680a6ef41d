"""Backends by name: those here, those that users register, and those of installed packages."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Final

from perfladder.backend.base import Backend
from perfladder.errors import InputError
from perfladder.text import near_names

_GROUP: Final = "perfladder.backends"
_OWN: Final = {
    "eager": "perfladder.backend.eager:TorchEagerBackend",
    "inductor_aot": "perfladder.backend.inductor_aot:TorchInductorAotBackend",
    "inductor_jit": "perfladder.backend.inductor_jit:TorchInductorJitBackend",
    "onnxruntime": "perfladder.backend.onnxruntime:ONNXRuntimeBackend",
    "tensorrt": "perfladder.backend.tensorrt:TensorRTBackend",
    "torch_tensorrt_aot": "perfladder.backend.torch_tensorrt_aot:TorchTensorRTAotBackend",
    "torch_tensorrt_jit": "perfladder.backend.torch_tensorrt_jit:TorchTensorRTJitBackend",
    "torchao": "perfladder.backend.torchao:TorchAOBackend",
}
_registered: dict[str, type[Backend]] = {}


def register_backend(kind: type[Backend]) -> type[Backend]:
    """Make a backend known by its name; usable as a decorator.

    Raises:
        InputError: It is no backend, has no name, or the name belongs to another one.
    """
    if not (isinstance(kind, type) and issubclass(kind, Backend)):
        raise InputError(f"register_backend: expected a subclass of pl.backend.Backend, got {kind!r}.")
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not name:
        raise InputError(f"register_backend: {kind.__name__} has no name; set the class attribute `name`.")
    known = _registered.get(name)
    is_same = known is not None and (known.__module__, known.__qualname__) == (kind.__module__, kind.__qualname__)
    if name in _OWN or (known is not None and not is_same):
        raise InputError(f"register_backend: the name {name!r} belongs to another backend.")
    _registered[name] = kind
    return kind


def find_backend(name: str) -> type[Backend]:
    """The backend of that name.

    Raises:
        InputError: There is none; near names are told.
    """
    if name in _registered:
        return _registered[name]
    if name in _OWN:
        module, _, attribute = _OWN[name].partition(":")
        found: type[Backend] = getattr(importlib.import_module(module), attribute)
        return found
    installed = {entry.name: entry for entry in entry_points(group=_GROUP)}
    if name in installed:
        found = installed[name].load()
        return register_backend(found)
    known = [*_OWN, *_registered, *installed]
    raise InputError(
        f"There is no backend {name!r}. {near_names(name, known, 'backends')} One of your own is made known by "
        "pl.backend.register_backend, before it is used."
    )
