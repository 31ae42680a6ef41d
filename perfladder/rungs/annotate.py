"""The observer that writes call sites into a trace, and which sites those are."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from perfladder.instrument import Instrumentation, Observer, Site, module_sites, named_modules_of
from perfladder.models import ResultWarning
from perfladder.trace.labels import encode_label

if TYPE_CHECKING:
    from torch import nn

UNTUNED = "untuned_module"
"""Kind of a region that is a module, or a method of one, which nothing of ours has replaced."""


class Annotator(Observer):
    """Opens a labelled span in the trace for each call."""

    def __init__(self, kind: str = UNTUNED) -> None:
        from perfladder._torch_private import open_span

        self._open_span = open_span
        self._kind = kind
        self._labels: dict[str, str] = {}
        self.num_calls: dict[str, int] = {}

    def enter(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[Any]:
        """Open the call's span."""
        self.num_calls[site.path] = self.num_calls.get(site.path, 0) + 1
        label = self._labels.get(site.path)
        if label is None:
            label = self._labels[site.path] = encode_label(self._kind, site.path)
        span = self._open_span(label)
        span.__enter__()
        return span

    def leave(self, site: Site, token: AbstractContextManager[Any], result: Any) -> None:
        """Close the span."""
        token.__exit__(None, None, None)


def region_sites(obj: Any) -> list[Site]:
    """Every module of the object and every method that its class declares below `nn.Module`.

    The object itself, where it is a module, is no region: its children are, and its own methods.
    """
    sites: list[Site] = []
    for path, module in named_modules_of(obj):
        found = module_sites(module, path)
        sites += [site for site in found if site.path] + [m for site in found for m in method_sites(site.owner, site.path)]
    return sites


def method_sites(module: nn.Module, path: str) -> list[Site]:
    """Plain functions on the class hierarchy below `nn.Module`, without dunders and `forward`."""
    from torch import nn

    names: dict[str, None] = {}
    for cls in type(module).__mro__:
        if cls is nn.Module:
            break
        for name, value in vars(cls).items():
            if inspect.isfunction(value) and name != "forward" and not (name.startswith("__") and name.endswith("__")):
                names.setdefault(name)
    return [Site(f"{path}.{name}" if path else name, module, name) for name in names]


def instrumentation_warnings(state: Instrumentation) -> list[ResultWarning]:
    """What the observation of call sites could not do."""
    warnings = [
        ResultWarning(code="HOOK_LOST", message=f"The observation of {path!r} was removed by other code during the run.")
        for path in state.lost
    ]
    if state.num_cut_off:
        message = f"{state.num_cut_off} observed calls never returned and were closed at the end."
        warnings.append(ResultWarning(code="CALLS_CUT_OFF", message=message))
    return warnings
