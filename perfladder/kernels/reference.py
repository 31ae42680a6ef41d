"""What is right for one call: the function itself, in a higher precision, brought back to the call's own dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from perfladder.functional.samples import Arguments, copied_arguments, tensors_in
from perfladder.tuning.correctness import Case, Expected, expectations
from perfladder.tuning.samples import Sample
from perfladder.tuning.tree import map_tensors

_HIGHER: Final = (torch.float64, torch.float32)


class CallSample(Sample):
    """The arguments of one call of a function; copies keep strides, and parameters stay the same."""

    def fresh(self) -> Arguments:
        """A copy that may be changed."""
        return copied_arguments((self.args, self.kwargs))

    @classmethod
    def of_call(cls, arguments: Arguments) -> CallSample:
        """A sample of arguments that nobody else changes."""
        return cls(*arguments, None)


def expected_of(
    function: Callable[..., Any], sample: CallSample, device: torch.device
) -> tuple[list[Expected], str | None]:
    """What a function does with arguments, computed in float64, or else in float32.

    Returns:
        It, and the name of that dtype; None where the function was run as it is: where nothing is of floating point,
        where it writes to its arguments, or where it has no kernel for a higher precision.
    """
    case = Case("the sample", sample.fresh)
    plain = expectations(function, [case], device)
    if plain[0].changes_inputs:
        return plain, None
    with torch.no_grad():
        args, kwargs = sample.fresh()
        dtypes = [tensor.dtype for tensor in tensors_in(function(*args, **kwargs))]
    for dtype in _HIGHER:
        if not _is_higher(dtype, sample):
            continue
        try:
            return expectations(_precise(function, dtype, dtypes), [case], device), _name(dtype)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            continue
    return plain, None


def _is_higher(dtype: torch.dtype, sample: CallSample) -> bool:
    bits = [torch.finfo(t.dtype).bits for t in tensors_in((sample.args, sample.kwargs)) if t.is_floating_point()]
    return bool(bits) and max(bits) < torch.finfo(dtype).bits


def _precise(function: Callable[..., Any], dtype: torch.dtype, dtypes: list[torch.dtype]) -> Callable[..., Any]:
    def raised(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def called(*args: Any, **kwargs: Any) -> Any:
        precise_args, precise_kwargs = map_tensors((args, kwargs), raised)
        result = function(*precise_args, **precise_kwargs)
        usual = iter(dtypes)
        return map_tensors(result, lambda tensor: tensor.to(next(usual)))

    return called


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
