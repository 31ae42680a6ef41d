"""torch.export of a call's flat form, for all sizes that its graph has, and for no fewer."""

from __future__ import annotations

import logging
import re
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import JsonValue, ValidationError

from perfladder._torch_private import size_range
from perfladder.backend.base import BuildRequest
from perfladder.backend.flat import FlatInput, FlatModule
from perfladder.backend.reasons import explain_export_failure
from perfladder.errors import TuningError
from perfladder.files import write_atomically
from perfladder.models import Model
from perfladder.tuning.build_log import RecordTeller, tell
from perfladder.tuning.graphs import GraphSpec

_RECORD: Final = "build.json"
_LOGGERS: Final = ("torch.onnx", "onnxscript", "onnx_ir")
"""Of exporters, which tell there of their own rewriting."""


class FlatBuild(Model):
    """What a build takes, and what is known of it, as its folder holds it; written last, so that it tells of all."""

    inputs: list[FlatInput]
    details: dict[str, JsonValue] = {}

    def write(self, folder: Path) -> None:
        """Put it beside the build."""
        write_atomically(folder / _RECORD, self.model_dump_json())

    @staticmethod
    def read(folder: Path) -> FlatBuild | None:
        """That of a folder; None if no build was finished there."""
        try:
            return FlatBuild.model_validate_json((folder / _RECORD).read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise TuningError(f"{_RECORD} of the build is damaged: {error.errors()[0]['msg']}") from None

    @staticmethod
    def finished(folder: Path) -> FlatBuild:
        """That of a folder.

        Raises:
            TuningError: No build was finished there, or its record is damaged.
        """
        build = FlatBuild.read(folder)
        if build is None:
            raise TuningError(f"there is no finished build in {folder}")
        return build


def check_form(build: FlatBuild, graph: GraphSpec) -> None:
    """Refuse a build that takes other tensors than calls of the graph have."""
    if [one.path for one in build.inputs] != [spec.path for spec in graph.inputs]:
        raise TuningError(f"{_RECORD} of the build names other tensors than the graph has")


def flat_module(request: BuildRequest) -> FlatModule:
    """The flat form of the first sample, at sizes that an exporter does not take for fixed.

    A size of 1 would be: torch.export builds in that it is 1. Otherwise sizes are the preferred ones of the graph,
    which compilers choose their code by.
    """
    graph, (args, kwargs) = request.graph, request.samples[0].fresh()
    if graph.has_dynamic_axis:
        preferred = [spec.opt_shape[axis] for spec in graph.inputs for axis in spec.dynamic_axes]
        args, kwargs = graph.at_shapes(args, kwargs, "opt" if min(preferred) > 1 else "max")
    return FlatModule(request, args, kwargs)


@contextmanager
def quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Collect what exporters warn about, which is of their own code; it goes into the log of the build."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger.handlers, logger.propagate) for logger in loggers]
    # torch gives its own a handler that writes to stderr.
    for logger in loggers:
        logger.handlers, logger.propagate = [RecordTeller(tell, threading.get_ident())], False
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield caught
    finally:
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
        for line, count in Counter(map(_told, caught)).items():
            tell(line if count == 1 else f"{line} ({count} times)")


def _told(one: warnings.WarningMessage) -> str:
    return f"{one.filename}:{one.lineno}: {one.category.__name__}: {one.message}"


def exported(flat: FlatModule, graph: GraphSpec) -> tuple[Any, dict[str, JsonValue]]:
    """The exported program and its facts.

    Raises:
        TuningError: It cannot be exported, or would be wrong at some sizes of the graph.
    """
    start = time.monotonic()
    sizes = dynamic_sizes(graph)
    try:
        with quiet(), torch.no_grad():
            program = torch.export.export(flat, flat.tensors, dynamic_shapes={"tensors": sizes}, strict=False)
    except Exception as error:
        raise TuningError(explain_export_failure(error)) from error
    _check_ranges(program, graph)
    facts: dict[str, JsonValue] = {"export_s": round(time.monotonic() - start, 3)}
    return program, facts | {"dynamic_axes": axis_ranges(graph)}


def axis_ranges(graph: GraphSpec) -> dict[str, JsonValue]:
    """Least and largest size by label, for the record."""
    found: dict[str, JsonValue] = {}
    for spec in graph.inputs:
        for axis in spec.dynamic_axes:
            found[str(spec.shape[axis])] = list(graph.size_range(spec, axis))
    return found


def dynamic_sizes(graph: GraphSpec) -> tuple[dict[int, Any] | None, ...]:
    """For each tensor the dimensions of axes whose sizes change, as torch.export takes them.

    Axes of one label are one dimension. Those that calls have shown to follow the batch are multiples of one.
    """
    dims = _Dims(graph)
    return tuple(
        {axis: dims.of(spec, axis) for axis in spec.dynamic_axes} if spec.dynamic_axes else None
        for spec in graph.inputs
    )


class _Dims:
    def __init__(self, graph: GraphSpec) -> None:
        self._graph = graph
        self._by_label: dict[str, Any] = {}
        self._names: set[str] = set()
        self._batch: Any = None

    def of(self, spec: Any, axis: int) -> Any:
        label = str(spec.shape[axis])
        if label not in self._by_label:
            times = self._graph.entries_for_each_sample(spec, axis)
            if times is None:
                self._by_label[label] = self._new(label, spec.min_shape[axis], spec.max_shape[axis])
            else:
                self._by_label[label] = times * self._of_batch(label) if times > 1 else self._of_batch(label)
        return self._by_label[label]

    def _of_batch(self, label: str) -> Any:
        if self._batch is None:
            self._batch = self._new(label, self._graph.get_min_batch_size(), self._graph.get_max_batch_size())
        return self._batch

    def _new(self, label: str, least: int, largest: int) -> Any:
        name = "dim_" + re.sub(r"\W", "_", label)
        while name in self._names:
            name += "_"
        self._names.add(name)
        return torch.export.Dim(name, min=least, max=largest)


def _check_ranges(program: Any, graph: GraphSpec) -> None:
    """Nothing that was stated or seen to change may have been built in: calls of other sizes would be wrong."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    values = [nodes[name].meta["val"] for name in program.graph_signature.user_inputs]
    for spec, value in zip(graph.inputs, values, strict=True):
        for axis in spec.dynamic_axes:
            # torch.export speaks of ranges from 2 up: it never builds in that a size is not 1.
            smallest, largest = graph.size_range(spec, axis)
            least = max(smallest, 2)
            found = size_range(program, value.shape[axis])
            if found is not None and found[0] <= least and found[1] >= largest:
                continue
            told = (
                "is not known" if found is None else f"is {found[0]}" if found[0] == found[1] else f"is {list(found)}"
            )
            raise TuningError(
                f"the exported size of `{spec.access_path}` axis {axis} ({spec.shape[axis]}) {told}, but calls have "
                f"{smallest}..{largest}. Next: state a range in `dynamic_shapes` that the code takes."
            )


def missing_libraries(names: Mapping[str, str]) -> str | None:
    """Which of these modules are not installed, and what to install, by module name."""
    import importlib.util

    missing = [package for name, package in names.items() if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    are = "is" if len(missing) == 1 else "are"
    return f"{' and '.join(missing)} {are} not installed: pip install {' '.join(missing)}"
