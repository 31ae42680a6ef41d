"""`Trace`: the spans of one profiler window as numpy columns, whoever wrote the file."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from perfladder.trace.labels import Label, decode_label, read_annotation
from perfladder.trace.rows import Row
from perfladder.trace.warnings import TraceWarning

if TYPE_CHECKING:
    from perfladder.trace.correlation import DeviceJoin
    from perfladder.trace.nesting import Forest

IntArray = npt.NDArray[np.integer[Any]]
BoolArray = npt.NDArray[np.bool_]

ABSENT: Final = -1
"""Value of an integer column where the event does not carry the field."""


class Category(IntEnum):
    """What kind of span an event is; Kineto's category names and older ones map to these."""

    OTHER = 0
    CPU_OP = 1
    USER_ANNOTATION = 2
    RUNTIME = 3
    DRIVER = 4
    PYTHON = 5
    OVERHEAD = 6
    KERNEL = 7
    GPU_MEMCPY = 8
    GPU_MEMSET = 9
    GPU_ANNOTATION = 10
    SYNC = 11


DEVICE_WORK: Final = (Category.KERNEL, Category.GPU_MEMCPY, Category.GPU_MEMSET)
"""Device rows that are work. Synchronization rows and annotations on the device side are none."""


class DistributedInfo(Row):
    """The rank that wrote the trace, as the file says; a file that says nothing has no `DistributedInfo`."""

    rank: int
    world_size: int | None = None
    backend: str | None = None


@dataclass(frozen=True, eq=False)
class Trace:
    """The spans of one window, one array entry an event, in file order.

    Names, processes and threads are interned: `names[name_id[i]]` is the name of event i, `pids[pid[i]]` its process.
    Integer columns hold `ABSENT` (-1) where an event lacks the field. Functions over a trace never change it.

    Attributes:
        names: Distinct span names.
        pids: Distinct process ids as written (device events carry the device's index here).
        tids: Distinct thread ids as written (device events carry the stream here).
        name_id: Index into `names`; ids are integers of 16 to 64 bits, so widen them before arithmetic.
        category: `Category` values, int8.
        start_ns: Start in integer nanoseconds from the file's own zero, int64.
        duration_ns: Duration in integer nanoseconds, int64.
        pid: Index into `pids`.
        tid: Index into `tids`.
        correlation: Joins device work with the runtime call that launched it.
        external_id: Id of the operator inside which the event was launched.
        stream: Stream of a device event, or that a synchronization waits for.
        device: Index of the device.
        sequence: Autograd's sequence number.
        forward_thread: Non-zero for an operator of a backward pass: torch's number of the forward thread.
        num_bytes: Size of a copy or fill, or of a collective's message.
        resolution_ns: What the timestamps are rounded to: 1, or 250 or 1000 in some older or rewritten traces.
        warnings: What is suspicious about the file.
        distributed: Rank and world size; None if the file does not say.
        device_types: What the events ran on, e.g. `("CPU", "CUDA")`.
        device_names: Names from the file's device properties, by position.
        window_ns: Start and end of the profiler's own root span; None if it is not in the file.
        source: The file, for messages.
        raw_arguments: Each event's raw JSON arguments, if the trace was read with `with_arguments`.
    """

    names: tuple[str, ...]
    pids: tuple[int | str, ...]
    tids: tuple[int | str, ...]
    name_id: IntArray
    category: IntArray
    start_ns: IntArray
    duration_ns: IntArray
    pid: IntArray
    tid: IntArray
    correlation: IntArray
    external_id: IntArray
    stream: IntArray
    device: IntArray
    sequence: IntArray
    forward_thread: IntArray
    num_bytes: IntArray
    resolution_ns: int = 1
    warnings: tuple[TraceWarning, ...] = ()
    distributed: DistributedInfo | None = None
    device_types: tuple[str, ...] = ("CPU",)
    device_names: tuple[str, ...] = ()
    window_ns: tuple[int, int] | None = None
    source: str = ""
    raw_arguments: tuple[bytes, ...] | None = field(default=None, repr=False)

    @staticmethod
    def read(path: str | Path, *, with_arguments: bool = False) -> Trace:
        """Read a torch.profiler or Kineto trace, plain or gzip; see `perfladder.trace.read.read_trace`."""
        from perfladder.trace.read import read_trace

        return read_trace(path, with_arguments=with_arguments)

    @property
    def num_events(self) -> int:
        """Number of spans."""
        return len(self.start_ns)

    @cached_property
    def end_ns(self) -> IntArray:
        """End of each event in nanoseconds."""
        return self.start_ns + self.duration_ns

    @cached_property
    def forest(self) -> Forest:
        """The host-side spans as a forest by interval nesting, computed once."""
        from perfladder.trace.nesting import nest_host_spans

        return nest_host_spans(self)

    @cached_property
    def device_join(self) -> DeviceJoin:
        """Device work joined with the host calls that launched it, computed once."""
        from perfladder.trace.correlation import join_device_work

        return join_device_work(self)

    @cached_property
    def labels(self) -> tuple[Label | None, ...]:
        """For each distinct name, the label of ours that it stands for."""
        return tuple(decode_label(name) for name in self.names)

    @cached_property
    def annotation_labels(self) -> tuple[Label | None, ...]:
        """For each distinct name, what it stands for as an annotation in a trace without labels of ours."""
        names = set(self.name_id[self.category == Category.USER_ANNOTATION].tolist())
        return tuple(read_annotation(name) if index in names else None for index, name in enumerate(self.names))

    @cached_property
    def has_device_work(self) -> bool:
        """Whether any kernel, copy or fill ran on a device in the window."""
        return bool(np.isin(self.category, DEVICE_WORK).any())

    def events_of(self, *categories: Category) -> IntArray:
        """Return the indices of the events of these categories, in file order."""
        mask = self.category == categories[0]
        for category in categories[1:]:
            mask |= self.category == category
        return np.flatnonzero(mask)

    def names_matching(self, wanted: BoolArray) -> BoolArray:
        """Spread a mask over the distinct names to a mask over the events."""
        return wanted[self.name_id]

    def arguments(self, event: int) -> dict[str, Any]:
        """Return one event's arguments (input shapes, grid, block, ...) as written.

        Raises:
            ValueError: The trace was read without `with_arguments=True`.
        """
        if self.raw_arguments is None:
            raise ValueError("This trace holds no arguments. Read it with Trace.read(path, with_arguments=True).")
        raw = self.raw_arguments[event]
        return msgspec.json.decode(raw) if raw else {}
