"""Why a call is none of the recorded graphs, in words; and what it is that makes ever more graphs."""

from __future__ import annotations

from collections.abc import Sequence

from perfladder.errors import InputError
from perfladder.tuning.dims import Path
from perfladder.tuning.graph import GraphSpec
from perfladder.tuning.specs import ScalarSpec, TensorSpec, dtype_name, scalar_spec
from perfladder.tuning.tree import Leaf

_SHOWN = 3


def why_unseen(graphs: Sequence[GraphSpec], leaves: Sequence[Leaf], *, strict: bool) -> str:
    """One sentence that says in what a call differs from the graph that is most like it."""
    if not graphs:
        return "No call has been recorded."
    found = [(differences(graph, leaves, strict=strict), graph) for graph in graphs]
    differing, graph = min(found, key=lambda pair: len(pair[0]))
    if not differing:
        shapes = {leaf.semantic_path: tuple(leaf.value.shape) for leaf in leaves if leaf.kind == "tensor"}
        misfit = graph.misfit(shapes)
        if misfit is None:
            return f"Graph {graph.name} covers the call."
        differing = [misfit]
    listed = "; ".join(differing[:_SHOWN])
    more = f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    return f"The call differs from graph {graph.name}: {listed}{more}."


def differences(graph: GraphSpec, leaves: Sequence[Leaf], *, strict: bool) -> list[str]:
    """In what a call's form differs from a graph, each as a clause; sizes do not count."""
    specs: list[TensorSpec | ScalarSpec] = [*graph.inputs, *graph.others, *graph.unsupported]
    known: dict[Path, TensorSpec | ScalarSpec] = {spec.path: spec for spec in specs}
    containers = {path: where for path, where, _ in graph.identity(strict=strict)}
    found = []
    for leaf in leaves:
        spec = known.pop(leaf.path, None)
        if spec is None:
            found.append(f"`{leaf.access_path}` was not given when calls were recorded")
        elif containers[leaf.path] != leaf.containers:
            inside, outside = (_last(names) for names in (leaf.containers, containers[leaf.path]))
            found.append(f"`{leaf.access_path}` lies in a {inside}, recorded in a {outside}")
        else:
            found += _difference(leaf, spec, strict)
    return [*found, *(f"`{spec.access_path}` is missing" for spec in known.values())]


def _last(containers: tuple[str, ...]) -> str:
    return containers[-1].rpartition(".")[2] if containers else "argument of its own"


def _difference(leaf: Leaf, spec: TensorSpec | ScalarSpec, strict: bool) -> list[str]:
    where = f"`{leaf.access_path}`"
    if leaf.kind == "tensor":
        if isinstance(spec, ScalarSpec):
            return [f"{where} is a tensor, recorded as {_value(spec)}"]
        if leaf.value.dim() != len(spec.shape):
            return [f"{where} has rank {leaf.value.dim()}, recorded with {len(spec.shape)}"]
        dtype = dtype_name(leaf)
        return [f"{where} has the dtype {dtype}, recorded with {spec.dtype}"] if dtype != spec.dtype else []
    now = scalar_spec(leaf)
    if isinstance(spec, TensorSpec):
        return [f"{where} is {_value(now)}, recorded as a tensor"]
    if now.type != spec.type or (strict and now.value != spec.value):
        return [f"{where} is {_value(now)}, recorded as {_value(spec)}"]
    return []


def _value(spec: ScalarSpec) -> str:
    text = spec.value or f"a {spec.type}"
    return text if len(text) <= 60 else text[:57] + "..."


def too_many_graphs(graphs: Sequence[GraphSpec], leaves: Sequence[Leaf], limit: int, *, strict: bool) -> InputError:
    """The error for a call that would make one graph too many; it names what varies."""
    head = f"The module is called in more than {limit} different forms, and each would be tuned by itself"
    values: dict[str, list[str]] = {}
    for spec in (spec for graph in graphs for spec in graph.others):
        values.setdefault(spec.access_path, []).append(_value(spec))
    for leaf in leaves:
        if leaf.kind == "scalar":
            values.setdefault(leaf.access_path, []).append(_value(scalar_spec(leaf)))
    distinct = {path: list(dict.fromkeys(seen)) for path, seen in values.items()}
    varied = max(distinct, key=lambda path: len(distinct[path]), default=None)
    structures = {graph.identity(strict=False) for graph in graphs}
    if strict and varied is not None and len(distinct[varied]) > len(structures):
        seen = distinct[varied]
        listed = ", ".join(seen[:_SHOWN]) + (", ..." if len(seen) > _SHOWN else "")
        return InputError(
            f"{head}: `{varied}` has {len(seen)} different values ({listed}). Keep it fixed, pass it as a tensor if "
            "forward accepts one, or set config.strict_mode = False, so that values of settings do not count."
        )
    nearest = min((differences(graph, leaves, strict=strict) for graph in graphs), key=len)
    return InputError(
        f"{head}: the structure of its arguments varies. In the last call, {'; '.join(nearest[:_SHOWN])}. "
        "Keep it fixed: the same arguments, containers, lengths, dtypes and ranks in all calls."
    )
