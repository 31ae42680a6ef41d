"""Methods that were taken from a module before profiling: calls through such a reference go past the observation."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from perfladder.models import ResultWarning
from perfladder.profiling.discover import Part, Sites
from perfladder.profiling.warnings import SHOWN, ProfileWarningCode, warn

_MAX_DEPTH = 2
_MAX_ITEMS = 1000


def find_prebound(obj: Any, sites: Sites, function: Callable[..., Any] | None) -> list[str]:
    """Name the references, such as `'saved' is vae.decode`.

    Looks at the attributes of the object and of its parts, and at what the function refers to: closure, defaults, the
    globals it names, and what a partial holds.
    """
    targets: dict[tuple[int, str | None], str]
    targets = {(id(site.owner), site.method): site.path for site in sites.sites if site.method}
    targets |= {
        (id(part.module), name): _join(part.path, name) for part in sites.parts for name in ("forward", "__call__")
    }
    found: dict[str, None] = {}
    for where, owner, value in _references(obj, sites.parts, function):
        for path in _bound(value, targets, owner):
            found.setdefault(f"{where} is {path}")
    return list(found)


def prebound_warnings(obj: Any, sites: Sites, function: Callable[..., Any] | None = None) -> list[ResultWarning]:
    """Return a warning that names what `find_prebound` finds, if there is any."""
    found = find_prebound(obj, sites, function)
    if not found:
        return []
    message = f"Taken before profiling, so that calls through it are not seen: {', '.join(found[:SHOWN])}."
    return [warn(ProfileWarningCode.PREBOUND_METHOD, message)]


def _references(
    obj: Any, parts: list[Part], function: Callable[..., Any] | None
) -> Iterator[tuple[str, object | None, Any]]:
    holders: list[tuple[str, Any]] = [(part.path, part.module) for part in parts]
    if all(part.module is not obj for part in parts):
        holders.insert(0, ("", obj))
    for path, holder in holders:
        own = getattr(holder, "__dict__", None)
        for name, value in list(own.items()) if isinstance(own, dict) else []:
            yield repr(_join(path, name)), holder, value
    if function is not None:
        for name, value in _referred(function):
            yield f"{name!r} of the inference function", None, value


def _referred(function: Any) -> Iterator[tuple[str, Any]]:
    while isinstance(function, functools.partial):
        yield from ((f"argument {index}", value) for index, value in enumerate(function.args))
        yield from function.keywords.items()
        function = function.func
        yield getattr(function, "__name__", "func"), function
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a cell that is not filled yet
            continue
    yield from (function.__kwdefaults__ or {}).items()
    yield from (("default", value) for value in function.__defaults__ or ())
    yield from ((n, function.__globals__[n]) for n in function.__code__.co_names if n in function.__globals__)


def _bound(
    value: Any, targets: dict[tuple[int, str | None], str], owner: object | None, depth: int = _MAX_DEPTH
) -> Iterator[str]:
    """Find bound methods of observed modules in a value; a module's reference to its own methods is its own affair."""
    if isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, types.MethodType):
        path = targets.get((id(value.__self__), value.__func__.__name__))
        if path is not None and value.__self__ is not owner:
            yield path
    elif depth and isinstance(value, (list, tuple, dict)):
        for inner in islice(value.values() if isinstance(value, dict) else value, _MAX_ITEMS):
            yield from _bound(inner, targets, owner, depth - 1)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
