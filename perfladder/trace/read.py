"""Reads a trace file into a `Trace`, chunk by chunk: a large, cut or damaged file takes no more memory than columns.

Each chunk of the event array is decoded at once by msgspec. Only where that fails is the chunk halved until the damaged
events stand alone; those are read leniently or field by field, counted, and reported as a warning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from perfladder.errors import TraceError
from perfladder.trace.columns import CATEGORIES, AnyEvent, ColumnBuilder, NeedsExactTimes
from perfladder.trace.events import (
    BOUNDARY,
    DamageCount,
    decode_events,
    decode_exact_events,
    decode_raw_events,
    salvage_event,
)
from perfladder.trace.model import DEVICE_WORK, Category, DistributedInfo, IntArray, Trace
from perfladder.trace.overhead import place_overheads
from perfladder.trace.stream import TextStream
from perfladder.trace.warnings import TraceWarning, WarningCode

_SOURCE: Final = "trace.read"
_CHUNK_BYTES: Final = 1 << 20  # larger ones no longer fit the processor's caches and read slower
_MAX_HEADER_BYTES: Final = 64 << 20
_MAX_EVENT_BYTES: Final = 32 << 20
_MAX_TAIL_BYTES: Final = 16 << 20
_WINDOW_BYTES: Final = 1 << 17  # of a damaged chunk, read at once
_SCAN_BYTES: Final = 1 << 13  # around a damage, read event by event
_SEPARATOR_BYTES: Final = b" \t\r\n,"
_SEPARATORS: Final = re.compile(rb"[ \t\r\n,]*")
_SCANNER: Final = json.JSONDecoder(strict=False)
# Kineto's rows that are no spans, or are handled apart.
_IGNORED: Final = frozenset({"trace", "ac2g", "fwdbwd", "cpu_instant_event", "async_cpu_to_gpu"})
_ARRAY_START: Final = re.compile(rb'"traceEvents"\s*:\s*\[')
_MORE_EVENTS: Final = re.compile(rb'"ph"\s*:\s*"[XBEMis]"')
_ARRAY_END: Final = re.compile(rb"\}\s*,?\s*\](?=\s*(?:$|\}|,\s*\"))")
_ERROR_POSITION: Final = re.compile(r"\(byte (\d+)\)")
_GRAPH_LAUNCH: Final = re.compile(r"cu(da)?GraphLaunch")
# Of CUDA 13.1 update 1, whose release notes name the fix: https://github.com/pytorch/kineto/issues/1165. From 13.0 on
# the number is made of major, minor and update; before that it was smaller.
_CUPTI_WITH_GRAPH_TIMES: Final = 130101
_EXPECTED: Final = (
    "Expected the JSON that torch.profiler's export_chrome_trace or Kineto writes (.json or .json.gz): an object with "
    "'traceEvents', or a list of events."
)


def read_trace(path: str | Path, *, with_arguments: bool = False) -> Trace:
    """Read a torch.profiler or Kineto trace, plain or gzip, in bounded memory.

    Args:
        path: The file; compression is recognised by content.
        with_arguments: Keep all arguments of each event (input shapes, grid, block). Costs memory for each event.

    Returns:
        The trace. What was cut, damaged, dropped or missing is in its `warnings`.

    Raises:
        TraceError: The file cannot be read, is no trace, or holds no timed event.
    """
    path = Path(path)
    reader = _Reader(path, ColumnBuilder(keep_raw=with_arguments))
    with TextStream(path) as stream:
        reader.read(stream)
    return reader.finish()


@dataclass
class _Reader:
    path: Path
    builder: ColumnBuilder
    damage: DamageCount = field(default_factory=DamageCount)
    is_truncated: bool = False
    is_ended: bool = False
    is_exact: bool = False
    has_bad_header: bool = False
    header: dict[str, Any] = field(default_factory=dict)
    tail: bytes = b""

    def read(self, stream: TextStream) -> None:
        rest = self._read_header(stream)
        while not self.is_ended:
            block = self._read_block(stream)
            rest += block
            if not block:
                self._read_last(rest)
                break
            rest = self._read_chunk(rest)
        if self.is_ended:
            while len(self.tail) < _MAX_TAIL_BYTES and (block := self._read_block(stream)):
                self.tail += block
            self.header |= self._read_members(b"{" + self.tail.lstrip(b" \t\r\n,"))

    def _read_block(self, stream: TextStream) -> bytes:
        block = stream.read(_CHUNK_BYTES)
        self.is_truncated |= stream.is_damaged
        return block

    def _read_header(self, stream: TextStream) -> bytes:
        """Find the event array, keep what stands before it, and return what was read of the array."""
        text = b""
        while len(text) < _MAX_HEADER_BYTES:
            block = self._read_block(stream)
            text += block
            start = text[:256].removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
            if start == b"[":
                return text[text.index(b"[") + 1 :]
            if start not in (b"{", b""):
                break
            if match := _ARRAY_START.search(text):
                self.header = self._read_members(text[: match.start()].rstrip().rstrip(b",") + b"}")
                return text[match.end() :]
            if not block:
                break
        raise TraceError(f"{self.path} is no trace: {_why_no_trace(text)} {_EXPECTED}")

    def _read_members(self, text: bytes) -> dict[str, Any]:
        text = text.removeprefix(b"\xef\xbb\xbf")
        if not text.strip(b"{} \t\r\n"):
            return {}
        try:
            members = json.loads(text.decode("utf-8", "replace"), strict=False)
        except (ValueError, RecursionError):
            self.has_bad_header = True
            return _salvage_members(text)
        return members if isinstance(members, dict) else {}

    def _read_chunk(self, text: bytes) -> bytes:
        """Read all whole events of `text` and return what is left of it."""
        for cut in _last_boundaries(text):
            inside = text[: cut.start() + 1]
            position = self._read_events(inside)
            if position is None:
                return text[cut.end() :]
            if position < len(inside):  # damage inside; at the very end it was the cut that split a nested object
                return self._after(text, cut, self._read_damaged(inside))
        if len(text) > _MAX_EVENT_BYTES:
            self.damage.skipped += 1
            return b""
        return text

    def _after(self, text: bytes, cut: re.Match[bytes], left: bytes) -> bytes:
        """Return what follows the text before `cut`, of which `left` was not read; past the array's end, nothing."""
        rest = text[cut.start() + 1 - len(left) :] if left else text[cut.end() :]
        if self.is_ended:
            self.tail += text[cut.start() + 1 :]
            return b""
        return rest

    def _read_damaged(self, text: bytes) -> bytes:
        """Read events of which some are damaged; return the end of `text` that holds no whole event."""
        while len(text) > _SCAN_BYTES:
            end = BOUNDARY.search(text, _WINDOW_BYTES)
            window = text[: end.start() + 1] if end else text
            rest = self._read_window(window)
            if self.is_ended:
                self.tail += text[len(window) :]
                return b""
            if len(rest) == len(window):
                break
            text = text[len(window) - len(rest) :] if rest or end is None else text[end.end() :]
        return self._scan(text) if text else b""

    def _read_window(self, window: bytes) -> bytes:
        """Read a damaged part: what is before the damage at once, and the rest of its neighbourhood event by event."""
        position = self._read_events(window)
        if position is None:
            return b""
        before = _last_boundary_before(window, position)
        if before is None or self._read_events(window[: before.start() + 1]) is not None:
            return self._scan(window)
        damaged = BOUNDARY.search(window, position)
        after = BOUNDARY.search(window, damaged.end()) if damaged else None  # a damaged event is told by the next one
        if after is None:
            return self._scan(window[before.end() :])
        rest = self._scan(window[before.end() : after.start() + 1])
        if self.is_ended:
            self.tail += window[after.start() + 1 :]
            return b""
        return window[after.start() + 1 - len(rest) :] if rest else window[after.end() :]

    def _scan(self, text: bytes) -> bytes:
        """Tell whole events from damaged ones, one by one; return the end of `text` that holds no whole event."""
        letters = text.decode("latin-1")  # one letter a byte, so that positions agree
        start = position = 0
        while True:
            end_of_whole, position = position, _next_token(text, position)
            if position >= len(text) or text[position : position + 1] == b"]":
                self._read_whole(text[start:end_of_whole])
                if position < len(text):
                    self.is_ended = True
                    self.tail = text[position + 1 :]
                return b""
            try:
                position = _SCANNER.raw_decode(letters, position)[1]
            except (json.JSONDecodeError, RecursionError) as error:
                self._read_whole(text[start:end_of_whole])
                damaged_at = error.pos - 1 if isinstance(error, json.JSONDecodeError) else position
                boundary = BOUNDARY.search(text, max(damaged_at, position))
                if boundary is None:
                    return text[position:]
                self._salvage(text[position : boundary.start() + 1])
                start = position = boundary.start() + 1

    def _read_whole(self, text: bytes) -> None:
        """Read events that are whole JSON, though perhaps of unexpected types, or with commas missing between them."""
        text = text.strip(_SEPARATOR_BYTES)
        if not text or self._read_events(text) is None:
            return
        letters, position = text.decode("latin-1"), 0
        while position < len(text):
            start = _next_token(text, position)
            position = _SCANNER.raw_decode(letters, start)[1]
            if self._read_events(text[start:position]) is not None:
                self._salvage(text[start:position])

    def _salvage(self, text: bytes) -> None:
        if event := salvage_event(text, self.damage):
            self.builder.add([event])

    def _read_last(self, text: bytes) -> None:
        """Read the end of the array, or of the file."""
        rest = self._read_chunk(text)
        rest = b"" if self.is_ended else self._scan(rest)
        if self.is_ended:
            return
        end = None
        for end in _ARRAY_END.finditer(rest):  # noqa: B007 - the last match is wanted
            pass
        if end is None:
            self.is_truncated = True
            return
        self.is_ended = True
        self.tail = rest[end.end() :]
        self._salvage(rest[: end.start() + 1])

    def _read_events(self, text: bytes) -> int | None:
        """Decode events and add them; on failure add none and return the position of the error."""
        wrapped = b"[" + text + b"]"
        try:
            try:
                self.builder.add(self._decode(wrapped))
            except NeedsExactTimes:
                self.is_exact = True
                self.builder.add(self._decode(wrapped))
        except msgspec.ValidationError:
            return 0
        except msgspec.DecodeError as error:
            match = _ERROR_POSITION.search(str(error))
            return int(match[1]) if match else len(text)  # without a position: the text ends in the middle
        except (UnicodeDecodeError, OverflowError, RecursionError):
            return 0
        return None

    def _decode(self, wrapped: bytes) -> Sequence[AnyEvent]:
        if self.builder.keep_raw:
            return decode_raw_events(wrapped)
        return decode_exact_events(wrapped) if self.is_exact else decode_events(wrapped)

    def finish(self) -> Trace:
        builder = self.builder
        columns, resolution_ns = builder.finish()
        if not len(columns["start_ns"]):
            seen = (
                f"{builder.num_objects} event objects, {self.damage.skipped + self.damage.repaired} of them damaged, "
            )
            raise TraceError(
                f"{self.path} holds no timed event ({seen}{builder.num_unfinished} unfinished). Record the window "
                "again and check that the profiler covered the work."
            )
        trace = Trace(
            names=tuple(builder.names),
            pids=tuple(builder.pids),
            tids=tuple(builder.tids),
            resolution_ns=resolution_ns,
            warnings=tuple(self._warnings(columns, resolution_ns)),
            distributed=_distributed(self.header),
            device_types=_device_types(builder, columns, self.header),
            device_names=_device_names(self.header),
            window_ns=builder.window_ns,
            source=str(self.path),
            raw_arguments=tuple(builder.raw_arguments) if builder.keep_raw else None,
            **columns,
        )
        return place_overheads(trace)

    def _warnings(self, columns: dict[str, IntArray], resolution_ns: int) -> list[TraceWarning]:
        builder = self.builder
        unknown = [text for text in builder.categories if text and not _is_known(text)]
        missing = sum(
            int((columns[column] == table[key]).sum())
            for column, table, key in (
                ("name_id", builder.names, ""),
                ("pid", builder.pids, ""),
                ("tid", builder.tids, ""),
            )
            if key in table
        )
        host = np.isin(columns["category"], (Category.CPU_OP, Category.USER_ANNOTATION))
        num_processes = len(set(np.unique(columns["pid"][host]).tolist()) - {builder.pids.get("")})
        found = {
            WarningCode.TRUNCATED_FILE: self.is_truncated and "The file ends in the middle of its events.",
            WarningCode.EVENTS_AFTER_END: _MORE_EVENTS.search(self.tail)
            and "The list of events ends, but more events follow; they were not read.",
            WarningCode.REPAIRED_EVENTS: self.damage.repaired and f"{self.damage.repaired} events were repaired.",
            WarningCode.SKIPPED_EVENTS: self.damage.skipped and f"{self.damage.skipped} events could not be read.",
            WarningCode.UNREADABLE_HEADER: self.has_bad_header and "The fields beside the events are invalid JSON.",
            WarningCode.UNFINISHED_EVENTS: builder.num_unfinished
            and f"{builder.num_unfinished} unfinished events were dropped.",
            WarningCode.MISSING_FIELDS: missing and f"{missing} names, processes or threads are missing.",
            WarningCode.UNKNOWN_CATEGORY: unknown and f"Unknown categories: {', '.join(sorted(unknown)[:10])}.",
            WarningCode.COARSE_TIMESTAMPS: resolution_ns > 1 and f"Timestamps are rounded to {resolution_ns} ns.",
            WarningCode.UNTRUSTED_GRAPH_TIMES: _untrusted_graphs(builder, columns, self.header),
            WarningCode.SEVERAL_PROCESSES: num_processes > 1 and f"{num_processes} processes have host events.",
        }
        return [
            TraceWarning(code=code, message=message, source=_SOURCE)
            for code, message in found.items()
            if isinstance(message, str)
        ]


def _next_token(text: bytes, position: int) -> int:
    match = _SEPARATORS.match(text, position)
    return match.end() if match else position


def _last_boundary_before(text: bytes, position: int) -> re.Match[bytes] | None:
    found = None
    for found in BOUNDARY.finditer(text, max(0, position - _SCAN_BYTES), position):  # noqa: B007 - the last is wanted
        pass
    return found


def _last_boundaries(text: bytes, limit: int = 16) -> list[re.Match[bytes]]:
    """Return the last places of `text` where one event ends and the next begins, the last one first."""
    size = 1 << 16
    while True:
        matches = list(BOUNDARY.finditer(text, max(0, len(text) - size)))
        if len(matches) > 1 or size >= len(text):
            return matches[: -limit - 1 : -1]
        size *= 8


def _why_no_trace(text: bytes) -> str:
    if not text.strip():
        return "it is empty."
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return "it is neither JSON with an event list nor the beginning of one."
    if isinstance(content, dict):
        keys = ", ".join(map(repr, list(content)[:8])) or "nothing"
        return f"it is JSON, but holds no 'traceEvents' list (it holds {keys})."
    return "it is JSON, but neither an object nor a list."


def _salvage_members(text: bytes) -> dict[str, Any]:
    """Read the rank out of an invalid header; the rest of it is not worth guessing."""
    found = re.search(rb'"distributedInfo"\s*:\s*\{(.*)', text, re.DOTALL)
    if not found:
        return {}
    numbers = {key: re.search(b'"' + key.encode() + rb'"\s*:\s*(\d+)', found[1]) for key in ("rank", "world_size")}
    return {"distributedInfo": {key: int(match[1]) for key, match in numbers.items() if match}}


def _distributed(header: dict[str, Any]) -> DistributedInfo | None:
    info = header.get("distributedInfo")
    if not isinstance(info, dict) or not isinstance(info.get("rank"), int) or info["rank"] < 0:
        return None
    world_size, backend = info.get("world_size"), info.get("backend")
    return DistributedInfo(
        rank=info["rank"],
        world_size=world_size if isinstance(world_size, int) and world_size > 0 else None,
        backend=backend if isinstance(backend, str) else None,
    )


def _device_names(header: dict[str, Any]) -> tuple[str, ...]:
    properties = header.get("deviceProperties")
    if not isinstance(properties, list):
        return ()
    return tuple(str(entry.get("name", "")) for entry in properties if isinstance(entry, dict))


def _untrusted_graphs(builder: ColumnBuilder, columns: dict[str, IntArray], header: dict[str, Any]) -> str | None:
    """Return what to say about kernels of CUDA graphs, if there are any and the file's CUPTI is an old one."""
    is_launch = np.array([_GRAPH_LAUNCH.match(name) is not None for name in builder.names], bool)
    num_launches = int(is_launch[columns["name_id"]].sum()) if is_launch.any() else 0
    version = header.get("cupti_version")
    if not num_launches or (isinstance(version, int) and version >= _CUPTI_WITH_GRAPH_TIMES):
        return None
    known = f"CUPTI {version}" if isinstance(version, int) else "a CUPTI whose version the file does not say"
    return f"{num_launches} CUDA graph launches, recorded by {known}."


def _device_types(builder: ColumnBuilder, columns: dict[str, IntArray], header: dict[str, Any]) -> tuple[str, ...]:
    """Return torch's names of the device types; ROCm counts as CUDA there, as in torch."""
    has_device = bool(np.isin(columns["category"], DEVICE_WORK).any())
    if not has_device:
        return ("CPU",)
    text = " ".join(builder.categories).lower()
    for word, device_type in (("xpu", "XPU"), ("mtia", "MTIA"), ("hpu", "HPU"), ("privateuse1", "PrivateUse1")):
        if word in text:
            return ("CPU", device_type)
    return ("CPU", "CUDA")


def _is_known(text: str) -> bool:
    lowered = text.lower()
    return lowered in CATEGORIES or lowered.endswith(("_runtime", "_driver", "_sync")) or lowered in _IGNORED
