"""Collects decoded events, chunk by chunk, into the columns of a `Trace`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from perfladder.trace.events import NO_ARGUMENTS, Arguments, Event, ExactEvent, RawEvent, decode_arguments
from perfladder.trace.model import ABSENT, Category, IntArray

_DAY_US: Final = 86_400e6
_DAY_NS: Final = 86_400_000_000_000
_INT64_LIMIT: Final = 2**63
# From here on doubles of microseconds are a quarter of one apart: 1.1e15 us, the year 2005 as epoch time.
_COARSE_DOUBLE_NS: Final = 2**50 * 1000
_MIN_EVENTS_TO_JUDGE: Final = 8
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
_COLUMNS: Final = {
    "name_id": np.int32,
    "category": np.int8,
    "start_ns": np.int64,
    "duration_ns": np.int64,
    "pid": np.int32,
    "tid": np.int32,
    "correlation": np.int64,
    "external_id": np.int64,
    "stream": np.int64,
    "device": np.int64,
    "sequence": np.int64,
    "forward_thread": np.int64,
    "num_bytes": np.int64,
}
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
    _open_spans: list[AnyEvent] = field(default_factory=list)

    def add(self, events: Sequence[AnyEvent], text: bytes | None = None) -> None:
        """Append the spans among `events`.

        Args:
            events: Events of one kind, in file order.
            text: Their JSON, used to skip columns that no event of the chunk has; None if unknown.

        Raises:
            NeedsExactTimes: Events with double times lie beyond what a double holds to the nanosecond.
        """
        spans = [event for event in events if event.ph == "X" and event.cat != "Trace"]
        if spans:
            self._append(spans, text)
        self.num_objects += len(events)
        if len(spans) != len(events):
            for event in events:
                if event.ph in ("B", "E"):
                    self._open_spans.append(event)
                elif event.ph == "X" and event.cat == "Trace":
                    self._see_root(event)

    def finish(self) -> tuple[dict[str, IntArray], int]:
        """Return the columns without unfinished spans, and the resolution of the timestamps in nanoseconds."""
        self._close_open_spans()
        columns = {
            name: np.concatenate([chunk[name] for chunk in self._chunks]) if self._chunks else np.empty(0, dtype)
            for name, dtype in _COLUMNS.items()
        }
        self._chunks.clear()
        is_good = columns["duration_ns"] >= 0
        if is_good.any():
            middle = np.median(columns["start_ns"][is_good])
            is_good &= np.abs(columns["start_ns"] - middle) < _DAY_NS
        num_bad = int(len(is_good) - is_good.sum())
        if num_bad:
            self.num_unfinished += num_bad
            columns = {name: column[is_good] for name, column in columns.items()}
            if self.keep_raw:
                self.raw_arguments = [raw for raw, good in zip(self.raw_arguments, is_good, strict=True) if good]
        return columns, _resolution_ns(columns["start_ns"], columns["duration_ns"])

    def _append(self, spans: Sequence[AnyEvent], text: bytes | None) -> None:
        start_ns, has_start = _start_ns(spans)
        count = len(spans)
        dur = np.fromiter([span.dur for span in spans], np.float64, count)
        category = self._categories_of(spans)
        arguments = _arguments_of(spans)
        is_good = has_start & (dur >= 0) & (dur < _DAY_US)  # a comparison with NaN is false
        if text is None or b'"finished"' in text:
            is_good &= np.array([argument.finished.lower() != "false" for argument in arguments])
        columns: dict[str, IntArray] = {
            "name_id": _intern([span.name for span in spans], self.names),
            "category": category,
            "start_ns": start_ns,
            "duration_ns": np.rint(np.where(is_good, dur * 1000, -1)).astype(np.int64),
            "pid": _intern([span.pid for span in spans], self.pids),
            "tid": _intern([span.tid for span in spans], self.tids),
            **_argument_columns(arguments, category, text),
        }
        self._chunks.append(columns)
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
        stacks: dict[tuple[int | str, int | str], list[AnyEvent]] = {}
        closed: list[AnyEvent] = []
        dated = [event for event in self._open_spans if event.ts == event.ts]  # NaN is not itself
        self.num_unfinished += len(self._open_spans) - len(dated)
        for event in sorted(dated, key=lambda event: event.ts):
            stack = stacks.setdefault((event.pid, event.tid), [])
            if event.ph == "B":
                stack.append(event)
            elif stack:
                begin = stack.pop()
                begin.dur = float(event.ts - begin.ts)  # type: ignore[operator]
                closed.append(begin)
            else:
                self.num_unfinished += 1
        self.num_unfinished += sum(len(stack) for stack in stacks.values())
        self._open_spans.clear()
        for kind in (Event, ExactEvent, RawEvent):
            spans = [span for span in closed if isinstance(span, kind)]
            if spans:
                self._append(spans, None)


def _intern(values: list[_Key], table: dict[_Key, int]) -> IntArray:
    for value in dict.fromkeys(values):
        if value not in table:
            table[value] = len(table)
    return np.fromiter(map(table.__getitem__, values), np.int32, len(values))


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
    """Convert decimal text exactly; None if there is none or it is beyond 64 bits."""
    if not isinstance(microseconds, Decimal) or not microseconds.is_finite():
        return None
    nanoseconds = round(microseconds.scaleb(3)) if microseconds.adjusted() < 20 else _INT64_LIMIT
    return nanoseconds if abs(nanoseconds) < _INT64_LIMIT else None


def _arguments_of(spans: Sequence[AnyEvent]) -> list[Arguments]:
    return [_decode(span.args) if isinstance(span, RawEvent) else span.args for span in spans]


def _decode(raw: msgspec.Raw) -> Arguments:
    text = bytes(raw)
    return decode_arguments(text) if text and text != b"null" else NO_ARGUMENTS


def _argument_columns(arguments: list[Arguments], category: IntArray, text: bytes | None) -> dict[str, IntArray]:
    """Return the columns from the arguments; a column that the chunk's text does not mention costs nothing."""
    count = len(arguments)

    def is_mentioned(key: bytes) -> bool:
        return text is None or key in text

    def absent() -> IntArray:
        return np.full(count, ABSENT, np.int64)

    external = [argument.external_id for argument in arguments] if is_mentioned(b'"External id"') else None
    if external is None and is_mentioned(b'"external id"'):
        external = [argument.external_id_old for argument in arguments]
    columns = {
        "external_id": absent() if external is None else np.fromiter(external, np.int64, count),
        "sequence": absent(),
        "forward_thread": absent(),
    }
    if is_mentioned(b'"Sequence number"'):
        columns["sequence"] = np.fromiter([argument.sequence for argument in arguments], np.int64, count)
    if is_mentioned(b'"Fwd thread id"'):
        columns["forward_thread"] = np.fromiter([argument.forward_thread for argument in arguments], np.int64, count)
    rest = np.flatnonzero(~np.isin(category, _HOST_ONLY))
    chosen = [arguments[index] for index in rest.tolist()]
    for name in ("correlation", "stream", "device", "num_bytes"):
        columns[name] = absent()
        columns[name][rest] = [getattr(argument, name) for argument in chosen]
    return columns


def _resolution_ns(start_ns: IntArray, duration_ns: IntArray) -> int:
    """Return what times are rounded to: microseconds in old traces, quarters of one where a double held epoch time."""
    if len(start_ns) < _MIN_EVENTS_TO_JUDGE:
        return 1
    if not (start_ns % 1000).any() and not (duration_ns % 1000).any():
        return 1000
    if np.abs(start_ns).min() >= _COARSE_DOUBLE_NS and not (start_ns % 250).any():
        return 250
    return 1
