"""Call sites of the user's object: those to time by default, and those that a user names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from perfladder.errors import InputError
from perfladder.instrument import PHASES, Site, known_marks, mark_site
from perfladder.managed import managed_state
from perfladder.object_parts import attribute_at, children_of, parts_of, public_methods_of

if TYPE_CHECKING:
    from torch import nn

_ENTRY_POINTS: Final = (
    "encode",
    "decode",
    "generate",
    "sample",
    "prefill",
    "step",
    "preprocess",
    "postprocess",
    "add_noise",
)
"""Methods that pipelines call on their parts as often as the parts themselves."""

_PIPELINE_METHODS: Final = ("preprocess", "_forward", "postprocess")
"""What every pipeline of transformers does in turn."""


def stage_sites(obj: Any) -> list[Site]:
    """Coarse call sites to time by default: a pipeline's parts and the methods it is known to call on them.

    For a bare module these are its children; for any object also its own public methods. Sites that a run never
    reaches cost nothing and are dropped by the caller.
    """
    from torch import nn

    if isinstance(obj, nn.Module):
        sites = [] if _is_one_piece(obj) else [Site(path, child) for path, child in children_of(obj)]
        if generates(obj):
            return [Site("generate", obj, "generate"), *_phase_sites("", obj), *sites]
        return sites or [Site("", obj)]
    names = [*public_methods_of(obj), *(_PIPELINE_METHODS if is_text_pipeline(obj) else ())]
    sites = [Site(name, obj, name) for name in dict.fromkeys(names)]
    for path, part in parts_of(obj):
        if isinstance(part, nn.Module):
            sites.append(Site(path, part))
        if generates(part):
            sites += _phase_sites(path, part)
        methods = [name for name in _ENTRY_POINTS if inspect.isroutine(getattr(type(part), name, None))]
        sites += [Site(f"{path}.{name}", part, name) for name in methods]
    return sites


def _is_one_piece(module: nn.Module) -> bool:
    """Whether hooks of a module's children do not fire: it is compiled, or what tuning chose is called in its place."""
    managed = managed_state(module)
    return hasattr(module, "_orig_mod") or (managed is not None and managed.by == "aot" and managed.state == "tuned")


def generates(part: Any) -> bool:
    """Whether this is a model with transformers' `generate`, which calls the model once for each step."""
    from torch import nn

    names = ("generate", "prepare_inputs_for_generation")
    return isinstance(part, nn.Module) and all(inspect.isroutine(getattr(part, name, None)) for name in names)


def is_text_pipeline(obj: Any) -> bool:
    """Whether this has the three methods that a pipeline of transformers calls in turn."""
    return all(inspect.isroutine(getattr(type(obj), name, None)) for name in _PIPELINE_METHODS)


def _phase_sites(path: str, model: Any) -> list[Site]:
    return [Site(".".join(filter(None, (path, phase))), model, phase=phase) for phase in PHASES]


def module_sites(module: nn.Module, path: str = "") -> list[Site]:
    """Every submodule once, by its first path, the module itself included; containers that are never called too."""
    return [Site(".".join(filter(None, (path, name))), child) for name, child in module.named_modules()]


def resolve_sites(obj: Any, paths: Iterable[str]) -> list[Site]:
    """Turn paths that a user wrote into sites.

    Raises:
        InputError: A path does not exist, or leads to something that cannot be called.
    """
    return [resolve_site(obj, path) for path in paths]


def resolve_site(obj: Any, path: str, *, field_name: str = "stages") -> Site:
    """Turn one path into a site; see `resolve_sites`."""
    from torch import nn

    if path in known_marks():
        return mark_site(path)
    owner_path, _, name = path.rpartition(".")
    for phase in PHASES:
        if name == phase:
            owner = attribute_at(obj, owner_path, field_name=field_name)
            if generates(owner) and not hasattr(owner, name):
                return Site(path, owner, phase=phase)
    found = attribute_at(obj, path, field_name=field_name)
    if isinstance(found, nn.Module):
        return Site(path, found)
    if not callable(found):
        raise InputError(f"{field_name}: {path!r} is a {type(found).__name__}; a call site is a module or a method.")
    if not inspect.isroutine(found) and not isinstance(found, (type, functools.partial)):
        return Site(path, found, "__call__")
    return Site(path, attribute_at(obj, owner_path, field_name=field_name), name)
