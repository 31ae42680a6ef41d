"""CUDA graphs of a module's calls: one for each size, replayed with the host's work of a few copies."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from pydantic import JsonValue

from perfladder._torch_private import HeldWeights, tensors_beside_weights
from perfladder.backend.base import BuildRequest, Built
from perfladder.backend.cuda_graphs import Recordable, ReplayedSizes
from perfladder.backend.cuda_lane import CudaLane, Lane, on_device
from perfladder.backend.flat import FlatCall, FlatModule, OutputForm, has_constants_of, learned_form, why_not_flat
from perfladder.errors import TuningError
from perfladder.tuning.samples import copy_arguments
from perfladder.tuning.state import ModuleState
from perfladder.tuning.tree import bind, input_leaves

if TYPE_CHECKING:
    from perfladder.tuning.graphs import GraphSpec

_MAX_GRAPHS: Final = 8
_CALLS_TO_RECORD: Final = 2
_every: weakref.WeakSet[GraphedCall] = weakref.WeakSet()
_num_switched_off = 0


@contextmanager
def graphs_off() -> Iterator[list[GraphedCall]]:
    """Let all calls of this process run as they are, inside the block; gives those that have graphs otherwise."""
    global _num_switched_off
    _num_switched_off += 1
    try:
        yield [call for call in _every if call.num_graphs]
    finally:
        _num_switched_off -= 1


def graphed(built: Built, request: BuildRequest) -> Built:
    """What was built, with its calls replayed; of the samples they are recorded now."""
    call = GraphedCall(replace(request, forward=built.call), CudaLane(request.device))
    with torch.no_grad():  # as calls are served; a compiler would compile once more for gradients
        for _ in range(_CALLS_TO_RECORD):
            for args, kwargs in request.calls():
                call(*args, **kwargs)
    facts: dict[str, JsonValue] = {"num_cuda_graphs": call.num_graphs}
    if call.why_not is not None:
        facts["no_cuda_graph"] = call.why_not
    return replace(built, call=call, details={**built.details, **facts})


class GraphedCall:
    """Takes the arguments of a forward, and replays what was recorded of a call of that size.

    From the second call of a size on: the first call of all tells how results are put together. What cannot be taken
    apart into tensors on the device, or not be recorded since the host waits in it, runs as it is. So does a call in
    somebody else's graph. What the host does in a call, such as to count it, is done when it is recorded only. Where
    other weights, buffers or parts are in the place of those that were recorded, sizes are recorded anew.

    Args:
        request: Its forward is what is called.
        lane: Where.

    Attributes:
        why_not: Why calls of all sizes run as they are; None if they do not.
    """

    def __init__(self, request: BuildRequest, lane: Lane) -> None:
        self._request, self._lane = request, lane
        self._sizes = ReplayedSizes(lane, limit=_MAX_GRAPHS, policy="lfu")
        self._lock = threading.Lock()
        self._weights: HeldWeights | None = None
        self.why_not = why_not_flat(request.graph)
        self._served: Callable[..., Any] | None = request.forward if self.why_not else None
        _every.add(self)

    @property
    def form(self) -> GraphSpec:
        """The form of call that it serves."""
        return self._request.graph

    @property
    def num_graphs(self) -> int:
        """Sizes that have a CUDA graph."""
        return len(self._sizes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the forward."""
        served = self._served
        if served is None:
            if not has_constants_of(self.form, args, kwargs):  # nothing is learned of these, which would stay
                return self._request.forward(*args, **kwargs)
            with self._lock:
                served = self._served = self._served or self._made(args, kwargs)
        return served(*args, **kwargs)

    def _made(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """Learn from a call, which leaves nothing in the module, how results are put together."""
        state = ModuleState(self._request.module)
        own = copy_arguments(args, kwargs)
        try:
            before = self._tensors(*own)
            with torch.inference_mode(False):
                form = learned_form(self._request, *own)
                flat = FlatModule(self._request, *copy_arguments(args, kwargs))
            after = self._tensors(*own)
            for name in before | after:
                if before.get(name) is not after.get(name):
                    raise TuningError(f"the call puts another tensor in the place of `{name}`, as a growing cache does")
        except TuningError as error:
            self.why_not = str(error)
            return self._request.forward
        finally:
            state.restore()
        flat.forget_call()
        self.why_not = _why_not_recorded(flat, form)
        if self.why_not is not None:
            return self._request.forward
        this = weakref.proxy(self)  # not to keep graphs' memory until the collector comes
        return FlatCall(
            self._request, flat.inputs, lambda tensors: this._run(flat, tensors), form, self._request.forward
        )

    def _tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Tensors of a call by their names."""
        leaves = input_leaves(bind(self.form.parameters, args, kwargs))
        return {leaf.access_path: leaf.value for leaf in leaves if isinstance(leaf.value, torch.Tensor)}

    def _run(self, flat: FlatModule, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        results = None
        if self.why_not is None and not _num_switched_off:
            with on_device(self._lane.device):
                if not self._lane.is_recording():
                    results = self._replayed(flat, tensors)
        return flat.forward(*tensors) if results is None else results

    def _replayed(self, flat: FlatModule, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        with self._lock:
            if self._weights is None or not self._weights.are_same():
                # A graph would go on reading where the weights have been.
                self._sizes.clear()
                self._weights = HeldWeights(self._request.module)
            results = self._sizes.serve(tensors, lambda inputs: _recordable(flat, inputs))
            if not len(self._sizes):
                self.why_not = next(iter(self._sizes.unfit.values()), None)
        return results


def _recordable(flat: FlatModule, inputs: Sequence[torch.Tensor]) -> Recordable:
    """A call of these tensors; what the module keeps for itself while it is recorded stays in memory with the graph."""
    kept: list[torch.Tensor] = []

    def run(_: int) -> Sequence[torch.Tensor]:
        computed = flat.forward(*inputs)
        kept[:] = tensors_beside_weights(flat.module)
        return computed

    return Recordable(run)


def _why_not_recorded(flat: FlatModule, form: OutputForm) -> str | None:
    """Why a replay would not do what a call does; None if it does."""
    if not form.num_computed:
        return "its result has no tensor that it computes"
    for number, one in enumerate(flat.inputs):
        if one.is_on_cpu:
            return f"`{one.access_path}` is on the CPU, so that a graph would hold its value"
        if number in form.changed:
            return f"`{one.access_path}` is changed in place, and a graph would change its own copy"
    return None
