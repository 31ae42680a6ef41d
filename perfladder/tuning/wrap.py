"""Put wrappers in the place of an object's modules, and take them out again."""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from perfladder.errors import InputError
from perfladder.object_parts import attribute_at, named_values, set_attribute_at
from perfladder.profiling.discover import find_parts
from perfladder.text import near_names
from perfladder.tuning.control import ModuleControl
from perfladder.tuning.inspect import ModuleInfo
from perfladder.tuning.module import Module, control_of, drop_own_forward

if TYPE_CHECKING:
    from perfladder.tuning.strategies import TuneStrategy


def wrap(
    obj: Any,
    modules: Iterable[ModuleInfo | str],
    strategy: TuneStrategy | None = None,
    strategies: Sequence[TuneStrategy] | Mapping[str, TuneStrategy] | None = None,
) -> Any:
    """Make modules of an object ready to be tuned.

    Args:
        obj: A module, or an object that holds modules.
        modules: What `inspect` found, or paths such as `unet` or `text_encoder.encoder`.
        strategy: Of all of them.
        strategies: One for each instead: a list in the order of `modules`, or a mapping by path.

    Returns:
        The object, with wrappers in the place of the modules, at each reference to them. For the object itself as a
        module: its wrapper.

    Raises:
        InputError: There is no module, a path leads to none, one lies in another one, one is wrapped already, or the
            strategies do not fit the modules. Nothing is changed then.
    """
    modules = list(modules)
    paths = [_path_of(entry) for entry in modules]
    if not paths:
        raise InputError("modules: there is none to wrap; is the ratio or the limit of get_modules too strict?")
    _check_paths(paths)
    chosen = _strategies_of(paths, strategy, strategies)
    found = {path: attribute_at(obj, path, field_name="modules") for path in paths}
    for path, module in found.items():
        if not isinstance(module, nn.Module):
            raise InputError(f"modules: {path!r} is a {type(module).__name__}, not a module.")
    entries = [entry for entry in modules if isinstance(entry, ModuleInfo)]
    made: dict[int, Module] = {}
    for path, module in found.items():
        if id(module) not in made:  # else one module at two paths
            made[id(module)] = Module(module, path or None, chosen[path])
    wrappers = {path: made[id(module)] for path, module in found.items()}
    for entry in entries:
        control_of(wrappers[entry.object_path]).inspected = entry.inspected
    for path, wrapper in wrappers.items():
        control = control_of(wrapper)
        control.path = path if control.path is None else control.path
        if not path:
            return wrapper
    replace_modules(obj, [(path, control_of(wrapper).inner, wrapper) for path, wrapper in wrappers.items()], "modules")
    return obj


def unwrap(obj: Any) -> Any:
    """Put the plain modules back; returns the object, or for a wrapper the plain module.

    Raises:
        InputError: Nothing in it is wrapped.
    """
    if isinstance(obj, Module):
        drop_own_forward(control_of(obj))
        return control_of(obj).inner
    found = [(part.path, part.module) for part in find_parts(obj) if isinstance(part.module, Module)]
    if not found:
        raise InputError(f"Nothing in this {type(obj).__name__} is wrapped.")
    for _, wrapper in found:
        drop_own_forward(control_of(wrapper))
    replace_modules(obj, [(path, wrapper, control_of(wrapper).inner) for path, wrapper in found], "obj")
    return obj


def replace_modules(obj: Any, changes: Iterable[tuple[str, nn.Module, nn.Module]], field_name: str) -> None:
    """Put modules in the places of others, wherever else these lie too; all of them, or none."""
    done: list[tuple[str, nn.Module]] = []
    try:
        for path, before, after in changes:
            others = [place for place in _places(obj, before) if place != path]
            set_attribute_at(obj, path, after, field_name=field_name)
            done.append((path, before))
            done += [(place, before) for place in others if _is_replaced(obj, place, after)]
            if left := [place for place in others if (place, before) not in done]:
                listed = ", ".join(map(repr, left))
                warnings.warn(
                    f"{path!r} lies at {listed} too, which cannot be replaced and stays as it is.", stacklevel=3
                )
    except InputError:
        for place, before in reversed(done):
            set_attribute_at(obj, place, before, field_name=field_name)
        raise


def _is_replaced(obj: Any, place: str, module: nn.Module) -> bool:
    """Replace one more reference to a module, unless it cannot be, as in a tuple."""
    try:
        set_attribute_at(obj, place, module, field_name=place)
    except InputError:
        return False
    return True


def _places(obj: Any, wanted: nn.Module) -> list[str]:
    """Every path at which this very module lies."""
    return [path for path, value in named_values(obj, may_enter=lambda value: value is not wanted) if value is wanted]


def wrapped_in(obj: Any) -> list[ModuleControl]:
    """Wrapped modules that a callable can reach: itself, its parts, its owner, what a function refers to."""
    found: dict[int, ModuleControl] = {}
    for holder in _holders(obj, 0):
        for part in find_parts(holder):
            if isinstance(part.module, Module):
                control = control_of(part.module)
                control.path = control.path if control.path is not None else part.path
                found.setdefault(id(control), control)
    return list(found.values())


def _holders(obj: Any, depth: int) -> Iterator[Any]:
    """Objects that may hold wrapped modules."""
    if depth > 2:
        return
    if isinstance(obj, functools.partial):
        for value in (obj.func, *obj.args, *obj.keywords.values()):
            yield from _holders(value, depth + 1)
    elif isinstance(obj, types.MethodType):
        yield obj.__self__
        yield from _holders(obj.__func__, depth + 1)
    elif inspect.isfunction(obj):
        try:
            names = inspect.getclosurevars(obj)
        except ValueError:  # a name that is not bound yet; what the function calls is seen when it does
            return
        for value in (*names.nonlocals.values(), *names.globals.values(), *(obj.__defaults__ or ())):
            if not isinstance(value, (types.ModuleType, type)):
                yield from _holders(value, depth + 1)
    elif obj is not None and not inspect.isbuiltin(obj):
        yield obj


def _path_of(entry: ModuleInfo | str) -> str:
    if isinstance(entry, ModuleInfo):
        return entry.object_path
    if isinstance(entry, str):
        return entry
    raise InputError(
        f"modules: expected what pl.inspect found, or paths, not a {type(entry).__name__}; one module is wrapped by "
        "pl.Module(module)."
    )


def _check_paths(paths: Sequence[str]) -> None:
    for path in paths:
        if paths.count(path) > 1:
            raise InputError(f"modules: {path!r} is given twice.")
        outer = next((other for other in paths if other != path and _is_inside(path, other)), None)
        if outer is not None:
            raise InputError(f"modules: {path!r} lies in {outer or 'the object itself'!r}; wrap one of them.")


def _is_inside(path: str, outer: str) -> bool:
    return path.startswith(f"{outer}.") if outer else True


def _strategies_of(
    paths: Sequence[str],
    strategy: TuneStrategy | None,
    strategies: Sequence[TuneStrategy] | Mapping[str, TuneStrategy] | None,
) -> dict[str, TuneStrategy | None]:
    if strategies is None:
        return dict.fromkeys(paths, strategy)
    if strategy is not None:
        raise InputError("strategy and strategies: give one of them.")
    if isinstance(strategies, Mapping):
        for name in strategies:
            if name not in paths:
                raise InputError(f"strategies: {name!r} is no module here. {near_names(name, paths, 'modules')}")
        return {path: strategies.get(path) for path in paths}
    if not isinstance(strategies, (list, tuple)) or len(strategies) != len(paths):
        raise InputError(
            f"strategies: expected a mapping by path, or a list of {len(paths)}, one for each module in order."
        )
    return dict(zip(paths, strategies, strict=True))
