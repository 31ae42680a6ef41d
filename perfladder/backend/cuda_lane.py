"""Work of several streams and threads on one thing that only one of them may use at a time, in order on the device."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Final, Protocol

import torch

from perfladder._torch_private import end_failed_recording

_recording: Final = threading.RLock()
"""One recording at a time in this process: torch's random numbers have one state for all of them in 2.11."""


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one for libraries, which take that; a CPU needs nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def is_recorded(device: torch.device) -> bool:
    """Whether a device's current stream is recorded into a CUDA graph, so that nothing runs and nothing can be waited
    for.
    """
    if device.type != "cuda":
        return False
    with on_device(device):
        return torch.cuda.is_current_stream_capturing()


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Do it again."""


class Lane(Protocol):
    """Where a runner's work goes, on one device.

    Attributes:
        device: Where memory is.
        alignment_bytes: What addresses are multiples of.
    """

    device: torch.device
    alignment_bytes: int

    def is_recording(self) -> bool:
        """Whether somebody records the current stream's work into a graph of theirs."""

    def work(self, *, is_own: bool = False) -> AbstractContextManager[int]:
        """Work that comes after all of the current stream so far and after the work before, and before all to come.

        The device is the current one, as inside `on_device`.

        Args:
            is_own: On a stream that nothing but this lane's work uses, as what is recorded has to be.
        """

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep memory of tensors until the current stream has done its work so far, also if they are dropped before."""

    def record(self, work: Callable[[int], None]) -> Graph:
        """Record work on a stream instead of doing it; inside `work`."""


class CudaLane:
    """On a CUDA device, without the host waiting for it.

    Work goes on torch's current stream, or beside the default one on a stream that waits for it and that it waits for,
    since libraries synchronize the device where they are given the default stream.
    """

    alignment_bytes = 256  # what libraries expect, and what torch's allocator gives

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
        self._own = torch.cuda.Stream(self.device)
        self._last: torch.cuda.Stream | None = None
        self._done = torch.cuda.Event()

    def is_recording(self) -> bool:
        """Whether somebody records the current stream's work into a graph of theirs."""
        return is_recorded(self.device)

    @contextmanager
    def work(self, *, is_own: bool = False) -> Iterator[int]:
        """Give the handle of the stream, which is torch's current one inside the block.

        What is recorded holds scratch memory of libraries that torch keeps for each stream (cuBLAS), and may be
        replayed on any: on a stream of the caller's it would be that of the caller's other work.
        """
        current = torch.cuda.current_stream(self.device)
        if torch.cuda.is_current_stream_capturing():
            yield current.cuda_stream  # a graph cannot wait for what is outside it
            return
        is_beside = is_own or current == torch.cuda.default_stream(self.device)
        stream = self._own if is_beside else current
        if is_beside:
            stream.wait_stream(current)
        if self._last is not None and self._last != stream:
            stream.wait_event(self._done)
        try:
            with torch.cuda.stream(stream):
                yield stream.cuda_stream
        finally:
            self._done.record(stream)
            self._last = stream
            if is_beside:
                current.wait_event(self._done)

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tell torch's allocator that the current stream uses them."""
        stream = torch.cuda.current_stream(self.device)
        for tensor in tensors:
            tensor.record_stream(stream)

    def record(self, work: Callable[[int], None]) -> Graph:
        """Record work on the stream of the block around it.

        Raises:
            RuntimeError: It does what cannot be recorded.
        """
        with suppress(torch.OutOfMemoryError):
            return self._recorded(work)
        # What earlier calls left in torch's allocator is given back only while nothing is recorded.
        torch.cuda.empty_cache()
        return self._recorded(work)

    def _recorded(self, work: Callable[[int], None]) -> Graph:
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        failure: BaseException | None = None
        with _recording, _no_collection():
            # Other threads go on allocating meanwhile, which only this mode allows.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work(torch.cuda.current_stream().cuda_stream)
            except BaseException as error:
                failure = error
            try:
                graph.capture_end()
            except RuntimeError as error:
                failure = failure or error
                end_failed_recording(graph, pool, self.device)
        if failure is None:
            return graph
        try:
            if isinstance(failure, torch.OutOfMemoryError) or not isinstance(failure, Exception):
                raise failure
            told = next(iter(str(failure).splitlines()), type(failure).__name__)
            raise RuntimeError(f"the call cannot be recorded: {told}") from failure
        finally:
            del failure  # with its traceback it would keep the call's tensors


@contextmanager
def _no_collection() -> Iterator[None]:
    """What the collector frees may free memory of the device, which ends a recording."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()
