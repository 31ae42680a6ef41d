"""The exact form of one call as a key that can be looked up. It is made on every call of a tuned module."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from perfladder.tuning.containers import MAPPINGS, container_of, is_scalar_type, is_sequence_type
from perfladder.tuning.tree import scalar_text

_EXACT: Final = frozenset({int, bool, str, type(None), bytes, torch.dtype, torch.device})
"""Classes whose values are equal only where they are the same, once the class is known."""


def call_key(args: tuple[Any, ...], kwargs: Mapping[str, Any], strict: bool) -> Hashable:
    """The key of a call: dtype and shape of each tensor, classes and names of what holds them, and all settings.

    A key is one flat tuple. Each value begins with its dtype or its class, which says what follows, so that two forms
    never give one key. Keywords and keys count in the order given: another order is another key.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        strict: Whether settings count by value, and not by class alone. Objects that nobody has registered never do.
    """
    key: list[Any] = []
    add = key.append
    for value in args:
        if type(value) is Tensor:
            add(value.dtype)
            add(value.shape)
        else:
            _add(value, key, strict)
    for name, value in kwargs.items():
        add(name)
        if type(value) is Tensor:
            add(value.dtype)
            add(value.shape)
        else:
            _add(value, key, strict)
    return tuple(key)


def _add(value: Any, key: list[Any], strict: bool) -> None:
    kind = type(value)
    if kind is Tensor or kind is Parameter:
        key.append(value.dtype)
        key.append(value.shape)
    elif kind in _EXACT:
        key.append(kind)
        if strict:
            key.append(value)
    elif kind in MAPPINGS:
        _add_items(value, key, strict)
    elif kind is list or kind is tuple:
        _add_sequence(value, key, strict)
    elif kind is float:
        key.append(kind)
        if strict:
            # NaN equals nothing, and -0.0 equals 0.0: both count by their text.
            key.append(value if value and value == value else repr(value))
    else:
        _add_other(value, kind, key, strict)


def _add_items(value: Mapping[Any, Any], key: list[Any], strict: bool) -> None:
    key.append(type(value))
    key.append(len(value))
    for name, part in value.items():
        if type(name) is str:
            key.append(name)
        else:
            key.append(type(name))
            key.append(_settled(name))
        _add(part, key, strict)


def _add_sequence(value: Any, key: list[Any], strict: bool) -> None:
    key.append(type(value))
    key.append(len(value))
    for part in value:
        _add(part, key, strict)


def _add_other(value: Any, kind: type, key: list[Any], strict: bool) -> None:
    if isinstance(value, Tensor):
        key.extend((kind, value.dtype, value.shape))
    elif is_sequence_type(kind):
        _add_sequence(value, key, strict)
    elif (container := container_of(kind)) is not None:
        parts = container.parts(value)
        key.append(kind)
        key.append(len(parts))
        for name, part in parts.items():
            key.append(type(name))
            key.append(_settled(name))
            _add(part, key, strict)
    else:
        key.append(kind)
        if strict and is_scalar_type(kind):
            key.append(_settled(value))


def _settled(value: Any) -> Hashable:
    """Something that can be hashed and equals itself; a key of a mapping that is no setting can be hashed anyway."""
    kind = type(value)
    if kind in _EXACT or isinstance(value, enum.Enum):
        return value
    if isinstance(value, tuple):
        return tuple((type(part), _settled(part)) for part in value)
    return scalar_text(value) if is_scalar_type(kind) else value
