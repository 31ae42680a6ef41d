"""Which values are taken apart to find the tensors inside: containers of Python and of libraries, and users' classes.

Libraries are not imported for this: a class of a library that nobody has loaded cannot be the class of a value.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import optree
import torch

from perfladder.errors import InputError
from perfladder.tuning.config import config

NAMESPACE: Final = "perfladder"
"""Of our classes in optree's registry, apart from what other libraries registered there."""

MAPPINGS: Final = frozenset({dict, collections.OrderedDict, collections.defaultdict})
SEQUENCES: Final = frozenset({list, tuple, collections.deque})
Parts = dict[Any, Any]

_INTEGRATIONS: Final = ("transformers", "diffusers")
"""Libraries whose own classes (outputs, caches) are looked into unless `config` says otherwise."""


@dataclass(frozen=True)
class Container:
    """How values of one class are taken apart and put together again.

    Attributes:
        parts: Gives the parts of a value by name.
        rebuild: Makes a value like another one, of other parts.
        has_keys: Whether parts are reached as `value["name"]` and not as `value.name`.
        library: The library whose integration this is part of, which `config` can switch off.
    """

    parts: Callable[[Any], Parts]
    rebuild: Callable[[Any, Parts], Any]
    has_keys: bool = False
    library: str | None = None


_known: dict[type, Container] = {}
_adding = threading.Lock()


def register_input_type(
    cls: type, flatten: Callable[[Any], Mapping[str, Any]], unflatten: Callable[[dict[str, Any]], Any]
) -> type:
    """Let tuning see the tensors inside objects of your class that a module takes or returns.

    It counts for the class itself and not for classes derived from it. Dataclasses, named tuples and mappings need it
    only where their fields are not what should be seen.

    Args:
        cls: The class.
        flatten: Takes an object, returns its parts by name: tensors, containers, settings.
        unflatten: Takes such parts, returns an object.

    Returns:
        The class.

    Raises:
        InputError: It is no class, is one that tuning knows anyway, or a function is missing.
    """
    if not isinstance(cls, type):
        raise InputError(f"register_input_type: expected a class, got a {type(cls).__name__}.")
    if cls in MAPPINGS or cls in SEQUENCES or issubclass(cls, torch.Tensor) or is_scalar_type(cls):
        raise InputError(f"register_input_type: a {cls.__name__} is known already; register classes of your own.")
    if not callable(flatten) or not callable(unflatten):
        raise InputError(f"register_input_type({cls.__name__}): flatten and unflatten have to be functions.")
    _add(cls, Container(functools.partial(_user_parts, flatten), lambda _, parts: unflatten(parts)))
    return cls


def _user_parts(flatten: Callable[[Any], Any], value: Any) -> Parts:
    parts = flatten(value)
    if not isinstance(parts, Mapping) or not all(isinstance(name, str) for name in parts):
        raise InputError(
            f"register_input_type({type(value).__name__}): flatten has to return the parts by name, as "
            f"{{'image': value.image}}, not a {type(parts).__name__}."
        )
    return dict(parts)


def container_of(kind: type) -> Container | None:
    """How values of a class are taken apart; None for leaves and for lists, tuples and named tuples."""
    found = _known.get(kind)
    if found is None:
        found = _recognised(kind)
        if found is not None:
            found = replace(found, library=_library_of(kind))
            _add(kind, found, is_users=False)
    if found is not None and found.library is not None and not getattr(config, f"enable_{found.library}_integration"):
        return None
    return found


def _library_of(kind: type) -> str | None:
    packages = {base.__module__.partition(".")[0] for base in kind.__mro__}
    return next((library for library in _INTEGRATIONS if library in packages), None)


def is_sequence_type(kind: type) -> bool:
    """Whether values of a class have parts by position: lists, tuples, deques, and tuples with names."""
    return kind in SEQUENCES or optree.is_namedtuple_class(kind) or optree.is_structseq_class(kind)


_SCALARS: Final = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, enum.Enum),
)


def is_scalar_type(kind: type) -> bool:
    """Whether values of a class are settings of a call, whose value can be compared."""
    numpy_scalar = getattr(sys.modules.get("numpy"), "generic", None)
    return issubclass(kind, _SCALARS) or (numpy_scalar is not None and issubclass(kind, numpy_scalar))


def _add(kind: type, container: Container, *, is_users: bool = True) -> None:
    with _adding:
        is_known = kind in _known
        if is_known and not is_users:
            return  # another thread met the class at the same time
        if kind not in MAPPINGS:
            if is_known:
                optree.unregister_pytree_node(kind, namespace=NAMESPACE)
            optree.register_pytree_node(
                kind,
                functools.partial(_flatten, container),
                _rebuild,
                path_entry_type=optree.MappingEntry if container.has_keys else optree.GetAttrEntry,
                namespace=NAMESPACE,
            )
        # Last, so that no thread takes the class for known before optree knows it.
        _known[kind] = container


@dataclass(frozen=True)
class _Original:
    """What optree keeps of a value, to make another one like it."""

    container: Container
    value: Any
    names: tuple[Any, ...]

    def rebuilt(self, parts: Any) -> Any:
        return self.container.rebuild(self.value, dict(zip(self.names, parts, strict=True)))


def _flatten(container: Container, value: Any) -> tuple[Any, _Original, Any]:
    parts = container.parts(value)
    return tuple(parts.values()), _Original(container, value, tuple(parts)), tuple(parts)


def _rebuild(original: Any, parts: Any) -> Any:
    return original.rebuilt(parts)


def _recognised(kind: type) -> Container | None:
    if is_scalar_type(kind) or issubclass(kind, (torch.Tensor, torch.nn.Module)):
        return None
    if _is_cache(kind):
        return Container(_cache_parts, _with_attributes)
    if issubclass(kind, dict):
        return Container(dict, _with_items, has_keys=not dataclasses.is_dataclass(kind))
    if issubclass(kind, collections.UserDict):
        return Container(lambda value: dict(value.data), _with_data, has_keys=True)
    if dataclasses.is_dataclass(kind):
        return Container(_fields, _with_fields)
    return None


def _with_items(original: Any, parts: Parts) -> Any:
    """A mapping of the same class; where its items are attributes too, as in outputs of transformers, these follow."""
    kind: Any = type(original)
    base = collections.OrderedDict if isinstance(original, collections.OrderedDict) else dict
    made = kind.__new__(kind)
    for name, part in parts.items():
        base.__setitem__(made, name, part)
    if isinstance(original, collections.defaultdict):
        made.default_factory = original.default_factory
    if hasattr(original, "__dict__"):
        vars(made).update({name: parts.get(name, value) for name, value in vars(original).items()})
    return made


def _with_data(original: Any, parts: Parts) -> Any:
    made = copy.copy(original)
    made.data = parts
    return made


def _fields(value: Any) -> Parts:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)}


def _with_fields(original: Any, parts: Parts) -> Any:
    made = copy.copy(original)
    for name, part in parts.items():
        object.__setattr__(made, name, part)
    return made


_CACHES: Final = (
    ("transformers.cache_utils", "Cache"),
    ("transformers.cache_utils", "CacheLayerMixin"),
    ("transformers.cache_utils", "LinearAttentionCacheLayerMixin"),
)
"""Classes that hold a model's state between calls, with all that are derived from them."""


def _is_cache(kind: type) -> bool:
    roots = (getattr(sys.modules.get(library), name, None) for library, name in _CACHES)
    return any(isinstance(root, type) and issubclass(kind, root) for root in roots)


def _cache_parts(value: Any) -> Parts:
    """The tensors of a cache. Its counters change with every call, but the form of the call does not."""
    return {name: part for name, part in vars(value).items() if _holds_tensors(part)}


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (list, tuple)):
        return any(_holds_tensors(part) for part in value)
    if isinstance(value, dict):
        return any(_holds_tensors(part) for part in value.values())
    known = _known.get(type(value))
    if known is not None:
        return known.parts is _cache_parts
    # Counters, dtypes and the like have no attributes: the dearer question is not asked for them on every call.
    return hasattr(value, "__dict__") and _is_cache(type(value))


def _with_attributes(original: Any, parts: Parts) -> Any:
    """A cache of other tensors; lists without any, such as those of layers to come, are its own as well."""
    made: Any = object.__new__(type(original))
    own = {name: copy.copy(part) if type(part) in _OWN else part for name, part in vars(original).items()}
    vars(made).update({**own, **parts})
    return made


_OWN: Final = (list, dict, set)
