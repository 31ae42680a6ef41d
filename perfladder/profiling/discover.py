"""What of the user's object becomes regions: every module, wherever it is held, and the methods it adds."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from torch import nn

from perfladder import _torch_private
from perfladder.instrument import Site
from perfladder.managed import Managed, managed_state

UNTUNED: Final = "untuned_module"
"""Kind of a region that is a module, or a method of one, which nothing of ours has replaced."""
AOT: Final = "aot_module"
JIT: Final = "jit_module"
_MAX_OBJECTS: Final = 3
_MAX_CONTAINERS: Final = 3
# Methods of torch's own layers and containers (`_conv_forward`, `append`) are no entry points, and cost at each call.
_TORCH_LAYERS: Final = "torch.nn.modules."


@dataclass(frozen=True, eq=False)
class Part:
    """One module of the object.

    Attributes:
        path: Where it was found first; empty for the object itself.
        module: The module.
        managed: What it tells if it is a wrapper of ours.
        is_compiled: Whether what is inside runs in a compiled graph.
        is_entered: Whether a wrapper of ours is somewhere inside, so that its parts are regions and it is none.
    """

    path: str
    module: nn.Module
    managed: Managed | None = None
    is_compiled: bool = False
    is_entered: bool = False

    @property
    def kind(self) -> str:
        """Kind of its region's label."""
        if self.managed is None:
            return UNTUNED
        return AOT if self.managed.by == "aot" else JIT

    @property
    def name(self) -> str:
        """Its path, or for the object itself, which has none, the name of its class or wrapper."""
        if self.path:
            return self.path
        return self.managed.name if self.managed else type(_inner(self.module)).__name__

    @property
    def module_type(self) -> str:
        """Qualified class name; of a compiled or wrapped module that of what is inside."""
        if self.managed is not None:
            return self.managed.module_type
        kind = type(_inner(self.module))
        return f"{kind.__module__}.{kind.__qualname__}"


@dataclass(frozen=True, eq=False)
class Sites:
    """The call sites of an object and what their regions are.

    Attributes:
        parts: The modules, in the order found.
        sites: Where calls are observed.
        labels: For each site's path, kind and name of its region.
        owner: For each region id, the part it belongs to.
        entered: Ids of regions whose parts are regions instead.
        exclusive: Ids of the methods of a bare root module: they keep what its parts do not cover.
    """

    parts: list[Part]
    sites: list[Site] = field(default_factory=list)
    labels: dict[str, tuple[str, str]] = field(default_factory=dict)
    owner: dict[str, Part] = field(default_factory=dict)
    entered: set[str] = field(default_factory=set)
    exclusive: set[str] = field(default_factory=set)

    def add(self, part: Part, site: Site, name: str) -> str:
        """Add a site whose region has that name; returns the region's id."""
        region_id = f"{part.kind}:{name}"
        self.sites.append(site)
        self.labels[site.path] = (part.kind, name)
        self.owner[region_id] = part
        return region_id


def find_sites(obj: Any) -> Sites:
    """Find the regions of an object.

    Wrapped modules get no method regions and are not looked into; neither are compiled ones. A bare module is itself no
    region (its parts and its methods are), unless it is wrapped or compiled, when nothing else can be seen.
    """
    found = Sites(parts=find_parts(obj))
    for part in found.parts:
        is_opaque = part.managed is not None or part.is_compiled
        if part.path or is_opaque:
            region_id = found.add(part, _call_site(part), part.name)
            if part.is_entered:
                found.entered.add(region_id)
        if part.managed is None and not isinstance(part.module, _script_module()):
            _add_methods(found, part, is_opaque)
    return found


def _add_methods(found: Sites, part: Part, is_opaque: bool) -> None:
    for name in method_names(_inner(part.module)):
        path = f"{part.path}.{name}" if part.path else name
        region_id = found.add(part, Site(path, part.module, name), path)
        if not part.path and not is_opaque:
            found.exclusive.add(region_id)
        elif part.is_entered:
            found.entered.add(region_id)


def _call_site(part: Part) -> Site:
    """Where calls of a module are seen: its hooks, or for `module.compile()` what its calls go through instead."""
    path = part.path or part.name
    if _torch_private.is_compiled_in_place(part.module):
        return Site(path, part.module, _torch_private.COMPILED_CALL)
    return Site(path, part.module)


def method_names(module: nn.Module) -> list[str]:
    """Plain functions that the classes add to `nn.Module` and torch's own layers, without dunders and `forward`."""
    names: dict[str, None] = {}
    for cls in type(module).__mro__:
        if cls not in nn.Module.__mro__ and not cls.__module__.startswith(_TORCH_LAYERS):
            names.update(dict.fromkeys(name for name, value in vars(cls).items() if inspect.isfunction(value)))
    return [n for n in names if n != "forward" and not n.startswith("__") and n not in vars(nn.Module)]


def find_parts(obj: Any) -> list[Part]:
    """Return every module that the object is made of, once, by the path at which it is found first.

    Looks into attributes, also private ones, into lists, tuples and dicts, and into plain objects that hold modules.
    """
    return _Walk().parts_of(obj)


class _Walk:
    def __init__(self) -> None:
        self.parts: dict[int, Part] = {}
        self.objects: set[int] = set()

    def parts_of(self, obj: Any) -> list[Part]:
        if isinstance(obj, nn.Module):
            self.module("", obj)
        else:
            self.plain("", obj, _MAX_OBJECTS)
        # Outer modules stand before inner ones.
        return list(self.parts.values())

    def module(self, path: str, module: nn.Module) -> bool:
        """Add a module and what is inside; returns whether it is or holds a wrapper of ours."""
        if known := self.parts.get(id(module)):
            return known.is_entered or known.managed is not None
        managed = managed_state(module)
        is_compiled = managed is None and is_opaque_graph(module)
        part = Part(path, module, managed, is_compiled)
        self.parts[id(module)] = part
        if managed is not None or is_compiled:
            return managed is not None
        holds = [self.module(_join(path, name), child) for name, child in module._modules.items() if child is not None]
        for name, value in list(vars(module).items()):
            if name not in _torch_private.MODULE_INTERNALS and isinstance(value, (list, tuple, dict)):
                holds.append(self.container(_join(path, name), value, _MAX_CONTAINERS, objects=0))
        if any(holds):
            self.parts[id(module)] = Part(path, module, is_entered=True)
        return any(holds)

    def plain(self, path: str, obj: Any, objects: int) -> bool:
        """Look into an object that is no module."""
        if id(obj) in self.objects:
            return False
        self.objects.add(id(obj))
        holds = []
        for name, value in list(_attributes(obj)):
            if isinstance(value, nn.Module):
                holds.append(self.module(_join(path, name), value))
            elif isinstance(value, (list, tuple, dict)):
                holds.append(self.container(_join(path, name), value, _MAX_CONTAINERS, objects))
        for name, value in list(_attributes(obj)):
            if objects and _may_hold_modules(value):
                holds.append(self.plain(_join(path, name), value, objects - 1))
        return any(holds)

    def container(self, path: str, values: Any, depth: int, objects: int) -> bool:
        """Look into a list, tuple or dict; keys that cannot be told in a path are left out."""
        if not depth or id(values) in self.objects:
            return False
        self.objects.add(id(values))
        items = values.items() if isinstance(values, dict) else enumerate(values)
        holds = []
        for key, value in list(items):
            if isinstance(key, int) or (isinstance(key, str) and key and "." not in key):
                holds.append(self._item(_join(path, str(key)), value, depth, objects))
        return any(holds)

    def _item(self, path: str, value: Any, depth: int, objects: int) -> bool:
        if isinstance(value, nn.Module):
            return self.module(path, value)
        if isinstance(value, (list, tuple, dict)):
            return self.container(path, value, depth - 1, objects)
        return bool(objects) and _may_hold_modules(value) and self.plain(path, value, objects - 1)


def is_opaque_graph(module: nn.Module) -> bool:
    """Whether the module's inside runs as one graph: compiled in either way, or TorchScript."""
    return (
        _torch_private.compiled_original(module) is not None
        or _torch_private.is_compiled_in_place(module)
        or _torch_private.has_compiled_forward(module)
        or isinstance(module, _script_module())
    )


def _script_module() -> type:
    import torch

    return torch.jit.ScriptModule


def _inner(module: nn.Module) -> nn.Module:
    return _torch_private.compiled_original(module) or module


def _attributes(obj: Any) -> Iterator[tuple[str, Any]]:
    own = getattr(obj, "__dict__", None)
    return (
        (name, value) for name, value in (own.items() if isinstance(own, dict) else ()) if not name.startswith("__")
    )


def _may_hold_modules(value: Any) -> bool:
    """Whether a value is an object of somebody's class; functions, classes and Python modules are not looked into."""
    return hasattr(value, "__dict__") and not isinstance(
        value, (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
