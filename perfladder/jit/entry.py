"""One module that was found: what is known of it, whether it is taken up, and what lies in it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import nn

from perfladder._torch_private import compiled_original, has_compiled_forward, is_compiled_in_place
from perfladder.jit.config import JitSettings
from perfladder.jit.control import JitControl
from perfladder.jit.report import JitGraph, JitModuleReport, State

_EXCLUDED: Final = ("torch.jit", "torch._inductor", "torch._dynamo", "torch.fx", "torch.export", "torch_tensorrt")
_LISTS: Final = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(eq=False)
class Entry:
    """What is known of one module.

    Attributes:
        ref: To the module, which lives as long as the program wants it.
        kind: Its class.
        level: How far below the topmost module.
        parent: In which it was called.
        control: While it records or is tuned.
        jit_class: What its class is then.
        time_ns: Of all its calls, where they are timed.
    """

    ref: weakref.ref[nn.Module]
    name: str
    kind: type
    num_parameters: int
    device: str
    level: int
    parent: Entry | None
    state: State = "init"
    reason: str | None = None
    control: JitControl | None = None
    jit_class: type | None = None
    num_calls: int = 0
    time_ns: int | None = None
    graphs: list[JitGraph] = field(default_factory=list)

    def take_up(self) -> None:
        """Let calls of the module go to its control."""
        module = self.ref()
        if module is not None and self.jit_class is not None and self.control is not None and type(module) is self.kind:
            # Not by the module's own `__setattr__`, which may keep what it is given.
            object.__setattr__(module, "__class__", self.jit_class)

    def put_back(self) -> None:
        """Give the module its own class again."""
        module = self.ref()
        if module is not None and type(module) is self.jit_class:
            object.__setattr__(module, "__class__", self.kind)

    def drop(self) -> None:
        """Let go of what holds weights and builds."""
        self.control = self.jit_class = None

    def report(self) -> JitModuleReport:
        """For people and files."""
        return JitModuleReport(
            name=self.name,
            level=self.level,
            module_type=f"{self.kind.__module__}.{self.kind.__qualname__}",
            num_parameters=self.num_parameters,
            device=self.device,
            state=self.state,
            reason=self.reason,
            num_calls=self.num_calls,
            time_ms=None if self.time_ns is None else round(self.time_ns / 1e6, 6),
            graphs=list(self.graphs),
        )


def entry_of(module: nn.Module, name: str, parent: Entry | None, ref: weakref.ref[nn.Module]) -> Entry:
    """An entry for a module that was met for the first time."""
    weights = list(module.parameters())
    return Entry(
        ref=ref,
        name=name,
        kind=type(module),
        num_parameters=sum(weight.numel() for weight in weights),
        device=str(weights[0].device) if weights else "cpu",
        level=parent.level + 1 if parent is not None else 0,
        parent=parent,
    )


def is_transparent(module: nn.Module) -> bool:
    """Whether a module only calls the modules in it, one after the other: these stand in its place."""
    is_plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return is_plain and "forward" not in vars(module)


def children_of(module: nn.Module) -> Iterator[nn.Module]:
    """The modules in one that may be called themselves, each once; those in containers stand for them."""
    seen: set[int] = set()
    queue = list(module.children())
    while queue:
        child = queue.pop(0)
        if isinstance(child, _LISTS) or is_transparent(child):
            queue[:0] = child.children()
        elif id(child) not in seen:
            seen.add(id(child))
            yield child


def name_below(outer: nn.Module, outer_name: str, module: nn.Module) -> str | None:
    """The name of a module that lies in another one; None if it does not."""
    for path, part in outer.named_modules():
        if part is module and path:
            return f"{outer_name}.{path}"
    return None


def why_left_alone(module: nn.Module, entry: Entry, settings: JitSettings) -> str | None:
    """Why a module is never taken up, with all that is in it; None if it may be."""
    kind = entry.kind
    if hasattr(kind, "_perfladder_control"):
        return "it is wrapped already"
    is_compiled = is_compiled_in_place(module) or has_compiled_forward(module) or compiled_original(module) is not None
    if is_compiled:
        return "it is compiled already"
    if isinstance(module, torch.jit.ScriptModule) or _is_of(kind, (*_EXCLUDED, *settings.patch_exclude)):
        return f"classes of {kind.__module__} are left alone"
    if any(_is_meant(one, entry) for one in settings.skip_modules):
        return "jit_config.skip_modules names it"
    if not entry.num_parameters or entry.num_parameters < settings.min_parameters:
        return f"it has {entry.num_parameters} parameters"
    if entry.level > settings.max_depth_level:
        return f"it is deeper than jit_config.max_depth_level = {settings.max_depth_level}"
    return None


def _is_of(kind: type, packages: tuple[str, ...]) -> bool:
    return any(kind.__module__ == package or kind.__module__.startswith(f"{package}.") for package in packages)


def _is_meant(one: type | str, entry: Entry) -> bool:
    if isinstance(one, type):
        return issubclass(entry.kind, one)
    return one in (entry.name, entry.kind.__name__, f"{entry.kind.__module__}.{entry.kind.__qualname__}")
