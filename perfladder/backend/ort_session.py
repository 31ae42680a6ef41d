"""A session of ONNX Runtime that takes and gives torch tensors without copying them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.utils.dlpack

from perfladder.backend.onnx_export import input_name
from perfladder.errors import TuningError
from perfladder.tuning.graphs import GraphSpec

PROVIDERS: Final = {
    "cpu": ("CPUExecutionProvider",),
    "cuda": ("CUDAExecutionProvider", "CPUExecutionProvider"),
    "tensorrt": ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"),
}
"""In order of preference; a GPU's providers leave operators on shapes to the CPU."""

_TORCH_TYPES: Final = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(double)": torch.float64,
    "tensor(bool)": torch.bool,
    "tensor(int8)": torch.int8,
    "tensor(int16)": torch.int16,
    "tensor(int32)": torch.int32,
    "tensor(int64)": torch.int64,
    "tensor(uint8)": torch.uint8,
    "tensor(uint16)": torch.uint16,
    "tensor(uint32)": torch.uint32,
    "tensor(uint64)": torch.uint64,
}
"""Source: onnxruntime, types of `NodeArg.type` that NumPy has too; bfloat16, float8 and complex are not among them."""

DTYPES: Final = tuple(str(dtype).removeprefix("torch.") for dtype in _TORCH_TYPES.values())


def open_session(
    model: Path,
    provider: str,
    device: torch.device,
    *,
    optimization: str,
    num_threads: int | None,
    provider_options: Mapping[str, str],
) -> Any:
    """Open a model with one provider, and with that one only.

    Raises:
        TuningError: The session was opened with another provider than asked.
    """
    ort = importlib.import_module("onnxruntime")
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_{optimization.upper()}")
    options.log_severity_level = 3
    if device.type == "cpu":
        options.intra_op_num_threads = num_threads or torch.get_num_threads()
        options.inter_op_num_threads = 1
    wanted = PROVIDERS[provider]
    session = ort.InferenceSession(
        str(model), options, providers=[(name, _options(name, wanted[0], device, provider_options)) for name in wanted]
    )
    session.disable_fallback()
    if (found := session.get_providers()[0]) != wanted[0]:
        raise TuningError(f"ONNX Runtime opened the model with {found} instead of {wanted[0]}: see its log for why")
    return session


def _options(name: str, first: str, device: torch.device, provider_options: Mapping[str, str]) -> dict[str, str]:
    own = dict(provider_options) if name == first else {}
    return own if name == "CPUExecutionProvider" else {"device_id": str(device.index or 0), **own}


class _Input(NamedTuple):
    name: str
    number: int
    numpy_type: Any


class _Output(NamedTuple):
    """One result; `sizes` has for each axis its size or the input and axis that it equals, None: not known before."""

    name: str
    dtype: torch.dtype
    numpy_type: Any
    sizes: tuple[int | tuple[int, int], ...] | None


class OrtRunner:
    """Runs a session on torch tensors: inputs are read where they are, results written into tensors of torch's.

    Results whose sizes follow from nothing that is known before the call lie in memory of ONNX Runtime's.

    Args:
        session: Of a model whose inputs have the names of `input_name`.
        graph: Has the axes whose sizes change.
        device: Where results are.
        knows_sizes: Whether the sizes of results that the model states are to be relied on.

    Raises:
        TuningError: The model states a fixed size for an axis whose size changes.
    """

    def __init__(self, session: Any, graph: GraphSpec, device: torch.device, *, knows_sizes: bool) -> None:
        self._session, self._device = session, device
        self._device_id, self._num_inputs = device.index or 0, len(graph.inputs)
        numbers = {input_name(number): number for number in range(len(graph.inputs))}
        # Inputs that decide nothing are not part of a model.
        taken = [(numbers[one.name], one) for one in session.get_inputs()]
        places: dict[str, tuple[int, int]] = {}
        for number, one in taken:
            _check_axes(graph, number, one)
            for axis, size in enumerate(one.shape):
                if isinstance(size, str):
                    places.setdefault(size, (number, axis))
        self._inputs = [_Input(one.name, number, _numpy_type(_torch_type(one))) for number, one in taken]
        self._outputs = [
            _Output(
                one.name,
                _torch_type(one),
                _numpy_type(_torch_type(one)),
                _known_sizes(one.shape, places) if knows_sizes else None,
            )
            for one in session.get_outputs()
        ]
        self._spare = torch.empty(1, dtype=torch.float64, device=device)

    @property
    def num_dropped_inputs(self) -> int:
        """Inputs of the module that the model does without."""
        return self._num_inputs - len(self._inputs)

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run it; the results are complete when this returns."""
        binding = self._session.io_binding()
        for name, number, numpy_type in self._inputs:
            tensor = tensors[number]
            place = tensor.device
            pointer = tensor.data_ptr() or self._spare.data_ptr()
            binding.bind_input(name, place.type, place.index or 0, numpy_type, tuple(tensor.shape), pointer)
        results = [self._bound_output(binding, output, tensors) for output in self._outputs]
        is_on_gpu = self._device.type == "cuda"
        if is_on_gpu:
            # The session computes on a stream of its own.
            torch.cuda.current_stream(self._device).synchronize()
        self._session.run_with_iobinding(binding)
        if is_on_gpu:
            binding.synchronize_outputs()
        if None not in results:
            return [result for result in results if result is not None]
        made = binding.get_outputs()
        return [
            self._taken(made[number], output) if result is None else result
            for number, (result, output) in enumerate(zip(results, self._outputs, strict=True))
        ]

    def _bound_output(self, binding: Any, output: _Output, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        kind, number = self._device.type, self._device_id
        if output.sizes is not None:
            shape = tuple(size if isinstance(size, int) else tensors[size[0]].shape[size[1]] for size in output.sizes)
            result = torch.empty(shape, dtype=output.dtype, device=self._device)
            if result.numel():
                binding.bind_output(output.name, kind, number, output.numpy_type, shape, result.data_ptr())
                return result
        binding.bind_output(output.name, kind, number)
        return None

    def _taken(self, value: Any, output: _Output) -> torch.Tensor:
        """A tensor that the session allocated."""
        if not hasattr(value, "__dlpack__"):
            return torch.from_numpy(value.numpy()).to(self._device)
        tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(value)
        if tensor.dtype != output.dtype:  # DLPack had no bool at first, and ONNX Runtime writes it as bytes
            tensor = tensor.view(output.dtype)
        if self._device.type != "cuda":
            return tensor
        # The session may use the memory again, on its own stream, as soon as the tensor is dropped.
        copied = tensor.clone()
        torch.cuda.current_stream(self._device).synchronize()
        return copied


def _check_axes(graph: GraphSpec, number: int, one: Any) -> None:
    spec = graph.inputs[number]
    for axis in spec.dynamic_axes:
        if isinstance(one.shape[axis], int):
            raise TuningError(
                f"the model has the fixed size {one.shape[axis]} for `{spec.access_path}` axis {axis} "
                f"({spec.shape[axis]}), but calls have {spec.min_shape[axis]}..{spec.max_shape[axis]}"
            )


def _known_sizes(
    shape: Sequence[int | str | None], places: Mapping[str, tuple[int, int]]
) -> tuple[int | tuple[int, int], ...] | None:
    known = [size if isinstance(size, int) else places.get(size or "") for size in shape]
    return None if None in known else tuple(size for size in known if size is not None)


def _torch_type(one: Any) -> torch.dtype:
    if one.type not in _TORCH_TYPES:
        raise TuningError(f"the model has a {one.type}, and only tensors of {', '.join(DTYPES)} can be bound")
    return _TORCH_TYPES[one.type]


def _numpy_type(dtype: torch.dtype) -> Any:
    return torch.empty(0, dtype=dtype).numpy().dtype.type
