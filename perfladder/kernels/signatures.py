"""The form of one call's inputs: shapes, strides, dtypes and the values of all else, as a plan's file holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, Self

import torch
from pydantic import Field, field_validator, model_validator

from perfladder.functional.samples import Arguments, tensors_in
from perfladder.models import Model

_Tensor: Final = torch.Tensor
_TENSORS: Final = (torch.Tensor, torch.nn.Parameter)
_PLAIN: Final = (bool, int, float, str, type(None))
_SIMPLE: Final = frozenset(_PLAIN)
_TYPES: Final[dict[str, Any]] = {kind.__name__: kind for kind in _PLAIN}
_INFINITE: Final = ("inf", "-inf")
"""As text, since JSON has no such numbers."""
_RANDOM_INTEGERS: Final = 2
"""Integers of an example lie below it: they may be indices, of which every table has these."""


class ArgumentForm(Model):
    """One argument."""

    kind: Literal["tensor", "value", "dtype", "list", "tuple"]
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    type: str | None = Field(default=None, description="Class of a plain value.")
    value: bool | int | float | str | None = None
    items: tuple[ArgumentForm, ...] | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        """A file may have been damaged or written by hand."""
        if self.kind == "tensor":
            shape, strides = self.shape, self.strides
            if shape is None or strides is None or len(shape) != len(strides) or min((*shape, *strides), default=0) < 0:
                raise ValueError("a tensor has a shape and as many strides, none of them below 0")
        if self.kind in ("tensor", "dtype") and not isinstance(getattr(torch, self.dtype or "", None), torch.dtype):
            raise ValueError(f"{self.dtype!r} is no dtype of torch")
        if self.kind == "value" and not self._is_plain():
            raise ValueError(f"{self.value!r} is no value of the class {self.type!r}")
        if self.kind in ("list", "tuple") and self.items is None:
            raise ValueError(f"a {self.kind} has items")
        return self

    def _is_plain(self) -> bool:
        kind = type(self.value)
        return self.type == kind.__name__ or (self.type == "float" and (kind is int or self.value in _INFINITE))

    @classmethod
    def of(cls, value: Any) -> ArgumentForm | None:
        """The form of a value; None where it cannot be told."""
        kind = type(value)
        if kind in _TENSORS and value.layout == torch.strided and not value.is_nested:
            return cls(kind="tensor", dtype=_name(value.dtype), shape=tuple(value.shape), strides=value.stride())
        if kind in _PLAIN and value == value:  # NaN is equal to nothing, so that no call would be found again
            is_infinite = kind is float and abs(value) == float("inf")
            return cls(kind="value", type=kind.__name__, value=str(value) if is_infinite else value)
        if kind is torch.dtype:
            return cls(kind="dtype", dtype=_name(value))
        if kind in (list, tuple, torch.Size):
            items = [cls.of(item) for item in value]
            if None not in items:
                return cls(kind="list" if kind is list else "tuple", items=tuple(items))
        return None

    @property
    def plain(self) -> Any:
        """The value, with its own class: JSON has one kind of number."""
        assert self.type is not None, "it is a plain value"
        return None if self.type == "NoneType" else _TYPES[self.type](self.value)

    def example(self, device: torch.device) -> Any:
        """A value of this form; a tensor's numbers are random."""
        if self.kind == "tensor":
            return self._example_tensor(device)
        if self.kind == "value":
            return self.plain
        if self.kind == "dtype":
            return getattr(torch, str(self.dtype))
        return {"list": list, "tuple": tuple}[self.kind](item.example(device) for item in self.items or ())

    def _example_tensor(self, device: torch.device) -> torch.Tensor:
        assert self.shape is not None, "it is a tensor"
        assert self.strides is not None, "it is a tensor"
        dtype = getattr(torch, str(self.dtype))
        reach = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        length = reach if 0 not in self.shape else 0
        if dtype.is_floating_point or dtype.is_complex:
            wide = torch.complex64 if dtype.is_complex else torch.float32
            flat = torch.randn(length, dtype=wide, device=device).to(dtype)
        else:
            flat = torch.randint(0, _RANDOM_INTEGERS, (length,), device=device).to(dtype)
        return flat.as_strided(self.shape, self.strides)

    def describe(self) -> str:
        """As in `float32 [2, 8, 64, 32]`; strides are told where they are not those of a contiguous tensor."""
        if self.kind == "value":
            return repr(self.plain)
        if self.kind == "tensor":
            assert self.shape is not None, "it is a tensor"
            is_usual = self.strides == torch.empty(self.shape, device="meta").stride()
            return f"{self.dtype} {list(self.shape)}" + ("" if is_usual else f" strides {list(self.strides or ())}")
        if self.kind == "dtype":
            return str(self.dtype)
        text = ", ".join(item.describe() for item in self.items or ())
        return f"[{text}]" if self.kind == "list" else f"({text})"


class CallSignature(Model):
    """The form of a call: of its positional arguments, and of those by name, in the order in which code gives them."""

    args: tuple[ArgumentForm, ...]
    kwargs: dict[str, ArgumentForm] = {}
    device_type: str

    @field_validator("device_type")
    @classmethod
    def _is_device(cls, value: str) -> str:
        try:
            return torch.device(value).type
        except RuntimeError:
            raise ValueError(f"{value!r} is no kind of device") from None

    @classmethod
    def of(cls, arguments: Arguments) -> CallSignature | None:
        """The form of a call; None where an argument's cannot be told, or tensors lie on devices of several kinds."""
        args, kwargs = arguments
        by_place = [ArgumentForm.of(value) for value in args]
        by_name = {name: ArgumentForm.of(value) for name, value in kwargs.items()}
        devices = {tensor.device.type for tensor in tensors_in((args, kwargs))}
        if None in by_place or None in by_name.values() or len(devices) != 1:
            return None
        return cls(args=tuple(by_place), kwargs=by_name, device_type=devices.pop())

    def example(self, device: torch.device) -> Arguments:
        """Arguments of this form; the numbers of tensors are random."""
        kwargs = {name: form.example(device) for name, form in self.kwargs.items()}
        return tuple(form.example(device) for form in self.args), kwargs

    def describe(self) -> str:
        """Its arguments as text."""
        named = [f"{name}={form.describe()}" for name, form in self.kwargs.items()]
        return ", ".join([*(form.describe() for form in self.args), *named])

    @property
    def key(self) -> Any:
        """What `key_of` returns for calls of this form."""
        args, kwargs = self.example(torch.device("meta"))
        return _with_place(key_of(args, kwargs), self.device_type == "cpu")

    @property
    def test(self) -> Callable[[Sequence[Any], Mapping[str, Any]], bool]:
        """Whether a call is of this form, by comparisons that a compiler can trace and turn into guards."""
        return _Test(self)


def key_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What is equal for calls of one form only; made in each swapped call, so that it is made of what is at hand."""
    parts: list[Any] = []
    for value in args:
        if value.__class__ is _Tensor:
            parts += (value.dtype, value.shape, value.stride(), value.is_cpu)
        else:
            parts += _part(value)
    for name, value in kwargs.items():
        if value.__class__ in _SIMPLE:
            parts += (name, value.__class__, value)
        else:
            parts.append(name)
            parts += _part(value)
    return tuple(parts)


def _part(value: Any) -> tuple[Any, ...]:
    """A dtype, a class or an object, which tells how many entries follow, so that no two rows are mixed up."""
    kind = value.__class__
    if kind in _TENSORS:
        return value.dtype, value.shape, value.stride(), value.is_cpu  # a plan is of one kind of accelerator
    if kind in _PLAIN or kind is torch.dtype:
        return kind, value
    if kind is list:
        return list, tuple([_part(item) for item in value])
    if kind in (tuple, torch.Size):
        return tuple, tuple([_part(item) for item in value])
    return (object(),)  # equal to nothing


def _with_place(key: tuple[Any, ...], is_cpu: bool) -> tuple[Any, ...]:
    """The key of an example without data, with what it tells of a tensor's place put right."""
    parts = [_with_place(part, is_cpu) if type(part) is tuple else part for part in key]
    for index, part in enumerate(parts[:-3]):
        if isinstance(part, torch.dtype) and isinstance(parts[index + 1], torch.Size):
            parts[index + 3] = is_cpu
    return tuple(parts)


class _Test:
    """Plain comparisons, of plain attributes: see `CallSignature.test`."""

    def __init__(self, signature: CallSignature) -> None:
        self._args = [_ArgumentTest(form) for form in signature.args]
        self._names = list(signature.kwargs)
        self._kwargs = [_ArgumentTest(form) for form in signature.kwargs.values()]
        self._device_type = signature.device_type

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call is of the form."""
        if len(args) != len(self._args) or len(kwargs) != len(self._names):
            return False
        for test, value in zip(self._args, args, strict=True):
            if not test.fits(value, self._device_type):
                return False
        for name, test in zip(self._names, self._kwargs, strict=True):
            if name not in kwargs or not test.fits(kwargs[name], self._device_type):
                return False
        return True


class _ArgumentTest:
    def __init__(self, form: ArgumentForm) -> None:
        self.is_tensor = form.kind == "tensor"
        self.shape = list(form.shape or ())
        self.strides = list(form.strides or ())
        self.dtype = getattr(torch, form.dtype) if form.dtype is not None else None
        self.type = _TYPES[form.type] if form.type is not None else None
        self.value = form.plain if form.type is not None else None
        self.kind = form.kind
        self.items = [_ArgumentTest(item) for item in form.items or ()]

    def fits(self, value: Any, device_type: str) -> bool:
        if self.is_tensor:
            return isinstance(value, torch.Tensor) and self._fits_tensor(value, device_type)
        if self.kind == "value":
            # A size that a compiler keeps open counts as the number that it is found equal to.
            is_size = self.type is int and isinstance(value, torch.SymInt)
            return (type(value) is self.type or is_size) and bool(value == self.value)
        if self.kind == "dtype":
            return bool(value == self.dtype)
        if not isinstance(value, (list, tuple)) or isinstance(value, list) != (self.kind == "list"):
            return False
        if len(value) != len(self.items):
            return False
        return all(test.fits(item, device_type) for test, item in zip(self.items, value, strict=True))

    def _fits_tensor(self, value: torch.Tensor, device_type: str) -> bool:
        if value.dtype != self.dtype or value.device.type != device_type or value.dim() != len(self.shape):
            return False
        return all(size == wanted for size, wanted in zip(value.shape, self.shape, strict=True)) and all(
            step == wanted for step, wanted in zip(value.stride(), self.strides, strict=True)
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
