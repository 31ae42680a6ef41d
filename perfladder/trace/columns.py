"""Collects decoded events, chunk by chunk, into the columns of a `Trace`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from operator import attrgetter
from typing import Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from perfladder.trace.events import (
    DEFAULT_FINISHED,
    NO_ARGUMENTS,
    Arguments,
    Event,
    ExactEvent,
    RawEvent,
    decode_arguments,
)
from perfladder.trace.model import ABSENT, Category, IntArray
from perfladder.trace.sums import slices

_DAY_US: Final = 86_400e6
_DAY_NS: Final = 86_400_000_000_000
_INT16_LIMIT: Final = 2**15
_INT32_LIMIT: Final = 2**31
_INT64_LIMIT: Final = 2**63
# From here on doubles of microseconds are a quarter of one apart: 1.1e15 us, the year 2005 as epoch time.
_COARSE_DOUBLE_NS: Final = 2**50 * 1000
_MIN_EVENTS_TO_JUDGE: Final = 8
# Thousands of small arrays leave holes in the heap; joined now and then they are too large to stay there.
_CHUNKS_OF_BLOCK: Final = 32
# A double holds a microsecond stamp to the nanosecond below this; Kineto writes stamps relative to a recent base.
_EXACT_DOUBLE_US: Final = 2.0**43

# Kineto's ActivityType names, and the capitalised ones that it wrote before torch 1.11.
CATEGORIES: Final = {
    "cpu_op": Category.CPU_OP,
    "operator": Category.CPU_OP,
    "user_annotation": Category.USER_ANNOTATION,
    "cuda_runtime": Category.RUNTIME,
    "runtime": Category.RUNTIME,
    "cuda_driver": Category.DRIVER,
    "python_function": Category.PYTHON,
    "overhead": Category.OVERHEAD,
    "kernel": Category.KERNEL,
    "gpu_memcpy": Category.GPU_MEMCPY,
    "memcpy": Category.GPU_MEMCPY,
    "gpu_memset": Category.GPU_MEMSET,
    "memset": Category.GPU_MEMSET,
    "gpu_user_annotation": Category.GPU_ANNOTATION,
    "cuda_sync": Category.SYNC,
    "mtia_ccp_events": Category.KERNEL,
    "hpu_op": Category.KERNEL,
}
_SUFFIXES: Final = (("_runtime", Category.RUNTIME), ("_driver", Category.DRIVER), ("_sync", Category.SYNC))
_HOST_ONLY: Final = (Category.CPU_OP, Category.USER_ANNOTATION, Category.PYTHON)
_DEVICE_COLUMNS: Final = ("correlation", "stream", "device", "num_bytes")
_COLUMNS: Final = (
    *("name_id", "category", "start_ns", "duration_ns", "pid", "tid"),
    *("external_id", "sequence", "forward_thread", *_DEVICE_COLUMNS),
)
_Key = TypeVar("_Key", bound=Hashable)
AnyEvent = Event | ExactEvent | RawEvent


class NeedsExactTimes(Exception):  # noqa: N818 - a signal between two functions of this folder, no error
    """The timestamps are too large for doubles: decode this chunk again with `ExactEvent`."""


def categorize(text: str) -> Category:
    """Return the category for a trace file's category name, OTHER for an unknown one."""
    lowered = text.lower()
    if lowered in CATEGORIES:
        return CATEGORIES[lowered]
    return next((category for suffix, category in _SUFFIXES if lowered.endswith(suffix)), Category.OTHER)


@dataclass
class ColumnBuilder:
    """Grows the columns; `finish` checks them and returns what a `Trace` needs.

    Attributes:
        keep_raw: Keep each event's arguments as raw JSON too.
        num_objects: Event objects seen, spans or not.
        num_unfinished: Spans dropped for their times.
        window_ns: The profiler's own root span, which spans all others and is not kept as an event.
    """

    keep_raw: bool = False
    names: dict[str, int] = field(default_factory=dict)
    categories: dict[str, int] = field(default_factory=dict)
    pids: dict[int | str, int] = field(default_factory=dict)
    tids: dict[int | str, int] = field(default_factory=dict)
    raw_arguments: list[bytes] = field(default_factory=list)
    num_objects: int = 0
    num_unfinished: int = 0
    window_ns: tuple[int, int] | None = None
    _chunks: list[dict[str, IntArray]] = field(default_factory=list)
    _blocks: list[dict[str, IntArray]] = field(default_factory=list)
    _open_spans: list[AnyEvent] = field(default_factory=list)

    def add(self, events: Sequence[AnyEvent]) -> None:
        """Append the spans among `events`, which are of one class and in file order.

        Raises:
            NeedsExactTimes: Events with double times lie beyond what a double holds to the nanosecond.
        """
        spans = [event for event in events if event.ph == "X" and event.cat != "Trace"]
        others: list[AnyEvent] = []
        if len(spans) != len(events):
            others = [event for event in events if event.ph in ("B", "E") or (event.ph == "X" and event.cat == "Trace")]
        if others:
            _start_ns(others)  # raises before anything is kept
        if spans:
            self._append(spans)
        self.num_objects += len(events)
        for event in others:
            if event.ph == "X":
                self._see_root(event)
            else:
                self._open_spans.append(event)

    def finish(self) -> tuple[dict[str, IntArray], int]:
        """Return the columns without unfinished spans, and the resolution of the timestamps in nanoseconds."""
        self._close_open_spans()
        self._blocks.append(_join_columns(self._chunks))
        columns = _join_columns(self._blocks)
        is_good = columns["duration_ns"] >= 0
        if is_good.any() and int(columns["start_ns"].max()) - int(columns["start_ns"].min()) >= _DAY_NS:
            middle = np.median(columns["start_ns"][is_good])
            is_good &= np.abs(columns["start_ns"] - middle) < _DAY_NS
        num_bad = int(len(is_good) - is_good.sum())
        if num_bad:
            self.num_unfinished += num_bad
            columns = {name: column[is_good] for name, column in columns.items()}
            if self.keep_raw:
                self.raw_arguments = [raw for raw, good in zip(self.raw_arguments, is_good, strict=True) if good]
        return columns, _resolution_ns(columns["start_ns"], columns["duration_ns"])

    def _append(self, spans: Sequence[AnyEvent]) -> None:
        start_ns, has_start = _start_ns(spans)
        count = len(spans)
        dur = np.fromiter([span.dur for span in spans], np.float64, count)
        category = self._categories_of(spans)
        arguments = _arguments_of(spans)
        is_good = has_start & (dur >= 0) & (dur < _DAY_US)  # a comparison with NaN is false
        finished = [argument.finished for argument in arguments]
        if finished.count(DEFAULT_FINISHED) != count:
            is_good &= np.array([text.lower() != "false" for text in finished])
        columns: dict[str, IntArray] = {
            "name_id": _intern([span.name for span in spans], self.names),
            "category": category,
            "start_ns": start_ns,
            "duration_ns": np.rint(np.where(is_good, dur * 1000, -1)).astype(np.int64),
            "pid": _intern([span.pid for span in spans], self.pids),
            "tid": _intern([span.tid for span in spans], self.tids),
            **_argument_columns(arguments, category),
        }
        self._chunks.append(columns)
        if len(self._chunks) == _CHUNKS_OF_BLOCK:
            self._blocks.append(_join_columns(self._chunks))
        if self.keep_raw:
            self.raw_arguments.extend(bytes(s.args) if isinstance(s, RawEvent) else b"" for s in spans)

    def _categories_of(self, spans: Sequence[AnyEvent]) -> IntArray:
        ids = _intern([span.cat for span in spans], self.categories)
        table = np.array([categorize(text) for text in self.categories], np.int8)
        # The file of the older `EventList.export_chrome_trace` has no categories; its host process is named so.
        if "" in self.categories and (ids == self.categories[""]).any():
            is_bare = ids == self.categories[""]
            is_host = np.array([span.pid == "CPU functions" for span in spans])
            return np.where(is_bare & is_host, np.int8(Category.CPU_OP), table[ids])
        return table[ids]

    def _see_root(self, event: AnyEvent) -> None:
        starts, has_start = _start_ns([event])
        if has_start[0] and event.dur >= 0:
            self.window_ns = (int(starts[0]), int(starts[0]) + round(event.dur * 1000))

    def _close_open_spans(self) -> None:
        """Pair begin and end events: within a process and thread, an end closes the latest open begin."""
        stacks: dict[tuple[int | str, int | str], list[tuple[int, AnyEvent]]] = {}
        closed: list[AnyEvent] = []
        dated = [(_nanoseconds(event.ts), event) for event in self._open_spans]
        known = [(time_ns, event) for time_ns, event in dated if time_ns is not None]
        self.num_unfinished += len(dated) - len(known)
        for time_ns, event in sorted(known, key=lambda pair: pair[0]):
            stack = stacks.setdefault((event.pid, event.tid), [])
            if event.ph == "B":
                stack.append((time_ns, event))
            elif stack:
                begin_ns, begin = stack.pop()
                begin.dur = (time_ns - begin_ns) / 1000
                closed.append(begin)
            else:
                self.num_unfinished += 1
        self.num_unfinished += sum(len(stack) for stack in stacks.values())
        self._open_spans.clear()
        for kind in (Event, ExactEvent, RawEvent):
            spans = [span for span in closed if isinstance(span, kind)]
            if spans:
                self._append(spans)


def _intern(values: list[_Key], table: dict[_Key, int]) -> IntArray:
    try:
        ids = np.fromiter(map(table.__getitem__, values), np.int32, len(values))
    except KeyError:  # most chunks bring no new value, so looking for new ones first would cost more
        for value in dict.fromkeys(values):
            table.setdefault(value, len(table))
        ids = np.fromiter(map(table.__getitem__, values), np.int32, len(values))
    if (ids == ids[0]).all():
        return np.broadcast_to(ids[0], len(ids))
    return ids.astype(np.int16) if len(table) < _INT16_LIMIT else ids


def _start_ns(spans: Sequence[AnyEvent]) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Return starts in nanoseconds, and which of them are there and sane."""
    if isinstance(spans[0], Event):
        ts = np.fromiter([span.ts for span in spans], np.float64, len(spans))
        has_start = np.isfinite(ts)
        if (np.abs(ts[has_start]) >= _EXACT_DOUBLE_US).any():
            raise NeedsExactTimes
        return np.rint(np.where(has_start, ts, 0) * 1000).astype(np.int64), has_start
    values = [_nanoseconds(span.ts) for span in spans]
    has_start = np.array([value is not None for value in values])
    return np.array([0 if value is None else value for value in values], np.int64), has_start


def _nanoseconds(microseconds: Decimal | float) -> int | None:
    """Convert exactly; None if there is no number or it is beyond 64 bits."""
    number = microseconds if isinstance(microseconds, Decimal) else Decimal(str(microseconds))
    if not number.is_finite() or number.adjusted() > 18:
        return None
    nanoseconds = round(number.scaleb(3))
    return nanoseconds if abs(nanoseconds) < _INT64_LIMIT else None


def _arguments_of(spans: Sequence[AnyEvent]) -> list[Arguments]:
    if isinstance(spans[0], RawEvent):
        return [_decode(span.args) for span in spans]  # type: ignore[arg-type]
    return [span.args for span in spans]  # type: ignore[misc]


def _decode(raw: msgspec.Raw) -> Arguments:
    text = bytes(raw)
    return decode_arguments(text) if text and text != b"null" else NO_ARGUMENTS


def _argument_columns(arguments: list[Arguments], category: IntArray) -> dict[str, IntArray]:
    """Return the columns from the arguments; one that no event of the chunk has takes no memory."""
    count = len(arguments)
    columns = dict.fromkeys(_DEVICE_COLUMNS, _absent(count))
    columns["external_id"] = _narrow([argument.external_id for argument in arguments])
    columns["sequence"] = _narrow([argument.sequence for argument in arguments])
    columns["forward_thread"] = _narrow([argument.forward_thread for argument in arguments])
    if columns["external_id"].strides == (0,):
        columns["external_id"] = _narrow([argument.external_id_old for argument in arguments])
    rest = np.flatnonzero(~np.isin(category, _HOST_ONLY))
    if len(rest):
        chosen = [arguments[index] for index in rest.tolist()]
        for name in _DEVICE_COLUMNS:
            values = _narrow(list(map(attrgetter(name), chosen)))
            columns[name] = np.full(count, ABSENT, values.dtype)
            columns[name][rest] = values
    return columns


def _join_columns(parts: list[dict[str, IntArray]]) -> dict[str, IntArray]:
    """Join parts column by column, freeing each one's pieces; `parts` is empty afterwards."""
    columns = {name: _join([part.pop(name) for part in parts]) for name in _COLUMNS}
    parts.clear()
    return columns


def _join(parts: list[IntArray]) -> IntArray:
    """Return a whole column; one whose values are all the same takes no memory."""
    if not parts:
        return np.empty(0, np.int64)
    parts = [part for part in parts if len(part)] or parts[:1]
    if all(len(part) and part.strides == (0,) and part[0] == parts[0][0] for part in parts):
        return np.broadcast_to(parts[0][0], sum(map(len, parts)))
    return np.concatenate(parts)


def _absent(count: int) -> IntArray:
    """Return a read-only column of `ABSENT` that takes no memory."""
    return np.broadcast_to(np.int32(ABSENT), count)


def _narrow(values: list[int]) -> IntArray:
    """Return the values in 32 bits where they fit; ids and sizes mostly do."""
    if values.count(ABSENT) == len(values):
        return _absent(len(values))
    column = np.fromiter(values, np.int64, len(values))
    is_small = column.min() >= -_INT32_LIMIT and column.max() < _INT32_LIMIT
    return column.astype(np.int32) if is_small else column


def _resolution_ns(start_ns: IntArray, duration_ns: IntArray) -> int:
    """Return what times are rounded to: microseconds in old traces, quarters of one where a double held epoch time."""
    if len(start_ns) < _MIN_EVENTS_TO_JUDGE:
        return 1
    if _are_multiples(start_ns, 1000) and _are_multiples(duration_ns, 1000):
        return 1000
    # A quarter is written as .25 or, by a shortest-digits writer, as .2 (and .75 as .8).
    if _are_multiples(start_ns, 250, 100) and np.abs(start_ns).min() >= _COARSE_DOUBLE_NS:
        return 250
    return 1


def _are_multiples(values: IntArray, *steps: int) -> bool:
    """Whether each value is a multiple of one of these steps; most often the first slice tells that it is not."""
    return all(np.logical_or.reduce([values[part] % step == 0 for step in steps]).all() for part in slices(len(values)))
