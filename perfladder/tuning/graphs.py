"""The graphs of one module: calls are recorded into them, and later calls are looked up in them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from perfladder.errors import InputError
from perfladder.models import Model
from perfladder.text import near_names
from perfladder.tuning.dims import Path, SemanticPath, Shape, check_dynamic_shapes
from perfladder.tuning.graph import GraphModel
from perfladder.tuning.graph import GraphSpec as GraphSpec
from perfladder.tuning.specs import ScalarSpec as ScalarSpec
from perfladder.tuning.specs import StatedShape, leaf_identity, stated_models, stated_shapes
from perfladder.tuning.specs import TensorSpec as TensorSpec
from perfladder.tuning.tree import Leaf, bind, input_leaves, semantic_path
from perfladder.tuning.unseen import too_many_graphs, why_unseen


class TableModel(Model):
    """All graphs of a module as a file holds them."""

    parameters: tuple[str, ...]
    strict: bool
    limit: int
    dynamic_shapes: list[StatedShape]
    matched_paths: list[SemanticPath]
    graphs: list[GraphModel]


class GraphTable:
    """The graphs of one module.

    A call belongs to a graph by the names of its arguments, however passed, by their nested structure, by rank and
    dtype of each tensor, and by class and in strict mode value of all else. Sizes do not make graphs: a graph has those
    of all its calls.

    Args:
        parameters: Names for positional arguments, as `tree.parameter_names` finds them.
        strict: Whether the values of arguments that are no tensors make graphs, or only their classes.
        limit: At most so many graphs.
        dynamic_shapes: Shapes that the user states, as `dims.check_dynamic_shapes` takes them.

    Attributes:
        graphs: In the order of first calls.

    Raises:
        InputError: `limit` or `dynamic_shapes` has a wrong form.
    """

    def __init__(
        self,
        parameters: Sequence[str],
        *,
        strict: bool,
        limit: int,
        dynamic_shapes: Mapping[SemanticPath, Shape] | None = None,
    ) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise InputError(f"limit: expected a whole number of graphs from 1 up, got {limit!r}.")
        self.parameters = tuple(parameters)
        self.strict = strict
        self.limit = limit
        self.dynamic_shapes = check_dynamic_shapes(dynamic_shapes)
        self.graphs: list[GraphSpec] = []
        self._by_identity: dict[Hashable, GraphSpec] = {}
        self._matched: set[SemanticPath] = set()

    def observe(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch_size: int | None = None) -> GraphSpec:
        """Record a call before it is made.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            batch_size: Samples in the call; None if it is not known, and then no axis is taken for the batch.

        Returns:
            Its graph; the same object for all calls of one graph.

        Raises:
            InputError: It would be one graph too many, or a tensor is not as `dynamic_shapes` states; nothing is then
                recorded.
        """
        leaves = self._leaves(args, kwargs)
        matched = self._check_stated(leaves)
        identity = self._identity(leaves)
        graph = self._by_identity.get(identity)
        if graph is None:
            if len(self.graphs) >= self.limit:
                raise too_many_graphs(self.graphs, leaves, self.limit, strict=self.strict)
            graph = GraphSpec(
                str(len(self.graphs)), self.parameters, {path: self.dynamic_shapes[path] for path in matched}
            )
            self.graphs.append(graph)
            self._by_identity[identity] = graph
        self._matched |= matched
        graph.record(leaves, batch_size)
        return graph

    def observe_output(self, graph: GraphSpec, output: Any, batch_size: int | None = None) -> None:
        """Record what a call returned, after the call was observed itself."""
        graph.record_output(output, batch_size)

    def adopt(self, graph: GraphSpec) -> None:
        """Put a graph, known from elsewhere, in the place of the one of the same name and form."""
        self.graphs = [graph if one.name == graph.name else one for one in self.graphs]
        self._by_identity[graph.identity(strict=self.strict)] = graph

    def find(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> GraphSpec | None:
        """The graph that a call belongs to and whose sizes cover it, if there is one."""
        leaves = self._leaves(args, kwargs)
        graph = self._by_identity.get(self._identity(leaves))
        return graph if graph is not None and graph.covers(_shapes(leaves)) else None

    def why_unseen(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """A sentence that says why `find` finds no graph for a call."""
        return why_unseen(self.graphs, self._leaves(args, kwargs), strict=self.strict)

    def check_dynamic_paths(self) -> None:
        """Check, once calls are recorded, that each path in `dynamic_shapes` was a tensor in one of them.

        Raises:
            InputError: One was not; near ones are named.
        """
        for path in self.dynamic_shapes:
            if path not in self._matched:
                known = dict.fromkeys(_text(spec.semantic_path) for graph in self.graphs for spec in graph.inputs)
                raise InputError(
                    f"dynamic_shapes: no recorded call has a tensor at {path!r}. "
                    f"{near_names(_text(path), known, 'paths of tensors')}"
                )

    def to_model(self) -> TableModel:
        """The table as a file holds it."""
        return TableModel(
            parameters=self.parameters,
            strict=self.strict,
            limit=self.limit,
            dynamic_shapes=stated_models(self.dynamic_shapes),
            matched_paths=[path for path in self.dynamic_shapes if path in self._matched],
            graphs=[graph.to_model() for graph in self.graphs],
        )

    @staticmethod
    def from_model(model: TableModel) -> GraphTable:
        """The table again."""
        table = GraphTable(
            model.parameters,
            strict=model.strict,
            limit=model.limit,
            dynamic_shapes=stated_shapes(model.dynamic_shapes),
        )
        table._matched = set(model.matched_paths)
        table.graphs = [GraphSpec.from_model(graph) for graph in model.graphs]
        table._by_identity = {graph.identity(strict=table.strict): graph for graph in table.graphs}
        return table

    def _leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Leaf]:
        return input_leaves(bind(self.parameters, args, kwargs))

    def _identity(self, leaves: Sequence[Leaf]) -> Hashable:
        return frozenset(leaf_identity(leaf, strict=self.strict) for leaf in leaves)

    def _check_stated(self, leaves: Sequence[Leaf]) -> set[SemanticPath]:
        """Which of the stated tensors are among a call's, each with sizes as stated."""
        sizes: dict[str, tuple[int, Path]] = {}
        matched = set()
        for leaf in leaves:
            stated = self.dynamic_shapes.get(leaf.semantic_path)
            if stated is not None and leaf.kind == "tensor":
                _check_shape(leaf, stated, sizes)
                matched.add(leaf.semantic_path)
        return matched


def _check_shape(leaf: Leaf, stated: Shape, sizes: dict[str, tuple[int, Path]]) -> None:
    where, shape = f"dynamic_shapes[{leaf.semantic_path!r}]", tuple(leaf.value.shape)
    if len(shape) != len(stated):
        raise InputError(
            f"{where} states {len(stated)} sizes, but the tensor in a recorded call has {len(shape)}: {list(shape)}. "
            "State the size of every axis."
        )
    for axis, (size, dim) in enumerate(zip(shape, stated, strict=True)):
        if isinstance(dim, int):
            if size != dim:
                raise InputError(
                    f"{where} states size {dim} for axis {axis}, but a recorded call has {size}. Use a DynamicDim for "
                    "a size that changes."
                )
            continue
        if not dim.min <= size <= dim.max:
            raise InputError(
                f"{where}: axis {axis} has size {size} in a recorded call, not {dim.min}..{dim.max} as {dim.name!r}. "
                "Widen the range, or leave the sample out."
            )
        first, path = sizes.setdefault(dim.name, (size, leaf.path))
        if first != size:
            raise InputError(
                f"{where}: axis {axis} has size {size} in a recorded call, but {dim.name!r} has size {first} in "
                f"{semantic_path(path)!r} of the same call. Use two names for sizes that differ."
            )


def _shapes(leaves: Sequence[Leaf]) -> dict[SemanticPath, tuple[int, ...]]:
    return {leaf.semantic_path: tuple(leaf.value.shape) for leaf in leaves if leaf.kind == "tensor"}


def _text(path: SemanticPath) -> str:
    return path if isinstance(path, str) else repr(path)
