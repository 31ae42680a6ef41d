"""TensorRT and TensorRT-RTX: the module as an engine for NVIDIA GPUs, built from an ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, field_validator, model_validator

from perfladder.backend.base import Backend, BackendConfig, BuildRequest, Built
from perfladder.backend.quantization import QuantizationConfig, TorchQuantizationConfig
from perfladder.backend.trt_profiles import TensorRTProfile
from perfladder.errors import NotPossibleHereError, TuningError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from perfladder.backend.exported import FlatBuild
    from perfladder.backend.flat import OutputForm
    from perfladder.backend.trt_build import EngineOptions
    from perfladder.backend.trt_library import Library, LibraryName
    from perfladder.tuning.graphs import GraphSpec

DTYPES: Final = ("float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool")
"""Of tensors that go in and out; the parser makes float32 of float64 without a word."""


class TensorRTBackendConfig(BackendConfig):
    """Options of TensorRT."""

    use_dynamo: bool = Field(default=True, description="Export by torch.export; False: by a trace of one call.")
    library: Literal["tensorrt", "tensorrt_rtx"] | None = Field(
        default=None, description="None: TensorRT where it is installed, else TensorRT-RTX."
    )
    workspace_size_bytes: int | None = Field(default=None, gt=0, description="Scratch memory that kernels may take.")
    opset_version: int | None = Field(default=None, ge=9, description="None: as torch's exporter chooses it.")
    optimization_level: int | None = Field(default=None, ge=0, le=5, description="None: the library's own.")
    compatibility_level: Literal["ampere_plus", "same_compute_capability"] | None = Field(
        default=None, description="Other GPUs that an engine of TensorRT runs on; None: those of the same kind."
    )
    version_compatible: bool = Field(default=False, description="Let newer versions of TensorRT run the engine.")
    compute_capabilities: tuple[Annotated[str, Field(pattern=r"^\d+\.\d$")], ...] = Field(
        default=(), description="GPUs that an engine of TensorRT-RTX is for, such as '8.9'; empty: all it knows."
    )
    timing_cache: bool | Path = Field(
        default=True, description="Keep timings and compiled kernels for later builds; a path: in that file."
    )
    profiles: Literal["single", "samples_used"] | list[TensorRTProfile] = "single"
    device: str | None = Field(default=None, pattern=r"^cuda(:\d+)?$", description="Only there; None: on any GPU.")
    quantization_config: QuantizationConfig | None = None
    enable_tf32: bool = Field(default=True, description="Let float32 products be computed in TF32.")
    use_cuda_graphs: bool = Field(default=True, description="Replay a CUDA graph from the second call of a size on.")
    max_cuda_graphs: int = Field(default=8, ge=1, description="Sizes that have a graph at a time.")
    cuda_graph_cache_policy: Literal["lfu", "lru"] = Field(
        default="lfu", description="Which one makes room: the least frequently or the least recently used."
    )

    @field_validator("profiles", mode="after")
    @classmethod
    def _own_profiles(cls, value: Any) -> Any:
        return [one.model_copy(deep=True) for one in value] if isinstance(value, list) else value

    @model_validator(mode="before")
    @classmethod
    def _trace_for_quantizers(cls, values: Any) -> Any:
        """What ModelOpt puts into a module can be exported by a trace only."""
        how = values.get("quantization_config") if isinstance(values, dict) else None
        kind = how.get("kind") if isinstance(how, dict) else getattr(how, "kind", None)
        if kind == "torch_quantization":
            return {"use_dynamo": False, **values}
        return values

    @model_validator(mode="after")
    def _check(self) -> TensorRTBackendConfig:
        if isinstance(self.quantization_config, TorchQuantizationConfig) and self.use_dynamo:
            raise ValueError("use_dynamo: TorchQuantizationConfig works with use_dynamo=False, which is its default.")
        return self


class TensorRTBackend(Backend):
    """Builds an engine for all sizes of the graph and runs it on torch's memory and stream.

    The file is code for kinds of GPUs, so that an archive needs trust to load it.
    """

    name = "tensorrt"
    config_class: ClassVar = TensorRTBackendConfig
    device_types = ("cuda",)
    writes_code = True
    libraries = ("onnx", "onnxscript", "tensorrt", "tensorrt-rtx-cu13-libs", "nvidia-modelopt")

    @property
    def is_lossy(self) -> bool:
        """With quantization."""
        return self.config.quantization_config is not None

    @property
    def is_portable(self) -> bool:
        """Its file runs only on the GPUs that it was built for."""
        return False

    def why_not(self, device: torch.device) -> str | None:
        """A library is missing, an option is of the other library, or the runtime refuses the GPU."""
        if device.type != "cuda":
            return f"TensorRT runs on a CUDA device, not on {device.type}; build_engine builds for another machine"
        if reason := self.why_not_build():
            return reason
        import torch

        from perfladder.backend.trt_library import why_gpu_refused

        wanted = torch.device(self.config.device) if self.config.device else device
        if wanted.index not in (None, device.index if device.index is not None else 0):
            return f"device={self.config.device!r} is not {device}, where the module is"
        return why_gpu_refused(self._library(), device)

    def why_not_build(self) -> str | None:
        """Why an engine cannot be built on this machine; None if it can, with or without a GPU."""
        from perfladder.backend.onnx_export import missing_exporter

        config: TensorRTBackendConfig = self.config
        try:
            library = self._library()
        except NotPossibleHereError as error:
            return str(error)
        is_rtx = library.name == "tensorrt_rtx"
        if is_rtx and (config.compatibility_level or config.version_compatible):
            option = "compatibility_level" if config.compatibility_level else "version_compatible"
            return f"{option} is an option of TensorRT; with TensorRT-RTX name GPUs in compute_capabilities"
        if not is_rtx and config.compute_capabilities:
            return "compute_capabilities is an option of TensorRT-RTX; with TensorRT set compatibility_level"
        if reason := missing_exporter(use_dynamo=config.use_dynamo):
            return reason
        return config.quantization_config.why_not() if config.quantization_config else None

    def why_not_for(self, module: nn.Module) -> str | None:
        """It has weights of a dtype that the library has not."""
        from itertools import chain

        tensors = chain(module.parameters(), module.buffers())
        return _why_not_dtypes("its weights are", {str(tensor.dtype) for tensor in tensors})

    def why_not_for_graph(self, graph: GraphSpec) -> str | None:
        """Arguments or results have such a dtype, or arguments that are no tensors change between calls."""
        from perfladder.backend.flat import why_not_flat

        tensors = [*graph.inputs, *graph.outputs]
        return why_not_flat(graph) or _why_not_dtypes("calls have tensors of", {spec.dtype for spec in tensors})

    def compile(self, request: BuildRequest) -> Built:
        """Build and open; a build that a process before this one finished in the folder is opened.

        Raises:
            TuningError: The module cannot be built or run for all sizes of the graph.
        """
        from perfladder.backend.cuda_lane import on_device

        with on_device(request.device):
            build, form = self._made(request)
            return self._opened(request, build, form)

    def build_engine(self, request: BuildRequest) -> FlatBuild:
        """Build without running it, as for a GPU that another machine has.

        Raises:
            NotPossibleHereError: A library is missing.
            TuningError: The module cannot be built for all sizes of the graph.
        """
        from perfladder.backend.cuda_lane import on_device

        if reason := self.why_not_build():
            raise NotPossibleHereError(f"An engine cannot be built here: {reason}.")
        with on_device(request.device):
            return self._made(request)[0]

    def load(self, request: BuildRequest) -> Built:
        """Open the engine of an archive.

        Raises:
            TuningError: It is not there, or is of another graph or version.
        """
        from perfladder.backend.cuda_lane import on_device
        from perfladder.backend.exported import FlatBuild

        with on_device(request.device):
            return self._opened(request, FlatBuild.finished(request.folder), None)

    def _made(self, request: BuildRequest) -> tuple[FlatBuild, OutputForm]:
        from perfladder.backend.exported import FlatBuild
        from perfladder.backend.onnx_export import MODEL_FILE, export_onnx, form_of_result, input_name
        from perfladder.backend.trt_build import build_plan
        from perfladder.backend.trt_profiles import profiles_of

        config: TensorRTBackendConfig = self.config
        if reason := self.why_not_for(request.module) or self.why_not_for_graph(request.graph):
            raise TuningError(reason)
        profiles = profiles_of(config.profiles, request.graph, request.samples, input_name)
        form = form_of_result(request)
        if (build := FlatBuild.read(request.folder)) is not None:
            return build, form
        how = config.quantization_config
        export = export_onnx(
            how.prepared(request) if how else request, use_dynamo=config.use_dynamo, opset_version=config.opset_version
        )
        model = request.folder / MODEL_FILE
        if how:
            how.finish(model, request, export.inputs)
        facts = build_plan(self._library(), model, request.folder, request.graph, profiles, self._options(request))
        # The engine has all that is in it, and archives would hold it twice.
        for file in request.folder.glob(f"{MODEL_FILE}*"):
            file.unlink()
        build = FlatBuild(inputs=export.inputs, details={**export.details, **facts})
        build.write(request.folder)
        return build, form

    def _opened(self, request: BuildRequest, build: FlatBuild, form: OutputForm | None) -> Built:
        from perfladder.backend.cuda_lane import CudaLane
        from perfladder.backend.exported import check_form
        from perfladder.backend.flat import FlatCall
        from perfladder.backend.trt_build import EngineRecord
        from perfladder.backend.trt_engine import open_engine
        from perfladder.backend.trt_runner import TensorRTRunner

        check_form(build, request.graph)
        config: TensorRTBackendConfig = self.config
        record = EngineRecord.read(request.folder)
        engine = open_engine(
            self._library(record.library),
            request.folder,
            record,
            request.device,
            kernel_cache=self._cache(request, "kernels"),
            is_captured=config.use_cuda_graphs,
        )
        run = TensorRTRunner(
            engine,
            record,
            CudaLane(request.device),
            max_graphs=config.max_cuda_graphs if config.use_cuda_graphs else 0,
            policy=config.cuda_graph_cache_policy,
        )
        call = FlatCall(request, [one.contiguous() for one in build.inputs], run, form)
        for args, kwargs in request.calls():
            call(*args, **kwargs)
        engine.keep_kernels()
        return Built(call, build.details, owns_weights=form is not None)

    def _library(self, name: LibraryName | None = None) -> Library:
        from perfladder.backend.trt_library import find_library

        return find_library(name or self.config.library)

    def _options(self, request: BuildRequest) -> EngineOptions:
        from perfladder.backend.trt_build import EngineOptions

        config: TensorRTBackendConfig = self.config
        return EngineOptions(
            workspace_size_bytes=config.workspace_size_bytes,
            optimization_level=config.optimization_level,
            compatibility_level=config.compatibility_level,
            version_compatible=config.version_compatible,
            compute_capabilities=config.compute_capabilities,
            enable_tf32=config.enable_tf32,
            timing_cache=self._cache(request, "timings"),
        )

    def _cache(self, request: BuildRequest, what: str) -> Path | None:
        """The file that builds share, for this version of the library."""
        if self.config.timing_cache is False:
            return None
        if isinstance(self.config.timing_cache, Path):
            return self.config.timing_cache.expanduser().absolute()
        if request.shared_folder is None:
            return None
        library = self._library()
        return request.shared_folder / f"{library.name}-{library.version}-{what}"


def _why_not_dtypes(what: str, dtypes: set[str]) -> str | None:
    unknown = sorted({dtype.removeprefix("torch.") for dtype in dtypes} - set(DTYPES))
    if unknown:
        return f"{what} {', '.join(unknown)}; TensorRT is given {', '.join(DTYPES)}"
    return None
