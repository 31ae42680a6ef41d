"""The shapes that users state for a module's inputs: bounded dimensions, and which of them is the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perfladder.errors import InputError

Path = tuple[str | int, ...]
SemanticPath = str | Path
"""How users name an input: a parameter's name, or the path to a tensor inside one."""


@dataclass(frozen=True)
class _Bounded:
    name: str
    min: int
    max: int
    opt: int = None  # type: ignore[assignment]  # what is left out becomes `max`, so that readers always find a size

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InputError(f"{self._what}: name: expected a text that is not empty, got {self.name!r}.")
        if self.opt is None:
            object.__setattr__(self, "opt", self.max)
        for field in ("min", "max", "opt"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{self}: {field}: expected a whole number from 1 up, got {value!r}.")
        if self.min >= self.max:
            raise InputError(f"{self}: min has to be below max. Write a size that never changes as a plain number.")
        if not self.min <= self.opt <= self.max:
            raise InputError(f"{self}: opt: {self.opt} is outside {self.min}..{self.max}.")

    @property
    def _what(self) -> str:
        return type(self).__name__


@dataclass(frozen=True)
class DynamicDim(_Bounded):
    """A dimension whose size changes between calls; dimensions of one name have equal sizes in a call.

    Attributes:
        name: Your name for it.
        min: Smallest size.
        max: Largest size, inclusive.
        opt: The size to build for where a backend prefers one; `max` by default.

    Raises:
        InputError: The name is empty, a size is no whole number from 1 up, or they are in no order.
    """


@dataclass(frozen=True)
class BatchDim(_Bounded):
    """The dimension that counts the samples of a call; otherwise as `DynamicDim`."""


Dim = int | DynamicDim | BatchDim
Shape = tuple[Dim, ...]


def check_dynamic_shapes(dynamic_shapes: Mapping[Any, Any] | None) -> dict[SemanticPath, Shape]:
    """What a user stated, checked as far as it can be without a call.

    Args:
        dynamic_shapes: By a parameter's name, or by a path such as `("options", "mask")`: all sizes of a tensor, as
            whole numbers, `BatchDim`s and `DynamicDim`s.

    Raises:
        InputError: A key or a shape has another form, or one name stands for two different dimensions.
    """
    if dynamic_shapes is None:
        return {}
    if not isinstance(dynamic_shapes, Mapping):
        raise InputError(
            "dynamic_shapes: expected a mapping such as {'x': (BatchDim('batch', 1, 8), 3)}, "
            f"got a {type(dynamic_shapes).__name__}."
        )
    by_name: dict[str, DynamicDim | BatchDim] = {}
    for key, shape in dynamic_shapes.items():
        _check_key(key)
        if not isinstance(shape, tuple):
            raise InputError(
                f"dynamic_shapes[{key!r}]: expected a tuple of all sizes of the tensor, got {shape!r}; "
                "write the comma of a tuple of one: (dim,)."
            )
        for axis, dim in enumerate(shape):
            _check_dim(dim, f"dynamic_shapes[{key!r}][{axis}]", by_name)
    return dict(dynamic_shapes)


def _check_key(key: Any) -> None:
    if isinstance(key, str) and key:
        return
    is_path = isinstance(key, tuple) and len(key) >= 2 and isinstance(key[0], str)
    if not is_path or not all(isinstance(part, (str, int)) and not isinstance(part, bool) for part in key):
        raise InputError(
            f"dynamic_shapes: {key!r} is no input. Name a parameter of forward, as 'x', or give the path to a tensor "
            "inside one, as ('options', 'mask') or ('items', 0)."
        )


def _check_dim(dim: Any, where: str, by_name: dict[str, DynamicDim | BatchDim]) -> None:
    if isinstance(dim, (DynamicDim, BatchDim)):
        first = by_name.setdefault(dim.name, dim)
        if first != dim:
            raise InputError(
                f"{where}: the dimension {dim.name!r} is {dim} here and {first} elsewhere. Dimensions of one name are "
                "one dimension: give them the same type and sizes, or another name."
            )
    elif isinstance(dim, bool) or not isinstance(dim, int) or dim < 0:
        raise InputError(f"{where}: expected a size, a BatchDim or a DynamicDim, got {dim!r}.")
