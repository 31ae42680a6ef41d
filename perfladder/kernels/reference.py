"""What is right for one call: the function itself, in a higher precision, brought back to the call's own dtypes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from perfladder.functional.samples import Arguments, copied_arguments, tensors_in
from perfladder.tuning.correctness import Case, expectations
from perfladder.tuning.samples import Sample
from perfladder.tuning.tree import map_tensors

_HIGHER: Final = (torch.float64, torch.float32)


class CallSample(Sample):
    """The arguments of one call of a function; copies keep strides, and parameters stay the same."""

    def fresh(self) -> Arguments:
        """A copy that may be changed."""
        return copied_arguments((self.args, self.kwargs))

    def with_other_numbers(self) -> Arguments:
        """A copy, of parameters too, in which the numbers of each tensor lie one place further; integers stay."""
        from perfladder.kernels.standalone_bench import moved

        with torch.no_grad():
            args, kwargs = copied_arguments((self.args, self.kwargs), keeps_parameters=False)
            return moved(args), moved(kwargs)

    @classmethod
    def of_call(cls, arguments: Arguments) -> CallSample:
        """A sample of arguments that nobody else changes."""
        return cls(*arguments, None)


@dataclass(frozen=True, eq=False)
class Reference:
    """What is right for calls of one form.

    Attributes:
        call: Takes the call's arguments, and gives it in the call's own dtypes.
        dtype: In which it computes; None: the function as it is, where nothing is of floating point, where it writes to
            its arguments, or where it has no kernel for a higher precision.
        changes_inputs: The function writes to its arguments.
    """

    call: Callable[..., Any]
    dtype: str | None
    changes_inputs: bool


def reference_of(function: Callable[..., Any], sample: CallSample, device: torch.device) -> Reference:
    """Find the highest precision, float64 or float32, that a function can compute these arguments in."""
    plain = expectations(function, [Case("the sample", sample.fresh)], device)[0]
    if plain.changes_inputs:
        return Reference(function, None, True)
    with torch.no_grad():
        args, kwargs = sample.fresh()
        dtypes = [tensor.dtype for tensor in tensors_in(function(*args, **kwargs))]
        for dtype in _HIGHER:
            if not _is_higher(dtype, sample):
                continue
            precise = _precise(function, dtype, dtypes)
            try:
                args, kwargs = sample.fresh()
                precise(*args, **kwargs)
            except (RuntimeError, NotImplementedError, TypeError, ValueError):
                continue
            return Reference(precise, str(dtype).removeprefix("torch."), False)
    return Reference(function, None, False)


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
