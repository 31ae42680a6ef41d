"""An opened TensorRT engine: what goes in and out, and contexts to run it in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from perfladder.backend.shared_file import SharedFile
from perfladder.backend.trt_build import PLAN_FILE, EngineRecord, check_same_profiles
from perfladder.backend.trt_library import Library
from perfladder.errors import TuningError

_TORCH_TYPES: Final = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT64": torch.int64,
    "INT32": torch.int32,
    "INT8": torch.int8,
    "UINT8": torch.uint8,
    "BOOL": torch.bool,
}
"""Source: tensorrt, members of `DataType` that tensors of torch have too and that whole bytes hold."""


class Input(NamedTuple):
    """One tensor that goes in; `number` is its place among the tensors of a call."""

    number: int
    name: str
    dtype: torch.dtype


class Output(NamedTuple):
    """One result."""

    name: str
    dtype: torch.dtype


class Engine:
    """What makes contexts, which share weights and scratch memory.

    Contexts are never run at the same time: their scratch memory is one.

    Args:
        library: Whose engine it is.
        engine: The library's own object.
        record: Outputs in the order of results.
        scratch: Makes memory on the device, of so many bytes.
        kernel_cache: Where kernels that were compiled for this machine are kept; None: nowhere.
        is_captured: CUDA graphs are made of calls, so that kernels have to be final from the first one on.

    Raises:
        TuningError: It has other tensors than its record, or of dtypes that torch has not.
    """

    def __init__(
        self,
        library: Library,
        engine: Any,
        record: EngineRecord,
        scratch: Callable[[int], torch.Tensor],
        *,
        kernel_cache: SharedFile | None = None,
        is_captured: bool = False,
    ) -> None:
        self._api, self._engine = library.api, engine
        self._kernel_cache = kernel_cache
        self._kernels: Any = None
        names = [engine.get_tensor_name(number) for number in range(engine.num_io_tensors)]
        outputs = [name for name in names if engine.get_tensor_mode(name) != self._api.TensorIOMode.INPUT]
        known = [one.name for one in record.profiles[0].inputs]
        self._num_known = len(known)
        if set(outputs) != set(record.outputs) or not set(names) - set(outputs) <= set(known):
            raise TuningError(f"the engine has the tensors {', '.join(names)}, and its record others")
        self.inputs = [Input(known.index(name), name, self._dtype(name)) for name in names if name in known]
        self.outputs = [Output(name, self._dtype(name)) for name in record.outputs]
        self._config = self._runtime_config(is_captured)
        self.scratch = scratch(max(engine.device_memory_size_v2, 1))

    @property
    def num_dropped_inputs(self) -> int:
        """Inputs of the module that the engine does without."""
        return self._num_known - len(self.inputs)

    def new_context(self) -> Any:
        """A context of its own, in the shared scratch memory.

        Raises:
            TuningError: The library makes none.
        """
        if self._config is not None:
            context = self._engine.create_execution_context(self._config)
        else:
            context = self._engine.create_execution_context(self._api.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise TuningError("the engine's runtime makes no execution context; its log says why")
        context.set_device_memory(self.scratch.data_ptr(), self.scratch.numel())
        return context

    def new_allocator(self, allocate: Callable[[int], int], tell_shape: Callable[[tuple[int, ...]], None]) -> Any:
        """For an output whose size is known only once it is computed.

        Args:
            allocate: Gives the address of so many bytes.
            tell_shape: Gets the shape.
        """

        class Allocator(self._api.IOutputAllocator):  # type: ignore[name-defined]
            def __init__(self, base: Any) -> None:
                base.__init__(self)

            def reallocate_output(self, name: str, memory: int, size: int, alignment: int) -> int:
                return allocate(size)

            def reallocate_output_async(self, name: str, memory: int, size: int, alignment: int, stream: int) -> int:
                return allocate(size)

            def notify_shape(self, name: str, shape: Any) -> None:
                tell_shape(tuple(shape))

        return Allocator(self._api.IOutputAllocator)

    def keep_kernels(self) -> None:
        """Leave what was compiled for this machine to later processes."""
        cache, kernels = self._kernel_cache, self._kernels
        if cache is None or kernels is None:
            return
        compiled = bytes(kernels.serialize())
        # It began as what was there; another process may have added more by now, which is not lost by being smaller.
        cache.update(lambda there: compiled if len(compiled) > len(there) else there)

    def _dtype(self, name: str) -> torch.dtype:
        kind = self._engine.get_tensor_dtype(name).name
        if kind not in _TORCH_TYPES:
            raise TuningError(f"the engine has a {kind} tensor {name}, which torch has not")
        return _TORCH_TYPES[kind]

    def _runtime_config(self, is_captured: bool) -> Any:
        """Settings of TensorRT-RTX, which compiles for the GPU when an engine runs; None for TensorRT."""
        api = self._api
        if not hasattr(api, "DynamicShapesKernelSpecializationStrategy"):
            return None
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(api.ExecutionContextAllocationStrategy.USER_MANAGED)
        config.cuda_graph_strategy = api.CudaGraphStrategy.DISABLED
        if is_captured:
            # A graph would keep the kernels that serve until better ones are compiled in the background.
            eager = api.DynamicShapesKernelSpecializationStrategy.EAGER
            config.dynamic_shapes_kernel_specialization_strategy = eager
        if self._kernel_cache is not None:
            self._kernels = config.create_runtime_cache()
            if kept := self._kernel_cache.read():
                self._kernels.deserialize(kept)  # refused, and empty then, where it is of another machine
            config.set_runtime_cache(self._kernels)
        return config


def open_engine(
    library: Library,
    folder: Path,
    record: EngineRecord,
    device: torch.device,
    *,
    kernel_cache: Path | None,
    is_captured: bool,
) -> Engine:
    """Open the engine of a build on a GPU.

    Raises:
        TuningError: The file is not there, is of another version, or the runtime refuses it, with its reason.
    """
    if record.version != library.version and not record.version_compatible:
        raise TuningError(
            f"the engine was built by version {record.version} of {record.library}, and {library.version} is here"
        )
    try:
        plan = (folder / PLAN_FILE).read_bytes()
    except OSError as error:
        raise TuningError(f"{PLAN_FILE} of the build cannot be read: {error.strerror}") from None
    with library.listening() as log:
        try:
            runtime = library.api.Runtime(library.logger)
            # An engine for several versions brings the code that runs it.
            runtime.engine_host_code_allowed = record.version_compatible
            engine = runtime.deserialize_cuda_engine(plan)
        except (TypeError, RuntimeError) as error:  # raised where the library cannot initialize CUDA
            raise TuningError(f"{library.title} refuses the engine: {log.failure() or error}") from error
    if engine is None:
        raise TuningError(f"{library.title} refuses the engine: {log.failure() or 'it gives no reason'}")
    check_same_profiles(library, engine, record)
    return Engine(
        library,
        engine,
        record,
        lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device=device),
        kernel_cache=SharedFile(kernel_cache) if kernel_cache is not None else None,
        is_captured=is_captured,
    )
