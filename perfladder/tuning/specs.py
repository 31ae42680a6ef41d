"""What recorded calls had in common: for each tensor its dtype and the sizes of its axes, for all else its value."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import Field

from perfladder.models import Model
from perfladder.tuning.dims import BatchDim, Dim, DynamicDim, Path, SemanticPath, Shape
from perfladder.tuning.tree import Leaf, scalar_text, semantic_path


class TensorSpec(Model):
    """One tensor of a graph, for all its calls."""

    path: Path
    access_path: str
    dtype: str = Field(description="without 'torch.'")
    shape: tuple[int | str, ...] = Field(
        description="size of each axis; of one whose size changes its label. Axes of one label have equal sizes"
    )
    min_shape: tuple[int, ...]
    opt_shape: tuple[int, ...]
    max_shape: tuple[int, ...]
    batch_multipliers: tuple[int | None, ...] = Field(
        description="entries for each sample of the batch; None where an axis does not follow the batch"
    )

    @property
    def semantic_path(self) -> SemanticPath:
        """How users name it in `dynamic_shapes`."""
        return semantic_path(self.path)

    @property
    def batch_axes(self) -> dict[int, int]:
        """Axes that follow the batch size, each with its entries for one sample."""
        return {axis: times for axis, times in enumerate(self.batch_multipliers) if times is not None}

    @property
    def dynamic_axes(self) -> list[int]:
        """Axes whose size changes, those of the batch too."""
        return [axis for axis, size in enumerate(self.shape) if isinstance(size, str)]


class ScalarSpec(Model):
    """One value of a graph that is no tensor."""

    path: Path
    access_path: str
    type: str
    value: str = Field(description="as text; empty for an object of a class that tuning cannot look into")
    varies: bool = Field(default=False, description="other calls had other values; `value` is the first")
    containers: tuple[str, ...] = ()

    @property
    def semantic_path(self) -> SemanticPath:
        """How users would name it."""
        return semantic_path(self.path)

    @property
    def identity(self) -> LeafIdentity:
        """What tells graphs apart, in strict mode."""
        return self.path, self.containers, f"{self.type} {self.value}"

    @property
    def loose_identity(self) -> LeafIdentity:
        """What tells graphs apart where values do not count."""
        return self.path, self.containers, self.type


LeafIdentity = tuple[Path, tuple[str, ...], str]


class SeenAxis(Model):
    """The sizes that one axis had."""

    min: int
    max: int
    multiplier: int | None = Field(description="size over batch size, as long as that is one whole number in all calls")
    history: str = Field(description="equal for axes that had equal sizes in every call")

    @staticmethod
    def first(size: int, batch_size: int | None) -> SeenAxis:
        """An axis in its first call."""
        return SeenAxis(min=size, max=size, multiplier=_multiplier(size, batch_size), history=_chain("", size))

    def seen(self, size: int, batch_size: int | None) -> SeenAxis:
        """The same after one more call."""
        is_same = self.multiplier is not None and self.multiplier == _multiplier(size, batch_size)
        return SeenAxis(
            min=min(self.min, size),
            max=max(self.max, size),
            multiplier=self.multiplier if is_same else None,
            history=_chain(self.history, size),
        )


def _multiplier(size: int, batch_size: int | None) -> int | None:
    return size // batch_size if batch_size and size and size % batch_size == 0 else None


def _chain(history: str, size: int) -> str:
    return hashlib.blake2b(f"{history} {size}".encode(), digest_size=8).hexdigest()


class SeenTensor(Model):
    """What calls had at the place of one tensor; a `TensorSpec` is what that means."""

    path: Path
    access_path: str
    dtype: str
    containers: tuple[str, ...]
    axes: tuple[SeenAxis, ...]

    @staticmethod
    def first(leaf: Leaf, batch_size: int | None) -> SeenTensor:
        """A tensor in its first call."""
        axes = tuple(SeenAxis.first(size, batch_size) for size in leaf.value.shape)
        return SeenTensor(
            path=leaf.path,
            access_path=leaf.access_path,
            dtype=dtype_name(leaf),
            containers=leaf.containers,
            axes=axes,
        )

    def seen(self, leaf: Leaf, batch_size: int | None) -> SeenTensor:
        """The same after one more call."""
        axes = (axis.seen(size, batch_size) for axis, size in zip(self.axes, leaf.value.shape, strict=True))
        return self.model_copy(update={"axes": tuple(axes)})

    @property
    def semantic_path(self) -> SemanticPath:
        """How users name it in `dynamic_shapes`."""
        return semantic_path(self.path)

    @property
    def identity(self) -> LeafIdentity:
        """What tells graphs apart."""
        return self.path, self.containers, _tensor_text(self.dtype, len(self.axes))


def dtype_name(leaf: Leaf) -> str:
    """The dtype of a tensor, as `float16`."""
    return str(leaf.value.dtype).removeprefix("torch.")


def _tensor_text(dtype: str, rank: int) -> str:
    return f"tensor {dtype} {rank}"


def scalar_spec(leaf: Leaf) -> ScalarSpec:
    """The description of a leaf that is no tensor."""
    kind = type(leaf.value)
    return ScalarSpec(
        path=leaf.path,
        access_path=leaf.access_path,
        type=f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."),
        value=scalar_text(leaf.value) if leaf.kind == "scalar" else "",
        containers=leaf.containers,
    )


def leaf_identity(leaf: Leaf, *, strict: bool) -> LeafIdentity:
    """What tells graphs apart: place, classes around it, and dtype and rank, or class and in strict mode value."""
    if leaf.kind == "tensor":
        return leaf.path, leaf.containers, _tensor_text(dtype_name(leaf), leaf.value.dim())
    spec = scalar_spec(leaf)
    return spec.identity if strict else spec.loose_identity


class DimModel(Model):
    """A dimension that a user stated, as a file holds it."""

    kind: Literal["dynamic", "batch"]
    name: str
    min: int
    max: int
    opt: int

    @staticmethod
    def of(dim: DynamicDim | BatchDim) -> DimModel:
        """The file form of a dimension."""
        kind: Literal["dynamic", "batch"] = "batch" if isinstance(dim, BatchDim) else "dynamic"
        return DimModel(kind=kind, name=dim.name, min=dim.min, max=dim.max, opt=dim.opt)

    def dim(self) -> DynamicDim | BatchDim:
        """The dimension again."""
        return (BatchDim if self.kind == "batch" else DynamicDim)(self.name, self.min, self.max, self.opt)


class StatedShape(Model):
    """One entry of `dynamic_shapes`, as a file holds it."""

    path: SemanticPath
    shape: tuple[int | DimModel, ...]


def stated_models(dynamic_shapes: Mapping[SemanticPath, Shape]) -> list[StatedShape]:
    """The file form of `dynamic_shapes`."""
    return [
        StatedShape(path=path, shape=tuple(dim if isinstance(dim, int) else DimModel.of(dim) for dim in shape))
        for path, shape in dynamic_shapes.items()
    ]


def stated_shapes(models: Iterable[StatedShape]) -> dict[SemanticPath, Shape]:
    """`dynamic_shapes` again."""
    return {model.path: tuple(dim if isinstance(dim, int) else dim.dim() for dim in model.shape) for model in models}


def tensor_specs(
    inputs: Iterable[SeenTensor], outputs: Iterable[SeenTensor], stated: Mapping[SemanticPath, Shape]
) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """What was seen, with labels for the axes that changed, and what the user stated in place of what was seen.

    An axis follows the batch if its size changed and was one whole multiple of the batch size in every call. Axes of
    one multiple have one label, and so have other axes that had equal sizes in every call. A label's number is the axis
    at which it appears first, or the next free one.
    """
    taken = {dim.name for shape in stated.values() for dim in shape if not isinstance(dim, int)}
    labels = _Labels(taken)
    first = [_tensor_spec(tensor, stated.get(tensor.semantic_path), labels) for tensor in inputs]
    return first, [_tensor_spec(tensor, None, labels) for tensor in outputs]


class _Labels:
    def __init__(self, taken: set[str]) -> None:
        self._taken = taken
        self._labels: dict[tuple[str, int | str], str] = {}

    def of(self, axis: SeenAxis, index: int) -> str:
        behaviour = ("dim", axis.history) if axis.multiplier is None else ("batch", axis.multiplier)
        if behaviour not in self._labels:
            while f"{behaviour[0]}{index}" in self._taken:
                index += 1
            self._labels[behaviour] = f"{behaviour[0]}{index}"
            self._taken.add(self._labels[behaviour])
        return self._labels[behaviour]


def _tensor_spec(tensor: SeenTensor, stated: Shape | None, labels: _Labels) -> TensorSpec:
    if stated is None:
        columns = [_inferred(axis, index, labels) for index, axis in enumerate(tensor.axes)]
    else:
        columns = [_as_stated(dim, axis) for dim, axis in zip(stated, tensor.axes, strict=True)]
    return TensorSpec(
        path=tensor.path,
        access_path=tensor.access_path,
        dtype=tensor.dtype,
        shape=tuple(column[0] for column in columns),
        min_shape=tuple(column[1] for column in columns),
        opt_shape=tuple(column[2] for column in columns),
        max_shape=tuple(column[3] for column in columns),
        batch_multipliers=tuple(column[4] for column in columns),
    )


_Column = tuple[int | str, int, int, int, int | None]


def _inferred(axis: SeenAxis, index: int, labels: _Labels) -> _Column:
    if axis.min == axis.max:
        return axis.min, axis.min, axis.max, axis.max, None
    return labels.of(axis, index), axis.min, axis.max, axis.max, axis.multiplier


def _as_stated(dim: Dim, axis: SeenAxis) -> _Column:
    if isinstance(dim, int):
        return dim, dim, dim, dim, None
    multiplier = (axis.multiplier or 1) if isinstance(dim, BatchDim) else None
    return dim.name, dim.min, dim.opt, dim.max, multiplier
