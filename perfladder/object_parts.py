"""What the user's object is made of: its attributes by dotted path, and the modules among its parts."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from perfladder.errors import InputError
from perfladder.text import near_names

if TYPE_CHECKING:
    from torch import nn

_MAX_NESTING: Final = 2
_MAX_DEPTH: Final = 4
"""Attributes, lists and dicts, one in the other, in which references are looked for; modules do not count."""


def named_modules_of(obj: Any) -> list[tuple[str, nn.Module]]:
    """The modules that an object is made of: itself (path ""), or those in its attributes, also in lists and dicts."""
    from torch import nn

    if isinstance(obj, nn.Module):
        return [("", obj)]
    found: dict[int, tuple[str, nn.Module]] = {}
    for path, value in parts_of(obj):
        if isinstance(value, nn.Module):
            found.setdefault(id(value), (path, value))
    return list(found.values())


def attribute_at(obj: Any, path: str, *, field_name: str) -> Any:
    """Follow a dotted path; a part may be an index or key of a container, as in `blocks.0`.

    Raises:
        InputError: There is no such attribute; near names are suggested.
    """
    current = obj
    walked: list[str] = []
    for part in path.split(".") if path else []:
        following = _step(current, part)
        if following is _ABSENT:
            where = ".".join(walked) or f"the target ({type(obj).__name__})"
            raise InputError(
                f"{field_name}: {where} has no {part!r}. {near_names(part, _names_at(current), 'names there')}"
            )
        current = following
        walked.append(part)
    return current


def set_attribute_at(obj: Any, path: str, value: Any, *, field_name: str) -> None:
    """Replace what `attribute_at` finds.

    Raises:
        InputError: The owner lets nobody replace it, as a tuple or a frozen dataclass.
    """
    owner_path, _, name = path.rpartition(".")
    owner = attribute_at(obj, owner_path, field_name=field_name)
    try:
        if isinstance(owner, dict):
            owner[name] = value
        elif name.isdigit() and not hasattr(owner, name):
            owner[int(name)] = value
        else:
            setattr(owner, name, value)
    except (AttributeError, TypeError) as error:
        raise InputError(f"{field_name}: {path!r} cannot be replaced in a {type(owner).__name__}: {error}.") from error


def paths_of(obj: Any, module: nn.Module) -> list[str]:
    """Every path among an object's parts at which this very module lies."""
    return [path for path, value in parts_of(obj) if value is module]


_ABSENT = object()


def _step(current: Any, part: str) -> Any:
    if isinstance(current, dict) and part in current:
        return current[part]
    if part.isdigit() and isinstance(current, (list, tuple)):
        return current[int(part)] if int(part) < len(current) else _ABSENT
    return getattr(current, part, _ABSENT)


def _names_at(current: Any) -> list[str]:
    """What a path could go on with: modules first, since these are what is usually meant."""
    if isinstance(current, dict):
        return [str(key) for key in current]
    if isinstance(current, (list, tuple)):
        return [str(index) for index in range(len(current))]
    modules = list(getattr(current, "_modules", {})) or [path for path, _ in named_modules_of(current) if path]
    own = [name for name in vars(current) if not name.startswith("_")] if hasattr(current, "__dict__") else []
    return list(dict.fromkeys([*modules, *public_methods_of(current), *own]))


def parts_of(obj: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Named parts of an object: its attributes, with plain lists, tuples and dicts opened one level.

    An object that itself holds modules, such as a pipeline inside a wrapper, is opened as well.
    """
    from torch import nn

    for path, value in _attributes(obj):
        yield path, value
        if depth < _MAX_NESTING and not isinstance(value, nn.Module) and value is not obj and _holds_modules(value):
            yield from ((f"{path}.{inner_path}", inner) for inner_path, inner in parts_of(value, depth + 1))


def _holds_modules(value: Any) -> bool:
    from torch import nn

    return any(isinstance(part, nn.Module) for _, part in _attributes(value))


def _attributes(obj: Any) -> Iterator[tuple[str, Any]]:
    own = getattr(obj, "__dict__", None)
    attributes = dict(own) if isinstance(own, dict) else {}
    modules = attributes.get("_modules")
    attributes.update(modules if isinstance(modules, dict) else {})
    for name, value in attributes.items():
        if name.startswith("_"):
            continue
        if isinstance(value, dict):
            yield from (
                (f"{name}.{key}", inner) for key, inner in value.items() if isinstance(key, str) and "." not in key
            )
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}.{index}", inner) for index, inner in enumerate(value))
        elif value is not None and not inspect.isroutine(value) and not isinstance(value, type):
            yield name, value


def children_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Direct children, with containers that have no forward of their own opened."""
    from torch import nn

    found = []
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found += [(f"{name}.{inner}", grandchild) for inner, grandchild in children_of(child)]
        else:
            found.append((name, child))
    return found


def public_methods_of(obj: Any) -> list[str]:
    """Plain methods that the object's own class declares, not those it inherits from a library's base."""
    from torch import nn

    if isinstance(obj, nn.Module):
        return []
    return [n for n, value in vars(type(obj)).items() if not n.startswith("_") and inspect.isfunction(value)]


def named_values(obj: Any, may_enter: Callable[[Any], bool] = lambda _: True) -> Iterator[tuple[str, Any]]:
    """Everything in attributes, lists, dicts, modules, and objects inside, with its path, and the object itself.

    Each object is looked into once; one that lies at several paths comes at each.
    """
    from torch import nn

    seen: set[int] = set()

    def walk(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
        yield path, value
        if depth and id(value) not in seen and may_enter(value):
            seen.add(id(value))
            for name, part in _named_parts(value):
                yield from walk(f"{path}.{name}" if path else name, part, depth - (not isinstance(part, nn.Module)))

    yield from walk("", obj, _MAX_DEPTH)


def _named_parts(value: Any) -> list[tuple[str, Any]]:
    from torch import nn

    from perfladder._torch_private import MODULE_INTERNALS

    if isinstance(value, dict):
        return [(key, part) for key, part in value.items() if isinstance(key, str) and "." not in key]
    if isinstance(value, (list, tuple)):
        return [(str(index), part) for index, part in enumerate(value)]
    if not hasattr(value, "__dict__") or isinstance(value, (type, types.ModuleType)) or inspect.isroutine(value):
        return []
    own = [(name, part) for name, part in list(vars(value).items()) if name not in MODULE_INTERNALS]
    return [*vars(value)["_modules"].items(), *own] if isinstance(value, nn.Module) else own
