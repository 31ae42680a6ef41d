"""Smaller numbers for an engine, by NVIDIA's ModelOpt: in the exported ONNX model, or in the module before."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import os
import tempfile
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field, ValidationError, model_validator

from perfladder.backend.reasons import explain_export_failure
from perfladder.errors import TuningError
from perfladder.models import Model, input_error

if TYPE_CHECKING:
    from perfladder.backend.base import BuildRequest
    from perfladder.backend.flat import FlatInput

_METHODS: Final = {
    "int8": ("max", "entropy"),
    "fp8": ("max", "entropy"),
    "int4": ("awq_clip", "awq_lite", "awq_full", "rtn_dq"),
}
"""Source: nvidia-modelopt 0.47, modelopt.onnx.quantization.quantize; its first entry is the default here."""

_NEEDS_CUDA: Final = ("NVFP4_DEFAULT_CFG", "NVFP4_FP8_MHA_CONFIG")
_EXPORTERS: Final = {
    "FP8_DEFAULT_CFG": ("FP8QuantExporter",),
    "NVFP4_DEFAULT_CFG": ("NVFP4QuantExporter",),
    "NVFP4_FP8_MHA_CONFIG": ("NVFP4QuantExporter", "FP8QuantExporter"),
    "INT8_DEFAULT_CFG": ("INT8QuantExporter",),
    "INT8_SMOOTHQUANT_CFG": ("INT8QuantExporter",),
    "INT4_AWQ_CFG": ("INT4QuantExporter",),
}
"""What makes standard operators, with small weights, of those that the quantizers of a scheme are exported as. Source:
nvidia-modelopt 0.47, modelopt.onnx.export."""


class _Quantization(Model):
    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise input_error(error, type(self), type(self).__name__) from None

    def why_not(self) -> str | None:
        """Which library is missing; None if it can be done here."""
        return _missing(("onnx",))

    def prepared(self, request: BuildRequest) -> BuildRequest:
        """What to export in place of the module."""
        return request

    @abstractmethod
    def finish(self, model: Path, request: BuildRequest, inputs: Sequence[FlatInput]) -> None:
        """Change the exported file in its place."""


class ONNXAutoCastConfig(_Quantization):
    """Half precision where the values of recorded calls allow it.

    Raises:
        InputError: A field is wrong.
    """

    kind: Literal["onnx_autocast"] = "onnx_autocast"
    precision: Literal["fp16", "bf16"] = "fp16"
    keep_io_types: bool = Field(default=True, description="Inputs and outputs stay as the module has them.")

    @model_validator(mode="after")
    def _check(self) -> ONNXAutoCastConfig:
        if not self.keep_io_types:
            raise ValueError("keep_io_types: callers pass and expect the module's own dtypes; leave it True.")
        return self

    def finish(self, model: Path, request: BuildRequest, inputs: Sequence[FlatInput]) -> None:
        """Convert the file."""
        numpy = importlib.import_module("numpy")
        with _by_modelopt(), tempfile.TemporaryDirectory(dir=model.parent) as folder:
            for number, call in enumerate(_feeds(model, request, inputs)):
                numpy.savez(Path(folder) / f"{number:04}.npz", **call)
            convert = importlib.import_module("modelopt.onnx.autocast").convert_to_mixed_precision
            converted = convert(
                str(model), low_precision_type=self.precision, keep_io_types=True, calibration_data=folder
            )
        _put_in_place(converted, model)


class ONNXQuantizationConfig(_Quantization):
    """Whole numbers or 8-bit floating point in the ONNX model, calibrated on recorded calls.

    Raises:
        InputError: A field is wrong.
    """

    kind: Literal["onnx_quantization"] = "onnx_quantization"
    precision: Literal["int8", "int4", "fp8"] = "int8"
    calibration_method: Literal["max", "entropy", "awq_clip", "awq_lite", "awq_full", "rtn_dq"] | None = Field(
        default=None, description="None: max for int8 and fp8, awq_clip for int4."
    )
    use_model_opt_post_processing: bool = Field(
        default=False, description="Make float16 of what stays in floating point too, as ModelOpt does by default."
    )

    @model_validator(mode="after")
    def _check(self) -> ONNXQuantizationConfig:
        methods = _METHODS[self.precision]
        if self.calibration_method is not None and self.calibration_method not in methods:
            raise ValueError(f"calibration_method: {self.precision} has {', '.join(methods)}.")
        return self

    def finish(self, model: Path, request: BuildRequest, inputs: Sequence[FlatInput]) -> None:
        """Quantize the file."""
        quantize = importlib.import_module("modelopt.onnx.quantization").quantize
        with tempfile.TemporaryDirectory(dir=model.parent) as folder:
            quantized = Path(folder) / "quantized.onnx"
            with _by_modelopt():
                quantize(
                    str(model),
                    quantize_mode=self.precision,
                    calibration_method=self.calibration_method or _METHODS[self.precision][0],
                    calibration_data_reader=_Reader(_feeds(model, request, inputs)),
                    calibration_eps=_calibrating_devices(request),
                    high_precision_dtype="fp16" if self.use_model_opt_post_processing else "fp32",
                    output_path=str(quantized),
                )
            if not quantized.exists():
                raise TuningError(f"ModelOpt wrote no {self.precision} model; its log says why")
            onnx = importlib.import_module("onnx")
            _put_in_place(onnx.load(str(quantized)), model)


class TorchQuantizationConfig(_Quantization):
    """Quantizers in a copy of the module, calibrated on recorded calls, before it is exported by a trace.

    Raises:
        InputError: A field is wrong.
    """

    kind: Literal["torch_quantization"] = "torch_quantization"
    quantization_config: Literal[
        "FP8_DEFAULT_CFG",
        "NVFP4_DEFAULT_CFG",
        "NVFP4_FP8_MHA_CONFIG",
        "INT8_DEFAULT_CFG",
        "INT8_SMOOTHQUANT_CFG",
        "INT4_AWQ_CFG",
    ] = "INT8_DEFAULT_CFG"
    device: str | None = Field(
        default=None, pattern=r"^(cpu|cuda(:\d+)?)$", description="Where to calibrate; None: where the module is."
    )

    def why_not(self) -> str | None:
        """Besides a missing library: a scheme that is calibrated on a GPU only."""
        import torch

        reason = super().why_not()
        if reason is None and self.quantization_config in _NEEDS_CUDA and not torch.cuda.is_available():
            return f"{self.quantization_config} is calibrated on an NVIDIA GPU, and torch sees none"
        return reason

    def prepared(self, request: BuildRequest) -> BuildRequest:
        """A request for a quantized copy of the module.

        Raises:
            TuningError: This ModelOpt has no such scheme, or nothing was quantized.
        """
        with _by_modelopt():
            quantization = importlib.import_module("modelopt.torch.quantization")
        scheme = getattr(quantization, self.quantization_config, None)
        if scheme is None:
            raise TuningError(f"this nvidia-modelopt has no {self.quantization_config}")
        import torch

        module, there = copy.deepcopy(request.module), torch.device(self.device or request.device)
        module.to(there)

        def calibrate(quantized: Any) -> None:
            from perfladder.tuning.tree import map_tensors

            for sample in request.samples:
                args, kwargs = map_tensors(sample.fresh(), lambda tensor: tensor.to(there))
                quantized.forward(*args, **kwargs)

        with _by_modelopt(), torch.no_grad():
            module = quantization.quantize(module, copy.deepcopy(scheme), calibrate)
        quantizer = importlib.import_module("modelopt.torch.quantization.nn").TensorQuantizer
        if not any(isinstance(part, quantizer) and part.is_enabled for part in module.modules()):
            raise TuningError(f"{self.quantization_config} quantized nothing in this module")
        module.to(request.device).eval()
        return replace(request, module=module, forward=_Exported(module))

    def finish(self, model: Path, request: BuildRequest, inputs: Sequence[FlatInput]) -> None:
        """Make standard operators of the quantizers, and small weights."""
        exporters = importlib.import_module("modelopt.onnx.export")
        onnx = importlib.import_module("onnx")
        with _by_modelopt():
            converted = onnx.shape_inference.infer_shapes(onnx.load(str(model)))
            for name in _EXPORTERS[self.quantization_config]:
                converted = getattr(exporters, name).process_model(converted)
        _put_in_place(converted, model)


QuantizationConfig = Annotated[
    ONNXAutoCastConfig | ONNXQuantizationConfig | TorchQuantizationConfig, Field(discriminator="kind")
]


class _Exported:
    """The forward of a quantized module, with its quantizers as they are to be exported."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._as_exported():
            return self._module.forward(*args, **kwargs)

    @contextmanager
    def _as_exported(self) -> Iterator[None]:
        import torch

        # Weights of convolutions would come out of the 8-bit quantizers without a shape, which the tracer needs; the
        # exporter of the scheme quantizes them in the file.
        convolutions = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
        parts = [part for part in self._module.modules() if isinstance(part, convolutions)]
        quantizers: list[Any] = [part.weight_quantizer for part in parts if hasattr(part, "weight_quantizer")]
        disabled = [one for one in quantizers if one.is_enabled and one.num_bits == (4, 3)]
        blocks = importlib.import_module("modelopt.torch.quantization.export_onnx")
        for one in disabled:
            one.disable()
        try:
            with blocks.configure_linear_module_onnx_quantizers(self._module):
                yield
        finally:
            for one in disabled:
                one.enable()


class _Reader:
    """Recorded calls as ModelOpt and ONNX Runtime ask for them."""

    def __init__(self, feeds: Sequence[dict[str, Any]]) -> None:
        self._feeds = list(feeds)
        self.rewind()

    def get_next(self) -> dict[str, Any] | None:
        return next(self._rest, None)

    def get_first(self) -> dict[str, Any]:
        return self._feeds[0]

    def rewind(self) -> None:
        self._rest = iter(self._feeds)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._feeds)

    def __len__(self) -> int:
        return len(self._feeds)


def _calibrating_devices(request: BuildRequest) -> list[str]:
    """Where the model is run to calibrate it: on the module's GPU where the installed onnxruntime can."""
    there = importlib.import_module("onnxruntime").get_available_providers()
    if request.device.type == "cuda" and "CUDAExecutionProvider" in there:
        return [f"cuda:{request.device.index or 0}", "cpu"]
    return ["cpu"]


def _feeds(model: Path, request: BuildRequest, inputs: Sequence[FlatInput]) -> list[dict[str, Any]]:
    """The arrays of all recorded calls, by the name that the model has for them."""
    from perfladder.backend.onnx_export import input_name
    from perfladder.tuning.tree import bind, input_leaves

    loaded = importlib.import_module("onnx").load(str(model), load_external_data=False)
    taken = {value.name for value in loaded.graph.input}
    feeds = []
    for sample in request.samples:
        leaves = {
            leaf.path: leaf.value for leaf in input_leaves(bind(request.graph.parameters, sample.args, sample.kwargs))
        }
        arrays = {input_name(number): _array(leaves[one.path]) for number, one in enumerate(inputs)}
        feeds.append({name: array for name, array in arrays.items() if name in taken})
    return feeds


def _array(tensor: Any) -> Any:
    import torch

    if tensor.dtype is torch.bfloat16:
        raise TuningError("ONNX models are calibrated in NumPy, which has no bfloat16; use TorchQuantizationConfig")
    return tensor.detach().cpu().contiguous().numpy()


def _put_in_place(converted: Any, model: Path) -> None:
    """Write a model where another one was, with large weights in a file beside it as before."""
    from perfladder.backend.onnx_export import check_model, save_model

    save_model(converted, model)
    check_model(model)


def _missing(parts: Sequence[str]) -> str | None:
    if importlib.util.find_spec("modelopt") is None:
        extras = f"[{','.join(parts)}]"
        return f'nvidia-modelopt is not installed: pip install "nvidia-modelopt{extras}"'
    return None


@contextmanager
def _by_modelopt() -> Iterator[None]:
    """Say whose an error is, and keep the library's warnings and progress bars off the user's screen."""
    try:
        with (
            warnings.catch_warnings(),
            open(os.devnull, "w", encoding="utf-8") as nowhere,
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            warnings.simplefilter("ignore")
            yield
    except TuningError:
        raise
    except Exception as error:
        raise TuningError(f"nvidia-modelopt: {explain_export_failure(error)}") from error
