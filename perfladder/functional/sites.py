"""Where calls of a module hierarchy are observed, and what each place is called in results."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeGuard

from torch import nn

from perfladder import _torch_private
from perfladder.functional.names import without_override_checks_of_torch
from perfladder.instrument import Site
from perfladder.profiling.discover import UNTUNED, Part, find_parts, method_names

_PARALLEL: Final = (nn.DataParallel, nn.parallel.DistributedDataParallel)
# These look for hooks on themselves and inside, and compute something else where there are any.
_WARY_OF_HOOKS: Final = (nn.TransformerEncoder, nn.TransformerEncoderLayer)
_CHECK: Final = "has_torch_function"


@dataclass(frozen=True, eq=False)
class ModuleSites:
    """The call sites of a module hierarchy.

    Attributes:
        sites: Where calls are observed: modules by their hooks, and their public methods.
        labels: For each site's path, kind and name of the region: that of the module, also for a method.
        modules: The live module by its name; a wrapper that only compiles or replicates has the name of what is inside.
        opaque: Paths of sites whose inside runs as one graph.
    """

    sites: list[Site] = field(default_factory=list)
    labels: dict[str, tuple[str, str]] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    opaque: set[str] = field(default_factory=set)

    @property
    def opaque_names(self) -> set[str]:
        """Names of the modules whose inside runs as one graph."""
        return {self.labels[path][1] for path in self.opaque}

    def add(self, part: Part, site: Site, name: str) -> None:
        """Add a site of the module of that name."""
        self.sites.append(site)
        self.labels[site.path] = (part.kind, name)
        if part.is_compiled or part.managed is not None:
            self.opaque.add(site.path)

    def with_method(self, site: Site) -> ModuleSites:
        """Return the same with a method in the place of its owner, as a region of its own."""
        kept = [other for other in self.sites if other.owner is not site.owner]
        return replace(self, sites=[*kept, site], labels={**self.labels, site.path: (UNTUNED, site.path)})


def find_module_sites(root: nn.Module, path: str = "", *, methods: bool = True) -> ModuleSites:
    """Find the sites of a module and of everything inside it, each module once, by the first path that leads to it.

    Args:
        root: The outermost module.
        path: Its name; empty in a profile of the module alone.
        methods: Observe public methods too, as calls of their module: some modules are entered through these alone.
    """
    found, parts = ModuleSites(), find_parts(root)
    wary = {id(inner) for part in parts if isinstance(part.module, _WARY_OF_HOOKS) for inner in part.module.modules()}
    wrappers = [part.path for part in parts if isinstance(part.module, _PARALLEL)]
    for part in parts:
        name = _join(path, _without_wrappers(part.path, wrappers))
        place = _join(path, part.path)
        found.modules[name] = _torch_private.compiled_original(part.module) or part.module
        found.add(part, _call_site(part, place, by_hook=id(part.module) not in wary), name)
        if methods and part.managed is None and not part.is_compiled:
            for method in method_names(part.module):
                if not method.startswith("_"):
                    found.add(part, Site(_join(place, method), part.module, method), name)
    return found


def _call_site(part: Part, place: str, *, by_hook: bool) -> Site:
    if _torch_private.is_compiled_in_place(part.module):
        return Site(place, part.module, _torch_private.COMPILED_CALL)
    return Site(place, part.module) if by_hook else Site(_join(place, "forward"), part.module, "forward")


def _without_wrappers(path: str, wrappers: list[str]) -> str:
    """Leave out the step into what `DataParallel` and its like wrap; inner wrappers first."""
    for wrapper in sorted(wrappers, key=len, reverse=True):
        inside = _join(wrapper, "module")
        if path == inside or path.startswith(f"{inside}."):
            path = _join(wrapper, path[len(inside) + 1 :])
    return path


def _join(*names: str) -> str:
    return ".".join(filter(None, names))


@contextmanager
def same_path_as_without_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Keep modules from computing something else under a mode, inside the block.

    `nn.MultiheadAttention` and its like take a fused path only if nothing overrides torch's functions, and an active
    mode counts as that. Inside the block each of them runs a copy of its `forward` that is told that nothing does.
    """
    replaced: list[tuple[nn.Module, Any]] = []
    try:
        for module in modules:
            # A TorchScript module answers no question about its class.
            forward: object = inspect.getattr_static(type(module), "forward", None)
            if "forward" not in vars(module) and _asks_for_overrides(forward):
                copy = types.MethodType(without_override_checks_of_torch(forward), module)
                vars(module)["forward"] = copy
                replaced.append((module, copy))
        yield
    finally:
        for module, copy in replaced:
            if vars(module).get("forward") is copy:
                del vars(module)["forward"]


def _asks_for_overrides(forward: object) -> TypeGuard[types.FunctionType]:
    return (
        isinstance(forward, types.FunctionType)
        and _CHECK in forward.__code__.co_names
        and getattr(forward.__globals__.get("torch"), "__name__", None) == "torch"
    )
