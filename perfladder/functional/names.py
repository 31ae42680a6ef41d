"""What calls are called, and how one runs a Python function of torch so that the calls inside it are seen too."""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

from torch.nn import functional
from torch.overrides import resolve_name

from perfladder.trace.labels import FUNCTION_KIND, encode_label

NO_CALL: Final = "(none)"
"""Function name of a kernel that no named call launched, such as a kernel that the module's own code launches."""

_FUNCTIONAL: Final = "torch.nn.functional."
_CHECKS: Final = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
NOT_CALLS: Final = frozenset({*_CHECKS, "handle_torch_function", "boolean_dispatch"})
# Methods that only read what the tensor knows.
_READING_METHODS: Final = frozenset(
    f"Tensor.{name}"
    for name in (
        *("dim", "size", "stride", "numel", "nelement", "element_size", "is_contiguous", "is_floating_point"),
        *("is_complex", "is_signed", "storage_offset", "data_ptr", "untyped_storage", "get_device", "__len__"),
    )
)
# Properties that compute; all others, a fifth of all calls, only read what the tensor knows.
_COMPUTING_PROPERTIES: Final = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})


@dataclass(frozen=True)
class Call:
    """A function that torch lets a mode see.

    Attributes:
        name: `linear` for `torch.nn.functional.linear`; `Tensor.matmul`, `torch.softmax`, `torch.ops.aten.mm`.
        label: Name of its span in the trace.
        is_functional: Whether it is of `torch.nn.functional`.
        revealing: Does the same, but lets a mode see the functional calls inside; None if there are none.
    """

    name: str
    label: str
    is_functional: bool
    revealing: Callable[..., Any] | None


def describe_call(function: Callable[..., Any]) -> Call | None:
    """Return what a function is called, or None if it computes nothing (the getter of a shape, say)."""
    if function.__class__ is types.MethodWrapperType:  # a property, by its `__get__`
        attribute = getattr(function.__self__, "__name__", "")
        if function.__name__ != "__get__" or attribute not in _COMPUTING_PROPERTIES:
            return None
        name = f"Tensor.{attribute}"
    else:
        name = _name(function)
    is_functional = name.startswith(_FUNCTIONAL)
    name = name.removeprefix(_FUNCTIONAL)
    if name in _READING_METHODS:
        return None
    return Call(
        name=name,
        label=encode_label(FUNCTION_KIND, name),
        is_functional=is_functional,
        revealing=without_override_checks(function) if is_functional and _calls_functionals(function) else None,
    )


def _name(function: Callable[..., Any]) -> str:
    name = resolve_name(function)
    if name is None:
        name = f"{getattr(function, '__module__', None) or ''}.{getattr(function, '__qualname__', str(function))}"
    name = name.strip(".").replace("_VariableFunctionsClass.", "")
    if name.startswith("torch.Tensor."):
        return name.removeprefix("torch.")
    return f"torch.ops.{name}" if type(function).__name__.startswith("OpOverload") else name


def _calls_functionals(function: Callable[..., Any]) -> bool:
    """Whether a function of `torch.nn.functional` calls others, directly or through its private helpers.

    Functions that dispatch on an argument (`max_pool2d` and `max_pool2d_with_indices`) are not of that file: a copy of
    one would call itself for ever.
    """
    return bool(_functionals_inside(function, seen={id(function)}))


def _functionals_inside(function: Callable[..., Any], seen: set[int]) -> set[str]:
    """Return names of the public functions that this one uses, or that private ones which it uses do."""
    if not isinstance(function, types.FunctionType) or function.__globals__ is not vars(functional):
        return set()
    used = {step.argval for step in dis.get_instructions(function) if step.opname == "LOAD_GLOBAL"}
    found = set()
    for name in used & vars(functional).keys():
        inner = getattr(functional, name)
        if id(inner) in seen or name in NOT_CALLS:
            continue
        seen.add(id(inner))
        if name.startswith("_"):
            found |= _functionals_inside(inner, seen)
        elif isinstance(inner, (types.FunctionType, types.BuiltinFunctionType)):
            found.add(name)
    return found


def composites_of(names: Collection[str]) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Find the functions of `torch.nn.functional` inside which one of these is called.

    Returns:
        For each of them a copy that does the same, and lets a mode see the functional calls inside.
    """
    reaching, found = set(names), dict[str, Callable[..., Any]]()
    inside = {
        name: _functionals_inside(function, seen={id(function)})
        for name, function in vars(functional).items()
        if not name.startswith("_") and isinstance(function, types.FunctionType)
    }
    while more := {n: vars(functional)[n] for n, used in inside.items() if n not in reaching and used & reaching}:
        found |= more
        reaching |= more.keys()
    return {function: without_override_checks(function) for function in found.values()}


def without_override_checks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a Python function whose own code is told that nothing overrides torch's functions.

    What it calls is not copied. The copy knows the module's names as of now.
    """
    assert isinstance(function, types.FunctionType)
    space = {**function.__globals__, **dict.fromkeys(_CHECKS, _never)}
    return _copied(function, space)


def without_override_checks_of_torch(function: types.FunctionType) -> Callable[..., Any]:
    """The same for a function that asks `torch.overrides.has_torch_function`."""
    torch = function.__globals__["torch"]
    overrides = _View(torch.overrides, dict.fromkeys(_CHECKS, _never))
    return _copied(function, {**function.__globals__, "torch": _View(torch, {"overrides": overrides})})


def _copied(function: types.FunctionType, space: dict[str, Any]) -> Callable[..., Any]:
    copy = types.FunctionType(function.__code__, space, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _never(*_: object) -> bool:
    return False


class _View:
    """A Python module with some attributes replaced, for one reader."""

    def __init__(self, module: Any, replaced: dict[str, Any]) -> None:
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
