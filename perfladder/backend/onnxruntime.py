"""ONNX Runtime: the module as an ONNX file, run by the library's provider for the device."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator

from perfladder.backend.base import Backend, BackendConfig, BuildRequest, Built
from perfladder.backend.reasons import explain_export_failure
from perfladder.errors import TuningError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from perfladder.backend.exported import FlatBuild
    from perfladder.backend.flat import OutputForm
    from perfladder.tuning.graphs import GraphSpec

Provider = Literal["cpu", "cuda", "tensorrt"]


class ONNXRuntimeBackendConfig(BackendConfig):
    """Options of ONNX Runtime."""

    use_dynamo: bool = Field(default=True, description="Export by torch.export; False: by a trace of one call.")
    execution_provider: Provider | None = Field(
        default=None, description="None: that of the module's device. ONNX Runtime's own names do too."
    )
    opset_version: int | None = Field(default=None, ge=9, description="None: as torch's exporter chooses it.")
    graph_optimization: Literal["disable_all", "enable_basic", "enable_extended", "enable_all"] = "enable_all"
    num_threads: int | None = Field(default=None, ge=1, description="On a CPU; None: as many as torch uses.")
    provider_options: dict[str, str] = Field(default={}, description="Of the asked provider, by name.")

    @field_validator("execution_provider", mode="before")
    @classmethod
    def _short_name(cls, value: object) -> object:
        return value.lower().removesuffix("executionprovider") if isinstance(value, str) else value


class ONNXRuntimeBackend(Backend):
    """Exports the module to ONNX and runs that. The file is data: an archive with it loads wherever the provider is."""

    name = "onnxruntime"
    config_class: ClassVar = ONNXRuntimeBackendConfig
    libraries = ("onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu")

    def why_not(self, device: torch.device) -> str | None:
        """Besides the device: a library is not installed, or this build of ONNX Runtime has no such provider."""
        return super().why_not(device) or self._missing_library() or self._why_no_provider(device)

    def why_not_load(self, device: torch.device) -> str | None:
        """A finished file needs the runtime, and nothing that exports."""
        from perfladder.backend.exported import missing_libraries

        missing = missing_libraries({"onnxruntime": "onnxruntime"})
        return super().why_not(device) or missing or self._why_no_provider(device)

    def _why_no_provider(self, device: torch.device) -> str | None:
        provider = self._provider(device)
        if (provider == "cpu") != (device.type == "cpu"):
            return f"execution_provider={provider!r} does not run on {device.type}, where the module is"
        from perfladder.backend.ort_session import PROVIDERS

        wanted, there = PROVIDERS[provider][0], importlib.import_module("onnxruntime").get_available_providers()
        if wanted not in there:
            remedy = "" if provider == "cpu" else ": pip install onnxruntime-gpu"
            return f"this onnxruntime has no {wanted}; it has {', '.join(there)}{remedy}"
        return None

    def why_not_for(self, module: nn.Module) -> str | None:
        """It has weights of a dtype that cannot be bound."""
        from itertools import chain

        return _why_not_dtypes(
            "its weights are", {str(tensor.dtype) for tensor in chain(module.parameters(), module.buffers())}
        )

    def why_not_for_graph(self, graph: GraphSpec) -> str | None:
        """Arguments or results have such a dtype, or arguments that are no tensors change between calls."""
        from perfladder.backend.flat import why_not_flat

        tensors = [*graph.inputs, *graph.outputs]
        return why_not_flat(graph) or _why_not_dtypes("calls have tensors of", {spec.dtype for spec in tensors})

    def compile(self, request: BuildRequest) -> Built:
        """Export, and open a session; a build that a process before this one finished in the folder is opened.

        Raises:
            TuningError: The module cannot be exported or run for all sizes of the graph.
        """
        from perfladder.backend.exported import FlatBuild
        from perfladder.backend.onnx_export import export_onnx, form_of_result

        if reason := self.why_not_for(request.module) or self.why_not_for_graph(request.graph):
            raise TuningError(reason)
        form = form_of_result(request)
        build = FlatBuild.read(request.folder)
        if build is None:
            build = export_onnx(request, use_dynamo=self.config.use_dynamo, opset_version=self.config.opset_version)
            build.write(request.folder)
        return self._opened(request, build, form)

    def load(self, request: BuildRequest) -> Built:
        """Open the file of an archive.

        Raises:
            TuningError: It is not there, or is of another graph.
        """
        from perfladder.backend.exported import FlatBuild

        return self._opened(request, FlatBuild.finished(request.folder), None)

    def _opened(self, request: BuildRequest, build: FlatBuild, form: OutputForm | None) -> Built:
        from perfladder.backend.exported import check_form
        from perfladder.backend.flat import FlatCall
        from perfladder.backend.onnx_export import MODEL_FILE
        from perfladder.backend.ort_session import OrtRunner, open_session

        check_form(build, request.graph)
        config: ONNXRuntimeBackendConfig = self.config
        try:
            session = open_session(
                request.folder / MODEL_FILE,
                self._provider(request.device),
                request.device,
                optimization=config.graph_optimization,
                num_threads=config.num_threads,
                provider_options=config.provider_options,
            )
        except Exception as error:
            raise TuningError(explain_export_failure(error)) from error
        run = OrtRunner(session, request.graph, request.device, knows_sizes=config.use_dynamo)
        call = FlatCall(request, [one.contiguous() for one in build.inputs], run, form)
        details = {"providers": session.get_providers(), "num_dropped_inputs": run.num_dropped_inputs, **build.details}
        return Built(call, details, owns_weights=form is not None)

    def _provider(self, device: torch.device) -> Provider:
        own: Provider = "cuda" if device.type == "cuda" else "cpu"
        return self.config.execution_provider or own

    def _missing_library(self) -> str | None:
        from perfladder.backend.exported import missing_libraries
        from perfladder.backend.onnx_export import missing_exporter

        return missing_exporter(use_dynamo=self.config.use_dynamo) or missing_libraries({"onnxruntime": "onnxruntime"})


def _why_not_dtypes(what: str, dtypes: set[str]) -> str | None:
    from perfladder.backend.ort_session import DTYPES

    unknown = sorted({dtype.removeprefix("torch.") for dtype in dtypes} - set(DTYPES))
    if unknown:
        return f"{what} {', '.join(unknown)}; ONNX Runtime is given {', '.join(DTYPES)}"
    return None
