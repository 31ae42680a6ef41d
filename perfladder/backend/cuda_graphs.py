"""Calls that CUDA graphs serve, one graph for each size of call, and which sizes have one where not all can."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Literal, NamedTuple, TypeVar

import torch

from perfladder.backend.cuda_lane import Graph, Lane
from perfladder.errors import TuningError

_logger = logging.getLogger("perfladder.tuning")

Kept = TypeVar("Kept")
Policy = Literal["lfu", "lru"]

_MAX_COUNTED: Final = 1024
"""Sizes whose calls are counted; more of them are begun anew."""


class BoundedCache(Generic[Kept]):
    """At most so many values, by key; not thread-safe.

    Args:
        limit: 0 keeps nothing.
        policy: Who makes room: with `lfu` the one with the fewest calls, but only for one that has more; with `lru`
            the one whose last call is longest ago.
    """

    def __init__(self, limit: int, policy: Policy) -> None:
        self._limit, self._policy = limit, policy
        self._kept: OrderedDict[Hashable, Kept] = OrderedDict()
        self._calls: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def get(self, key: Hashable) -> Kept | None:
        """The value of a key, of which this is one more call."""
        if len(self._calls) >= _MAX_COUNTED and key not in self._calls:
            self._calls = Counter({one: self._calls[one] for one in self._kept})
        self._calls[key] += 1
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def wants(self, key: Hashable) -> bool:
        """Whether a value for a key would be kept: it was called before, and is worth the place of another one."""
        if not self._limit or self._calls[key] < 2:
            return False
        if len(self._kept) < self._limit or self._policy == "lru":
            return True
        return self._calls[key] > self._calls[self._victim()]

    def make_room(self) -> None:
        """Drop what has to go before one more value is made, so that both are never in memory together."""
        while self._kept and len(self._kept) >= self._limit:
            del self._kept[self._victim()]

    def put(self, key: Hashable, value: Kept) -> None:
        """Keep a value."""
        self.make_room()
        self._kept[key] = value

    def clear(self) -> None:
        """Drop all values; calls stay counted."""
        self._kept.clear()

    def _victim(self) -> Hashable:
        if self._policy == "lru":
            return next(iter(self._kept))
        return min(self._kept, key=lambda key: self._calls[key])


class Recordable(NamedTuple):
    """Work on tensors that stay where they are.

    Attributes:
        run: Does it on the stream with that handle, which is the current one, and gives the results, in the same
            memory each time that what was recorded is replayed.
        why_not: Why a stream's work cannot be recorded; None if it can.
    """

    run: Callable[[int], Sequence[torch.Tensor]]
    why_not: Callable[[int], str | None] = lambda _: None


class ReplayedSizes:
    """Records the work of each size of call at its second call, and replays it from then on; not thread-safe.

    Args:
        lane: Where.
        limit: Sizes that have a graph at a time; 0: none.
        policy: Which graph makes room for another one.

    Attributes:
        num_replays: Calls that a graph served.
        num_captures: Graphs that were made.
        unfit: Why sizes have no graph.
    """

    def __init__(self, lane: Lane, *, limit: int, policy: Policy) -> None:
        self._lane = lane
        self._graphs: BoundedCache[_Replayed] = BoundedCache(limit, policy)
        self.unfit: dict[Hashable, str] = {}
        self.num_replays = self.num_captures = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def clear(self) -> None:
        """Drop all graphs, since what they were recorded of is no more; sizes are recorded again at their next call."""
        self._graphs.clear()
        self.unfit.clear()

    def serve(
        self, taken: Sequence[torch.Tensor], prepare: Callable[[Sequence[torch.Tensor]], Recordable]
    ) -> list[torch.Tensor] | None:
        """Results of a call in memory of the caller's own; None where no graph serves it.

        Args:
            taken: What goes in.
            prepare: Makes the work of tensors of the graph's own, into which `taken` is copied at each call.
        """
        sizes = tuple(tuple(tensor.shape) for tensor in taken)
        replayed = self._graphs.get(sizes)
        # Memory of a graph is written to in later calls, which those of inference mode must not be.
        with torch.inference_mode(False), torch.no_grad():
            if replayed is None and self._graphs.wants(sizes) and sizes not in self.unfit:
                replayed = self._captured(taken, sizes, prepare)
            if replayed is None:
                return None
            self.num_replays += 1
            return replayed(self._lane, taken)

    def _captured(
        self,
        taken: Sequence[torch.Tensor],
        sizes: Hashable,
        prepare: Callable[[Sequence[torch.Tensor]], Recordable],
    ) -> _Replayed | None:
        self._graphs.make_room()
        try:
            made = self._made(taken, prepare)
        except torch.OutOfMemoryError as error:
            made = str(error).partition("\n")[0]  # without a graph there may be enough
        if isinstance(made, str):
            self.unfit[sizes] = made
            _logger.warning(
                "Calls of %s run without a CUDA graph: %s", ", ".join(str(list(t.shape)) for t in taken), made
            )
            return None
        self.num_captures += 1
        self._graphs.put(sizes, made)
        return made

    def _made(
        self, taken: Sequence[torch.Tensor], prepare: Callable[[Sequence[torch.Tensor]], Recordable]
    ) -> _Replayed | str:
        inputs = [torch.empty_like(tensor) for tensor in taken]
        with self._lane.work():
            for there, tensor in zip(inputs, taken, strict=True):
                there.copy_(tensor)
        work = prepare(inputs)
        with self._lane.work(is_own=True) as stream:
            # The first run of new sizes may allocate and compile, which a graph cannot hold.
            work.run(stream)
            return self._recorded(work, inputs, stream)

    def _recorded(self, work: Recordable, inputs: Sequence[torch.Tensor], stream: int) -> _Replayed | str:
        if reason := work.why_not(stream):
            return reason
        outputs: list[torch.Tensor] = []
        try:
            graph = self._lane.record(lambda recorded_on: outputs.extend(work.run(recorded_on)))
        except (RuntimeError, TuningError) as error:
            return str(error)
        for output in outputs:
            if output.device != self._lane.device:
                return f"a result is on {output.device}, where a replay computes nothing"
            if output.layout is not torch.strided:
                return f"a result is {output.layout}, whose size depends on values"
        return _Replayed(graph, work, inputs, outputs)


@dataclass(frozen=True, eq=False)
class _Replayed:
    """A recorded call, with memory of its own into which inputs are copied; what its work holds stays as it was."""

    graph: Graph
    work: Recordable
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]

    def __call__(self, lane: Lane, taken: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        results = [torch.empty_like(output) for output in self.outputs]
        with lane.work():
            lane.hold([*self.inputs, *self.outputs])
            for there, tensor in zip(self.inputs, taken, strict=True):
                there.copy_(tensor)
            self.graph.replay()
            for result, output in zip(results, self.outputs, strict=True):
                result.copy_(output)
        return results
