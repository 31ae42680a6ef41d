"""A call's flat form as an ONNX file, by either of torch's exporters."""

from __future__ import annotations

import importlib
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import JsonValue

from perfladder.backend.base import BuildRequest
from perfladder.backend.exported import FlatBuild, axis_ranges, exported, flat_module, missing_libraries, quiet
from perfladder.backend.flat import FlatModule, OutputForm, learned_form
from perfladder.backend.reasons import explain_export_failure
from perfladder.errors import TuningError
from perfladder.tuning.graphs import GraphSpec

MODEL_FILE: Final = "model.onnx"
LOG_FILE: Final = "build.log"
_PACKAGES: Final = {"onnx": "onnx"}
_MAX_INLINE_BYTES: Final = 1 << 30
"""Larger weights go into a file beside the model: a protobuf message ends at 2 GiB."""


def input_name(number: int) -> str:
    """The name of a tensor that the model takes."""
    return f"input_{number}"


def missing_exporter(*, use_dynamo: bool) -> str | None:
    """Which library of the exporters is not installed; None if all are."""
    return missing_libraries(_PACKAGES | {"onnxscript": "onnxscript"} if use_dynamo else _PACKAGES)


def form_of_result(request: BuildRequest) -> OutputForm:
    """How results are put together, of a module that an ONNX model can stand for.

    Raises:
        TuningError: The module changes its arguments or itself, or its result cannot be put together again.
    """
    form = learned_form(request, *request.samples[0].fresh())
    for number in form.changed:
        path = request.graph.inputs[number].access_path
        raise TuningError(f"the module changes its argument `{path}` in place, which an ONNX model cannot")
    return form


def export_onnx(request: BuildRequest, *, use_dynamo: bool, opset_version: int | None) -> FlatBuild:
    """Write `model.onnx`, and what the exporter says of it as `build.log`, into the request's folder.

    Raises:
        TuningError: The module cannot be expressed in ONNX for all sizes of the graph.
    """
    flat, folder, start = flat_module(request), request.folder, time.monotonic()
    names: dict[str, Any] = {
        "input_names": [input_name(number) for number in range(len(flat.inputs))],
        "opset_version": opset_version,
    }
    facts: dict[str, JsonValue]
    if use_dynamo:
        facts = _by_program(flat, request, names)
    else:
        facts = _by_trace(flat, request, names)
    check_model(folder / MODEL_FILE)
    facts["export_s"] = round(time.monotonic() - start, 3)
    facts["file_bytes"] = sum(file.stat().st_size for file in folder.glob(f"{MODEL_FILE}*"))
    return FlatBuild(inputs=flat.inputs, details=facts)


def save_model(converted: Any, model: Path) -> None:
    """Put a changed model in the place of an exported one."""
    onnx = importlib.import_module("onnx")
    for file in model.parent.glob(f"{model.name}*"):
        file.unlink()
    is_large = sum(len(weight.raw_data) for weight in converted.graph.initializer) > _MAX_INLINE_BYTES
    beside = {"save_as_external_data": True, "location": f"{model.name}.data"} if is_large else {}
    onnx.save_model(converted, str(model), **beside)


def check_model(model: Path) -> None:
    """Have the file checked by onnx itself.

    Raises:
        TuningError: It is not valid.
    """
    try:
        importlib.import_module("onnx").checker.check_model(str(model))
    except Exception as error:
        raise TuningError(f"the exported model is not valid: {explain_export_failure(error)}") from error


def _by_program(flat: FlatModule, request: BuildRequest, names: dict[str, Any]) -> dict[str, JsonValue]:
    program, facts = exported(flat, request.graph)
    try:
        with quiet():
            torch.onnx.export(
                program,
                (),
                request.folder / MODEL_FILE,
                dynamo=True,
                verbose=False,
                external_data=_weight_bytes(flat) > _MAX_INLINE_BYTES,
                report=True,
                artifacts_dir=request.folder,
                **names,
            )
    except Exception as error:
        raise TuningError(explain_export_failure(error)) from error
    finally:
        for report in sorted(request.folder.glob("onnx_export_*.md")):
            os.replace(report, request.folder / LOG_FILE)
    return facts


def _by_trace(flat: FlatModule, request: BuildRequest, names: dict[str, Any]) -> dict[str, JsonValue]:
    try:
        with quiet() as caught, torch.no_grad():
            torch.onnx.export(
                flat,
                flat.tensors,
                request.folder / MODEL_FILE,
                dynamo=False,
                verbose=False,
                dynamic_axes=_named_axes(request.graph),
                **names,
            )
    except Exception as error:
        raise TuningError(explain_export_failure(error)) from error
    told = _tracer_warnings(caught)
    (request.folder / LOG_FILE).write_text("".join(f"{line}\n" for line in told) or "The tracer told nothing.\n")
    return {"dynamic_axes": axis_ranges(request.graph), "num_tracer_warnings": len(told)}


def _named_axes(graph: GraphSpec) -> dict[str, dict[int, str]]:
    return {
        input_name(number): {axis: str(spec.shape[axis]) for axis in spec.dynamic_axes}
        for number, spec in enumerate(graph.inputs)
        if spec.dynamic_axes
    }


def _tracer_warnings(caught: Sequence[warnings.WarningMessage]) -> list[str]:
    """What was decided by the values of this call and is built in; comparisons of sizes are among it."""
    return [
        f"{Path(one.filename).name}:{one.lineno}: {one.message}"
        for one in caught
        if one.category.__name__ == "TracerWarning"
    ]


def _weight_bytes(flat: FlatModule) -> int:
    return sum(tensor.nbytes for tensor in (*flat.parameters(), *flat.buffers()))
