"""Functions by the names that profiles and plans know them by."""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final

import torch
from torch.nn import functional

from perfladder.errors import InputError
from perfladder.functional.names import NOT_CALLS, describe_call
from perfladder.text import near_names

_EXAMPLES: Final = "'linear' for torch.nn.functional.linear, 'torch.bmm', or 'Tensor.matmul'"


def function_named(name: str) -> Callable[..., Any]:
    """The function of torch that a profile calls by this name.

    Raises:
        InputError: There is none, or none that can be swapped.
    """
    if not isinstance(name, str):
        raise InputError(f"function: expected a name such as {_EXAMPLES}, not a {type(name).__name__}.")
    owner, _, attribute = name.rpartition(".")
    places = {"": functional, "torch": torch, "Tensor": torch.Tensor}
    found = getattr(places.get(owner), attribute, None) if owner in places else None
    if not callable(found):
        known = [known for known, value in vars(functional).items() if _is_function(known, value)]
        hint = near_names(name, known, "functions of torch.nn.functional")
        raise InputError(f"There is no function {name!r}; expected a name such as {_EXAMPLES}. {hint}")
    call = describe_call(found)
    if call is None or call.name != name:
        raise InputError(
            f"{name!r} cannot be swapped: torch shows its calls as {call.name if call else 'nothing'!r}. Expected a "
            f"name such as {_EXAMPLES}."
        )
    function: Callable[..., Any] = found
    return function


def _is_function(name: str, value: Any) -> bool:
    """Whether that is a function which calls can be told of."""
    if name.startswith("_") or name in NOT_CALLS or not isinstance(value, (FunctionType, BuiltinFunctionType)):
        return False
    call = describe_call(value)
    return call is not None and call.name == name
