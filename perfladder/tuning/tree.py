"""The arguments and results of a module as leaves with paths: tensors, settings, and objects nobody can look into."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import optree
import torch

from perfladder.capturing.types import type_name
from perfladder.errors import InputError
from perfladder.tuning.containers import (
    MAPPINGS,
    NAMESPACE,
    container_of,
    is_scalar_type,
    is_sequence_type,
)
from perfladder.tuning.containers import register_input_type as register_input_type
from perfladder.tuning.dims import Path, SemanticPath

LeafKind = Literal["tensor", "scalar", "unsupported"]

# optree sorts the keys of a dict unless its namespace is told otherwise, for the whole process; the guard stays open.
_KEYS_IN_ORDER: Final = optree.dict_insertion_ordered(True, namespace=NAMESPACE)
_KEYS_IN_ORDER.__enter__()


@dataclass(frozen=True)
class Leaf:
    """One value inside nested ones.

    Attributes:
        path: Names, keys and indexes that lead to it.
        access_path: The same as Python writes it: `options["mask"]`, `items[0]`, `request.image`.
        kind: A tensor, a setting whose value can be compared (an empty container too), or an object of a class that
            nobody has registered.
        value: The value.
        containers: Classes of what holds it, outermost first.
    """

    path: Path
    access_path: str
    kind: LeafKind
    value: Any
    containers: tuple[str, ...]

    @property
    def semantic_path(self) -> SemanticPath:
        """How users name it in `dynamic_shapes`."""
        return semantic_path(self.path)


def semantic_path(path: Path) -> SemanticPath:
    """A name for what lies at the top, and the path for what lies deeper."""
    if len(path) > 1:
        return path
    return str(path[0]) if path else "output"


def input_leaves(bound: Mapping[str, Any]) -> list[Leaf]:
    """Every leaf of arguments by parameter name, in the order given."""
    if not bound:
        return []
    return [
        _leaf(value, tuple(accessor)[1:], (str(accessor[0].entry),), str(accessor[0].entry))
        for accessor, value in _flatten(dict(bound))
    ]


def output_leaves(output: Any) -> list[Leaf]:
    """Every leaf of what a module returned; the path of a lone tensor is empty."""
    return [_leaf(value, accessor, (), "output") for accessor, value in _flatten(output)]


def leaf_kind(value: Any) -> LeafKind:
    """What a leaf is to tuning; a nested tensor has no sizes to tell, and is passed on as it is."""
    if isinstance(value, torch.Tensor):
        return "unsupported" if value.is_nested else "tensor"
    return "scalar" if is_scalar_type(type(value)) or _is_container(type(value)) else "unsupported"


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The same structure with each tensor replaced; a tensor that lies in two places stays one object."""
    values, spec = _flat_values(value)
    made: dict[int, Any] = {}
    for position, part in enumerate(values):
        if isinstance(part, torch.Tensor):
            if id(part) not in made:
                made[id(part)] = function(part)
            values[position] = made[id(part)]
    return optree.tree_unflatten(spec, values)


def copied(value: Any, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure in memory of its own; a tensor or an empty container in two places stays one object.

    Full containers are made anew anyway. An empty one is copied too, since a call may fill it: a list for results, a
    dict of options, a cache of a model before its first call.
    """
    values, spec = _flat_values(value)
    made: dict[int, Any] = {}
    for position, part in enumerate(values):
        if id(part) not in made:
            made[id(part)] = copy_tensor(part) if isinstance(part, torch.Tensor) else _copied_container(part)
        values[position] = made[id(part)]
    return optree.tree_unflatten(spec, values)


def _copied_container(value: Any) -> Any:
    kind = type(value)
    if kind in MAPPINGS or is_sequence_type(kind):
        return copy.copy(value)
    container = container_of(kind)
    return value if container is None else container.rebuild(value, container.parts(value))


def take_apart(value: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Every leaf of a value, in order, and a function that makes the same structure of other leaves."""
    values, spec = _flat_values(value)
    return values, lambda parts: optree.tree_unflatten(spec, parts)


def map_inputs(
    bound: Mapping[str, Any], asked: Callable[[Path], Hashable], make: Callable[[torch.Tensor, Any], torch.Tensor]
) -> dict[str, Any]:
    """Arguments by parameter name with each tensor replaced, knowing where it lies.

    Args:
        bound: The arguments.
        asked: What is asked of the tensor at a path. Where the same is asked of one tensor in two places, it stays one
            object.
        make: Makes the new tensor, of the old one and what is asked.
    """
    values, spec = _flat_values(dict(bound))
    made: dict[Hashable, torch.Tensor] = {}
    for position, leaf in enumerate(input_leaves(bound)):
        if leaf.kind == "tensor":
            wish = asked(leaf.path)
            key = (id(leaf.value), wish)
            if key not in made:
                made[key] = make(leaf.value, wish)
            values[position] = made[key]
    result: dict[str, Any] = optree.tree_unflatten(spec, values)  # type: ignore[assignment]
    return result


def _flatten(value: Any) -> list[tuple[Any, Any]]:
    try:
        accessors, values, _ = optree.tree_flatten_with_accessor(
            value, is_leaf=_is_leaf, none_is_leaf=True, namespace=NAMESPACE
        )
    except RecursionError:
        raise _too_deep() from None
    return list(zip(accessors, values, strict=True))


def _flat_values(value: Any) -> tuple[list[Any], Any]:
    try:
        return optree.tree_flatten(value, is_leaf=_is_leaf, none_is_leaf=True, namespace=NAMESPACE)
    except RecursionError:
        raise _too_deep() from None


def _too_deep() -> InputError:
    return InputError("The arguments of a module hold themselves, or are nested too deep to be looked through.")


def _is_container(kind: type) -> bool:
    return kind in MAPPINGS or is_sequence_type(kind) or container_of(kind) is not None


def _is_leaf(value: Any) -> bool:
    """Whether to look no further. Empty containers are leaves, so that they are seen at all.

    It asks for the container of each class before optree does, and by that registers it there in time.
    """
    kind = type(value)
    if kind in MAPPINGS or is_sequence_type(kind):
        return not value
    container = container_of(kind)
    return container is None or not container.parts(value)


def _leaf(value: Any, accessor: Any, path: Path, access_path: str) -> Leaf:
    containers = []
    for entry in accessor:
        part, text = _step(entry)
        path, access_path = (*path, part), access_path + text
        containers.append(type_name(entry.type))
    return Leaf(path, access_path, leaf_kind(value), value, tuple(containers))


def _step(entry: Any) -> tuple[str | int, str]:
    """A part of a path, and how Python writes it."""
    name = getattr(entry, "field", None)
    if name is None and isinstance(entry, optree.GetAttrEntry):
        name = entry.entry
    if name is not None:
        return name, f".{name}"
    key = entry.entry
    if type(key) is str:
        return key, f"[{json.dumps(key, ensure_ascii=False)}]"
    return (key if type(key) is int else repr(key)), f"[{key!r}]"


def scalar_text(value: Any) -> str:
    """A setting as text; equal texts of one class are equal settings."""
    if isinstance(value, str):
        return str.__repr__(value)
    kind = type(value)
    if is_scalar_type(kind) or kind in MAPPINGS or is_sequence_type(kind):
        return repr(value)
    return f"{kind.__name__}()" if container_of(kind) is not None or dataclasses.is_dataclass(kind) else kind.__name__


def parameter_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters that a call by position fills, in order; of a partial or wrapped function those that are left.

    A function that does not tell its parameters has none.
    """
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in by_position)


def bind(parameters: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by parameter name; more positional ones than there are names are `args.0`, `args.1` and so on.

    Positional arguments come first, in order. Defaults are not filled in, and nothing is checked: the call does that.
    """
    bound = dict(zip(parameters, args, strict=False))
    for index, value in enumerate(args[len(parameters) :]):
        bound[f"args.{index}"] = value
    bound.update(kwargs)
    return bound
