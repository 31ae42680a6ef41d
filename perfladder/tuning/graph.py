"""One graph: a form in which a module is called, with the sizes its tensors have in all calls of that form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from perfladder.errors import InputError
from perfladder.models import Model
from perfladder.tuning.dims import Path, SemanticPath, Shape
from perfladder.tuning.graph_tables import Table, as_text, other_table, tensor_table
from perfladder.tuning.specs import (
    LeafIdentity,
    ScalarSpec,
    SeenTensor,
    StatedShape,
    TensorSpec,
    dtype_name,
    scalar_spec,
    stated_models,
    stated_shapes,
    tensor_specs,
)
from perfladder.tuning.tree import Leaf, bind, input_leaves, map_inputs, output_leaves

Sizes = tuple[int, ...]
ShapeRange = tuple[Sizes, Sizes, Sizes]


class GraphModel(Model):
    """A graph as a file holds it. `inputs` and `outputs` are for readers; they follow from the rest."""

    name: str
    parameters: tuple[str, ...]
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    seen_inputs: list[SeenTensor]
    seen_outputs: list[SeenTensor]
    others: list[ScalarSpec]
    output_others: list[ScalarSpec]
    unsupported: list[ScalarSpec]
    stated: list[StatedShape]
    num_samples: int
    batch_sizes: list[int]
    max_batch_size: int | None
    output_change: str | None


class GraphSpec:
    """A form of call: which arguments, in which structure, of which ranks and dtypes.

    Attributes:
        name: `0`, `1` and so on, in the order of first calls.
        parameters: Names that positional arguments have.
        inputs: The tensors among the arguments.
        others: Arguments that are no tensors.
        unsupported: Objects among the arguments that tuning cannot look into.
        outputs: The tensors that calls returned.
        output_others: All else that calls returned.
        num_samples: Recorded calls.
        batch_sizes: Their batch sizes, where known, in order of size.
        output_change: How one call's result differed in form from the first one's; None where all were alike.
    """

    def __init__(self, name: str, parameters: tuple[str, ...], stated: Mapping[SemanticPath, Shape]) -> None:
        self.name = name
        self.parameters = parameters
        self.inputs: list[TensorSpec] = []
        self.others: list[ScalarSpec] = []
        self.unsupported: list[ScalarSpec] = []
        self.outputs: list[TensorSpec] = []
        self.output_others: list[ScalarSpec] = []
        self.num_samples = 0
        self.batch_sizes: list[int] = []
        self.output_change: str | None = None
        self._stated = dict(stated)
        self._seen_inputs: dict[Path, SeenTensor] = {}
        self._seen_outputs: dict[Path, SeenTensor] = {}
        self._max_batch_size: int | None = None

    def __repr__(self) -> str:
        inputs = ", ".join(f"{spec.access_path}: {list(spec.shape)} {spec.dtype}" for spec in self.inputs)
        return f"GraphSpec({self.name}: {inputs})"

    def identity(self, *, strict: bool) -> frozenset[LeafIdentity]:
        """What a call has to equal to be one of this graph, besides sizes."""
        tensors = [tensor.identity for tensor in self._seen_inputs.values()]
        others = [spec.identity if strict else spec.loose_identity for spec in (*self.others, *self.unsupported)]
        return frozenset([*tensors, *others])

    def record(self, leaves: Sequence[Leaf], batch_size: int | None) -> None:
        """Add the arguments of a call of this graph."""
        is_first = not self.num_samples
        for leaf in leaves:
            if leaf.kind == "tensor":
                seen = self._seen_inputs.get(leaf.path)
                self._seen_inputs[leaf.path] = (
                    seen.seen(leaf, batch_size) if seen else SeenTensor.first(leaf, batch_size)
                )
            elif is_first:
                (self.others if leaf.kind == "scalar" else self.unsupported).append(scalar_spec(leaf))
        if not is_first:
            self.others = _with_values(self.others, leaves)
        self.num_samples += 1
        if batch_size is not None and batch_size not in self.batch_sizes:
            self.batch_sizes = sorted([*self.batch_sizes, batch_size])
        self._update()

    def record_output(self, output: Any, batch_size: int | None) -> None:
        """Add what a call of this graph returned."""
        leaves = output_leaves(output)
        is_first = not self._seen_outputs and not self.output_others
        if not is_first and self.output_change is None:
            self.output_change = _output_change(self._seen_outputs, self.output_others, leaves)
        for leaf in leaves:
            seen = self._seen_outputs.get(leaf.path)
            if leaf.kind != "tensor":
                if is_first:
                    self.output_others.append(scalar_spec(leaf))
            elif seen is None:
                self._seen_outputs[leaf.path] = SeenTensor.first(leaf, batch_size)
            elif len(seen.axes) == leaf.value.dim():
                self._seen_outputs[leaf.path] = seen.seen(leaf, batch_size)
        if not is_first:
            self.output_others = _with_values(self.output_others, leaves)
        self._update()

    def extend_max_batch_size(self, batch_size: int) -> None:
        """Let detected batch axes reach up to a batch size that was tried and worked, no further than stated ones."""
        batch_size = min(batch_size, self.get_batch_size_limit() or batch_size)
        if batch_size > self.get_max_batch_size():
            self._max_batch_size = batch_size
            self._update()

    def _update(self) -> None:
        self.inputs, self.outputs = tensor_specs(self._seen_inputs.values(), self._seen_outputs.values(), self._stated)
        if self._max_batch_size is not None:
            self.inputs = [
                spec if spec.semantic_path in self._stated else _extended(spec, self._max_batch_size)
                for spec in self.inputs
            ]
            self.outputs = [_extended(spec, self._max_batch_size) for spec in self.outputs]

    @property
    def has_batch_axis(self) -> bool:
        """Whether a tensor input has an axis that follows the batch size."""
        return any(spec.batch_axes for spec in self.inputs)

    @property
    def has_dynamic_axis(self) -> bool:
        """Whether any size changes between calls."""
        return any(spec.dynamic_axes for spec in self.inputs)

    def get_min_batch_size(self) -> int:
        """The least number of samples that all batch axes allow; 1 where there is no batch axis."""
        return max((-(-spec.min_shape[axis] // times) for spec, axis, times in self._batch_axes()), default=1)

    def get_max_batch_size(self) -> int:
        """The greatest number of samples that all batch axes allow; 1 where there is no batch axis."""
        return min((spec.max_shape[axis] // times for spec, axis, times in self._batch_axes()), default=1)

    def get_opt_batch_size(self) -> int:
        """The number of samples to build for where a backend prefers one."""
        least = min((spec.opt_shape[axis] // times for spec, axis, times in self._batch_axes()), default=1)
        return max(least, self.get_min_batch_size())

    def get_batch_size_limit(self) -> int | None:
        """The greatest number of samples that stated sizes allow; None where none of them has a batch axis."""
        limits = [
            spec.max_shape[axis] // times
            for spec, axis, times in self._batch_axes()
            if spec.semantic_path in self._stated
        ]
        return min(limits, default=None)

    def size_range(self, spec: TensorSpec, axis: int) -> tuple[int, int]:
        """The least and the largest size of an input's axis in calls that the graph covers.

        An axis that calls have shown to follow the batch is bounded by all the others that do.
        """
        times = self.entries_for_each_sample(spec, axis)
        if times is None:
            return spec.min_shape[axis], spec.max_shape[axis]
        return times * self.get_min_batch_size(), times * self.get_max_batch_size()

    def _batch_axes(self) -> list[tuple[TensorSpec, int, int]]:
        return [(spec, axis, times) for spec in self.inputs for axis, times in spec.batch_axes.items()]

    def effective_input_shapes(self) -> dict[SemanticPath, ShapeRange]:
        """Smallest, preferred and largest shape of each tensor input: as stated, else as seen."""
        return {spec.semantic_path: (spec.min_shape, spec.opt_shape, spec.max_shape) for spec in self.inputs}

    def covers(self, shapes: Mapping[Any, Sequence[int]]) -> bool:
        """Whether a call whose tensors have these shapes, by semantic path, is within the graph's sizes."""
        return self.misfit(shapes) is None

    def misfit(self, shapes: Mapping[Any, Sequence[int]]) -> str | None:
        """Why shapes, by semantic path, are not within the graph's sizes; None where they are."""
        by_label: dict[str, tuple[int, str]] = {}
        samples: tuple[float, str] | None = None
        for spec in self.inputs:
            sizes = shapes.get(spec.semantic_path)
            if sizes is None:
                return f"the tensor `{spec.access_path}` is missing"
            if len(sizes) != len(spec.shape):
                return f"`{spec.access_path}` has rank {len(sizes)}, not {len(spec.shape)}"
            for axis, size in enumerate(sizes):
                where = f"`{spec.access_path}` axis {axis}"
                low, high, label = spec.min_shape[axis], spec.max_shape[axis], spec.shape[axis]
                if not low <= size <= high:
                    return f"size {size} of {where} " + (
                        f"is not {low}" if low == high else f"is outside {low}..{high}"
                    )
                if not isinstance(label, str):
                    continue
                first, at = by_label.setdefault(label, (size, where))
                if first != size:
                    return f"{at} has size {first} and {where} has {size}, but both are {label!r} and have to be equal"
                times = self.entries_for_each_sample(spec, axis)
                if times is not None:
                    batch, at = samples = samples or (size / times, where)
                    if batch != size / times or size % times:
                        return f"size {size} of {where} does not fit the batch of {at}"
        return None

    def entries_for_each_sample(self, spec: TensorSpec, axis: int) -> int | None:
        """Entries for each sample, where calls have shown it and it is not only what a user stated."""
        is_shown = self._seen_inputs[spec.path].axes[axis].multiplier is not None
        return spec.batch_multipliers[axis] if is_shown else None

    def make_batch(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch_size: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A copy of a call of this graph with another number of samples; samples come again where there are fewer.

        Raises:
            InputError: The batch size is no whole number from 1 up, or the call is none of this graph.
        """
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise InputError(f"batch_size: expected a whole number from 1 up, got {batch_size!r}.")
        return self._resized(args, kwargs, batch_size, None)

    def at_shapes(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], which: Literal["min", "opt", "max"]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A copy of a call of this graph at its smallest, preferred or largest sizes.

        Raises:
            InputError: The call is none of this graph.
        """
        batch_size = {
            "min": self.get_min_batch_size,
            "opt": self.get_opt_batch_size,
            "max": self.get_max_batch_size,
        }[which]()
        return self._resized(args, kwargs, batch_size, which)

    def _resized(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch_size: int, which: str | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        from perfladder.tuning.resize import resized

        specs = {spec.path: spec for spec in self.inputs}
        bound = bind(self.parameters, args, kwargs)
        shapes = {leaf.path: tuple(leaf.value.shape) for leaf in input_leaves(bound) if leaf.kind == "tensor"}
        if {path: len(sizes) for path, sizes in shapes.items()} != {
            path: len(spec.shape) for path, spec in specs.items()
        }:
            raise InputError(f"The call is none of graph {self.name}: it has other tensors, or tensors of other ranks.")

        def asked(path: Path) -> tuple[Sizes, tuple[int | None, ...]]:
            spec = specs[path]
            sizes = list(shapes[path] if which is None else getattr(spec, f"{which}_shape"))
            for axis, times in spec.batch_axes.items():
                sizes[axis] = times * batch_size
            return tuple(sizes), spec.batch_multipliers

        values = map_inputs(bound, asked, lambda tensor, wish: resized(tensor, *wish))
        names = list(values)
        return tuple(values[name] for name in names[: len(args)]), {name: values[name] for name in names[len(args) :]}

    def tables(self) -> list[Table]:
        """The graph as tables: title, header and rows; tables without rows are left out."""
        tables = [
            tensor_table("Input tensors", self.inputs),
            other_table("Other inputs", [*self.others, *self.unsupported]),
            tensor_table("Output tensors", self.outputs),
            other_table("Other outputs", self.output_others),
        ]
        return [table for table in tables if table[2]]

    def describe(self) -> str:
        """The tables as text."""
        return as_text(self.tables())

    def to_model(self) -> GraphModel:
        """The graph as a file holds it."""
        return GraphModel(
            name=self.name,
            parameters=self.parameters,
            inputs=self.inputs,
            outputs=self.outputs,
            seen_inputs=list(self._seen_inputs.values()),
            seen_outputs=list(self._seen_outputs.values()),
            others=self.others,
            output_others=self.output_others,
            unsupported=self.unsupported,
            stated=stated_models(self._stated),
            num_samples=self.num_samples,
            batch_sizes=self.batch_sizes,
            max_batch_size=self._max_batch_size,
            output_change=self.output_change,
        )

    @staticmethod
    def from_model(model: GraphModel) -> GraphSpec:
        """The graph again."""
        graph = GraphSpec(model.name, model.parameters, stated_shapes(model.stated))
        graph._seen_inputs = {tensor.path: tensor for tensor in model.seen_inputs}
        graph._seen_outputs = {tensor.path: tensor for tensor in model.seen_outputs}
        graph.others, graph.output_others = list(model.others), list(model.output_others)
        graph.unsupported = list(model.unsupported)
        graph.num_samples, graph.batch_sizes = model.num_samples, list(model.batch_sizes)
        graph._max_batch_size, graph.output_change = model.max_batch_size, model.output_change
        graph._update()
        return graph


def _with_values(specs: list[ScalarSpec], leaves: Sequence[Leaf]) -> list[ScalarSpec]:
    """The same values, with those marked that another call had differently."""
    values = {leaf.path: scalar_spec(leaf).value for leaf in leaves if leaf.kind == "scalar"}
    return [
        spec
        if spec.varies or values.get(spec.path, spec.value) == spec.value
        else spec.model_copy(update={"varies": True})
        for spec in specs
    ]


def _output_change(seen: Mapping[Path, SeenTensor], others: list[ScalarSpec], leaves: Sequence[Leaf]) -> str | None:
    """The first way in which a result's form differs from the first one's."""
    first = {tensor.access_path: (_tensor_form(tensor), tensor.containers) for tensor in seen.values()}
    first |= {spec.access_path: (spec.type, spec.containers) for spec in others}
    later = {leaf.access_path: (_form(leaf), leaf.containers) for leaf in leaves}
    for path in dict.fromkeys([*first, *later]):
        if path not in first:
            return f"`{path}` was absent in the first call and {later[path][0]} in a later one"
        if path not in later:
            return f"`{path}` was {first[path][0]} in the first call and absent in a later one"
        if first[path][0] != later[path][0]:
            return f"`{path}` was {first[path][0]} in the first call and {later[path][0]} in a later one"
        if first[path] != later[path]:
            return f"`{path}` lies in other containers than in the first call"
    return None


def _tensor_form(tensor: SeenTensor) -> str:
    return f"a {len(tensor.axes)}-d {tensor.dtype} tensor"


def _form(leaf: Leaf) -> str:
    if leaf.kind == "tensor":
        return f"a {leaf.value.dim()}-d {dtype_name(leaf)} tensor"
    return scalar_spec(leaf).type


def _extended(spec: TensorSpec, batch_size: int) -> TensorSpec:
    sizes = list(spec.max_shape)
    for axis, times in spec.batch_axes.items():
        sizes[axis] = max(sizes[axis], times * batch_size)
    return spec.model_copy(update={"max_shape": tuple(sizes), "opt_shape": tuple(sizes)})
