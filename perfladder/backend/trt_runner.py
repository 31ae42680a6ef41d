"""Runs a TensorRT engine on torch's memory and streams: inputs are read where they are, results written into tensors of
torch's. The host waits for nothing but results whose sizes depend on values.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, Final

import torch

from perfladder.backend.cuda_graphs import Policy, Recordable, ReplayedSizes
from perfladder.backend.cuda_lane import Lane, on_device
from perfladder.backend.trt_build import EngineRecord
from perfladder.backend.trt_engine import Engine
from perfladder.backend.trt_profiles import Profile, Shapes, chosen_profile
from perfladder.errors import InputError, TuningError

_MAX_KNOWN: Final = 1024


class TensorRTRunner:
    """Takes the tensors among a call's arguments, and gives those that it computes.

    One context serves all calls that are not replayed, and each CUDA graph has its own, since a graph is only good as
    long as its context stays as it was. All share scratch memory, so calls of several threads and streams wait for each
    other on the device; a graph of somebody else's that holds a call is not to be replayed beside other calls.

    Args:
        engine: What to run.
        record: Its profiles.
        lane: Where.
        max_graphs: Sizes that have a CUDA graph at a time; 0: none.
        policy: Which graph makes room for another one.
    """

    def __init__(self, engine: Engine, record: EngineRecord, lane: Lane, *, max_graphs: int, policy: Policy) -> None:
        self._engine, self._lane = engine, lane
        taken = [one.number for one in engine.inputs]
        self._profiles = [Profile(inputs=[one.inputs[number] for number in taken]) for one in record.profiles]
        self._sizes = ReplayedSizes(lane, limit=max_graphs, policy=policy)
        self._profile_by_shapes: dict[Shapes, int] = {}
        with on_device(lane.device):
            self._context: Any = engine.new_context()
        self._lent: list[Any] = []
        self._spare = torch.empty(1, dtype=torch.float64, device=lane.device)
        self._lock = threading.Lock()

    @property
    def num_graphs(self) -> int:
        """Sizes that have a CUDA graph."""
        return len(self._sizes)

    @property
    def num_replays(self) -> int:
        """Calls that a graph served."""
        return self._sizes.num_replays

    @property
    def num_captures(self) -> int:
        """Graphs that were made."""
        return self._sizes.num_captures

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run it; results are complete where work that follows on the current stream sees them.

        Raises:
            InputError: The shapes are outside all profiles.
            TuningError: The engine fails.
        """
        taken = [self._at_hand(position, tensors[one.number]) for position, one in enumerate(self._engine.inputs)]
        shapes = tuple(tuple(tensor.shape) for tensor in taken)
        with self._lock, on_device(self._lane.device):
            profile = self._profile_of(shapes)
            if self._lane.is_recording():
                return self._plain(taken, shapes, profile)
            results = self._sizes.serve(taken, lambda inputs: self._recordable(inputs, shapes, profile))
            return self._plain(taken, shapes, profile) if results is None else results

    def _at_hand(self, position: int, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device, at an address that the library takes."""
        if tensor.dtype is not self._engine.inputs[position].dtype:
            raise InputError(
                f"`{self._profiles[0].inputs[position].access_path}` is {tensor.dtype}, but the engine was built for "
                f"{self._engine.inputs[position].dtype}."
            )
        if tensor.device != self._lane.device:
            return tensor.to(self._lane.device, non_blocking=True)
        return tensor.clone() if tensor.data_ptr() % self._lane.alignment_bytes else tensor

    def _profile_of(self, shapes: Shapes) -> int:
        if shapes not in self._profile_by_shapes:
            if len(self._profile_by_shapes) >= _MAX_KNOWN:
                self._profile_by_shapes.clear()
                self._sizes.unfit.clear()
            self._profile_by_shapes[shapes] = chosen_profile(self._profiles, shapes)
        return self._profile_by_shapes[shapes]

    def _ready(self) -> Any:
        """The context for calls that are not replayed."""
        is_lent = any(context is self._context for context in self._lent)
        if self._lane.is_recording():
            # From now on it belongs to the graph that somebody makes, which later changes of it would break.
            self._lent += [] if is_lent else [self._context]
        elif is_lent:
            self._context = self._engine.new_context()
        return self._context

    def _plain(self, taken: Sequence[torch.Tensor], shapes: Shapes, profile: int) -> list[torch.Tensor]:
        context, unknown = self._ready(), dict[str, _Unknown]()
        self._set(context, taken, shapes, profile)
        results = [self._bound(context, output, unknown) for output in self._engine.outputs]
        try:
            with self._lane.work() as stream:
                self._execute(context, stream)
        finally:
            for name in unknown:
                context.set_output_allocator(name, None)
                self._sizes.unfit[shapes] = "sizes of its results are known only afterwards"
        return [
            result if result is not None else unknown[output.name].result(output.dtype, self._lane)
            for result, output in zip(results, self._engine.outputs, strict=True)
        ]

    def _set(self, context: Any, taken: Sequence[torch.Tensor], shapes: Shapes, profile: int) -> None:
        """Tell a context what goes in."""
        if context.active_optimization_profile != profile:
            with self._lane.work() as stream:
                is_set = context.set_optimization_profile_async(profile, stream)
            if not is_set:
                raise TuningError(f"the engine does not change to profile {profile}")
        for one, tensor, shape in zip(self._engine.inputs, taken, shapes, strict=True):
            if not context.set_input_shape(one.name, shape):
                raise TuningError(f"the engine refuses shape {list(shape)} for {one.name}")
            context.set_tensor_address(one.name, tensor.data_ptr() or self._spare.data_ptr())
        if missing := context.infer_shapes():
            raise TuningError(f"the engine cannot tell the sizes of its results without {', '.join(missing)}")

    def _bound(self, context: Any, output: Any, unknown: dict[str, _Unknown]) -> torch.Tensor | None:
        """The tensor that a result is written into; None where its size is known only afterwards."""
        shape = tuple(context.get_tensor_shape(output.name))
        if any(size < 0 for size in shape):
            unknown[output.name] = found = _Unknown(self._lane.device)
            allocator = self._engine.new_allocator(found.allocate, found.tell_shape)
            found.keep(allocator)
            context.set_output_allocator(output.name, allocator)
            return None
        result = torch.empty(shape, dtype=output.dtype, device=self._lane.device)
        context.set_tensor_address(output.name, result.data_ptr() or self._spare.data_ptr())
        return result

    def _execute(self, context: Any, stream: int) -> None:
        self._lane.hold([self._engine.scratch])
        if not context.execute_async_v3(stream):
            raise TuningError("the engine failed to run; its library's log says why")

    def _recordable(self, inputs: Sequence[torch.Tensor], shapes: Shapes, profile: int) -> Recordable:
        """A call of these tensors, in a context of its own."""
        context = self._engine.new_context()
        self._set(context, inputs, shapes, profile)
        bound = [self._bound(context, output, {}) for output in self._engine.outputs]
        outputs = [output for output in bound if output is not None]
        can_tell = getattr(context, "is_stream_capturable", None)

        def run(stream: int) -> list[torch.Tensor]:
            self._execute(context, stream)
            return outputs

        def why_not(stream: int) -> str | None:
            is_fit = can_tell is None or can_tell(stream)
            return None if is_fit else "the engine's runtime says that it cannot be recorded"

        return Recordable(run, why_not)


class _Unknown:
    """A result whose size the engine tells while it runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._shape: tuple[int, ...] | None = None
        self._allocator: Any = None

    def keep(self, allocator: Any) -> None:
        """Hold what the library holds by address only."""
        self._allocator = allocator

    def allocate(self, num_bytes: int) -> int:
        """The address of so much memory, which is never none."""
        if num_bytes > self._memory.numel() or not self._memory.numel():
            self._memory = torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=self._device)
        return self._memory.data_ptr()

    def tell_shape(self, shape: tuple[int, ...]) -> None:
        """Take what the library tells."""
        self._shape = shape

    def result(self, dtype: torch.dtype, lane: Lane) -> torch.Tensor:
        """The tensor."""
        if self._shape is None:
            raise TuningError("the engine did not tell the size of a result")
        lane.hold([self._memory])  # it was allocated beside the stream that is current now
        num_bytes = math.prod(self._shape) * dtype.itemsize
        return self._memory[:num_bytes].view(dtype).reshape(self._shape)
