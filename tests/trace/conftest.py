"""A small writer of traces in Kineto's shapes, for tests whose totals are worked out by hand.

All times are microseconds. Host rows carry the process and thread; device rows carry the device's index and the stream
in those places, as Kineto writes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perfladder.trace.labels import encode_label
from perfladder.trace.model import Trace


class Scene:
    """Collects events; `trace()` writes and reads them."""

    def __init__(self, folder: Path, *, pid: int = 100, tid: int = 1) -> None:
        self.folder = folder
        self.pid = pid
        self.tid = tid
        self.events: list[dict[str, Any]] = []
        self.header: dict[str, Any] = {}

    def add(self, cat: str | None, name: str | None, start: float, duration: float, **fields: Any) -> Scene:
        """Add one complete event; `args` and any field can be given."""
        event: dict[str, Any] = {"ph": "X", "cat": cat, "name": name, "pid": self.pid, "tid": self.tid}
        # One nanosecond later than said: whole microseconds everywhere would look like an old, rounded trace.
        event |= {"ts": start + 0.001, "dur": duration, "args": {}} | fields
        self.events.append({key: value for key, value in event.items() if value is not None})
        return self

    def op(self, name: str, start: float, duration: float, **fields: Any) -> Scene:
        return self.add("cpu_op", name, start, duration, **fields)

    def label(self, kind: str, name: str, start: float, duration: float, **fields: Any) -> Scene:
        return self.add("cpu_op", encode_label(kind, name), start, duration, **fields)

    def run(self, index: int, start: float, duration: float, **fields: Any) -> Scene:
        return self.label("profiled_run", str(index), start, duration, **fields)

    def call(self, name: str, start: float, duration: float, correlation: int = 0, **fields: Any) -> Scene:
        args = {"correlation": correlation} if correlation else {}
        return self.add("cuda_runtime", name, start, duration, **({"args": args} | fields))

    def kernel(self, name: str, start: float, duration: float, correlation: int = 0, **options: Any) -> Scene:
        cat, stream, device = options.get("cat", "kernel"), options.get("stream", 7), options.get("device", 0)
        args = {"device": device, "stream": stream, "correlation": correlation} | options.get("args", {})
        return self.add(cat, name, start, duration, pid=device, tid=stream, args=args)

    def copy(self, name: str, start: float, duration: float, correlation: int = 0, **options: Any) -> Scene:
        return self.kernel(name, start, duration, correlation, cat="gpu_memcpy", **options)

    def write(self, name: str = "trace.json") -> Path:
        path = self.folder / name
        path.write_text(json.dumps(self.header | {"traceEvents": self.events}))
        return path

    def trace(self) -> Trace:
        return Trace.read(self.write())


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """An empty scene."""
    return Scene(tmp_path)


@pytest.fixture
def make_scene(tmp_path: Path) -> Callable[..., Scene]:
    """Make further scenes in folders of their own."""

    def make(name: str = "other", **options: Any) -> Scene:
        folder = tmp_path / name
        folder.mkdir()
        return Scene(folder, **options)

    return make
