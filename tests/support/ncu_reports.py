"""A small writer of Nsight Compute report files, for tests whose values are worked out by hand.

The format is that of the `.ncu-rep` files which `ncu` writes: a magic number, then protobuf messages, each after its
length. Only what NVIDIA's reader asks for is written; numbers of fields are those of its ProfilerReport messages. Units
are empty: the reader takes them from its own tables, by the chip, which is not written.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_VERSION = 40
Value = float | int | str


@dataclass(frozen=True)
class Launch:
    """One profiled launch: names, sizes, and values by section and metric."""

    function: str
    demangled: str | None = None
    sections: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    nvtx_range: str | None = None
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (128, 1, 1)


def write_report(path: Path, launches: Iterable[Launch]) -> Path:
    """Write a report with these launches."""
    launches = list(launches)
    names = sorted({name for launch in launches for metrics in launch.sections.values() for name in metrics})
    results = [_result(launch, names) for launch in launches]
    payload = b"".join(struct.pack("<I", len(result)) + result for result in results)
    block = _number(1, 0) + _number(2, len(results)) + _bytes(4, b"".join(_text(1, name) for name in names))
    block += _number(5, len(payload)) + _bytes(6, _number(1, 4321) + _text(3, "python"))
    header = _number(1, _VERSION)
    path.write_bytes(b"NVR\0" + _sized(header) + _sized(block) + payload)
    return path


def _result(launch: Launch, names: list[str]) -> bytes:
    values = {name: value for metrics in launch.sections.values() for name, value in metrics.items()}
    texts = (f"_Z{launch.function}", launch.function, launch.demangled or launch.function)
    message = b"".join(_number(tag, 1) for tag in (1, 2, 3, 4))
    message += b"".join(_text(tag, text) for tag, text in zip((5, 6, 7), texts, strict=True)) + _number(8, 3)
    message += b"".join(
        _bytes(tag, _triple(size)) for tag, size in ((9, (0, 0, 0)), (10, launch.grid), (11, launch.block))
    )
    message += b"".join(
        _bytes(13, _number(1, names.index(name)) + _bytes(2, _value(value))) for name, value in values.items()
    )
    message += _bytes(15, b"")
    for order, (section, metrics) in enumerate(launch.sections.items()):
        own = _text(1, section) + _text(2, section) + _number(3, order)
        shown = b"".join(_bytes(2, _text(1, name)) for name in metrics)
        message += _bytes(17, own + _bytes(4, _number(1, 1) + shown))
    return message + (b"" if launch.nvtx_range is None else _bytes(21, _nvtx(launch.nvtx_range)))


def _nvtx(name: str) -> bytes:
    """One push/pop range of the default domain, on one thread."""
    domain = _number(1, 0) + _text(2, "<default domain>")
    stack = _number(1, 0) + _bytes(3, _text(1, name))
    return _bytes(1, domain) + _bytes(2, _number(1, 1) + _bytes(2, stack)) + _number(4, 0)


def _value(value: Value) -> bytes:
    if isinstance(value, str):
        return _text(1, value)
    return _number(5, value) if isinstance(value, int) else b"\x19" + struct.pack("<d", value)


def _triple(size: tuple[int, int, int]) -> bytes:
    return b"".join(_number(tag, part) for tag, part in enumerate(size, start=1))


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(found) + bytes([value])


def _number(tag: int, value: int) -> bytes:
    return _varint(tag << 3) + _varint(value)


def _bytes(tag: int, value: bytes) -> bytes:
    return _varint(tag << 3 | 2) + _varint(len(value)) + value


def _text(tag: int, value: str) -> bytes:
    return _bytes(tag, value.encode())


def _sized(message: bytes) -> bytes:
    return struct.pack("<I", len(message)) + message
