"""From JSON text to typed events: the fast typed decode, and the slow field-by-field reading of damaged events."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import msgspec

_INT64_MAX: Final = 2**63 - 1
DEFAULT_FINISHED: Final = "true"
"""What an event that does not say so is: torch marks only those that were still open."""


class Arguments(msgspec.Struct, gc=False, frozen=True):
    """The arguments that become columns; the decoder skips all others. Field names follow Kineto's JSON."""

    external_id: int = msgspec.field(name="External id", default=-1)
    external_id_old: int = msgspec.field(name="external id", default=-1)
    correlation: int = -1
    stream: int = -1
    device: int = -1
    sequence: int = msgspec.field(name="Sequence number", default=-1)
    forward_thread: int = msgspec.field(name="Fwd thread id", default=-1)
    num_bytes: int = msgspec.field(name="bytes", default=-1)
    finished: str = DEFAULT_FINISHED


NO_ARGUMENTS: Final = Arguments()


class Event(msgspec.Struct, gc=False):
    """One event with times as doubles: exact to the nanosecond below 2**43 us, as torch writes them today."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = ""
    tid: int | str = ""
    ts: float = math.nan
    dur: float = math.nan
    args: Arguments = NO_ARGUMENTS


class ExactEvent(msgspec.Struct, gc=False):
    """One event with its start as decimal text, for absolute timestamps that a double would round."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = ""
    tid: int | str = ""
    ts: Decimal = Decimal("NaN")
    dur: float = math.nan
    args: Arguments = NO_ARGUMENTS


class RawEvent(msgspec.Struct, gc=False):
    """One event that also keeps all its arguments as raw JSON."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = ""
    tid: int | str = ""
    ts: Decimal = Decimal("NaN")
    dur: float = math.nan
    args: msgspec.Raw = msgspec.Raw(b"")


decode_events: Final = msgspec.json.Decoder(list[Event], strict=True).decode
decode_exact_events: Final = msgspec.json.Decoder(list[ExactEvent], strict=True).decode
decode_raw_events: Final = msgspec.json.Decoder(list[RawEvent], strict=True).decode
decode_arguments: Final = msgspec.json.Decoder(Arguments, strict=True).decode

# Where one event of an array ends and the next begins. Damaged text is cut here: a quote or backslash inside a name
# cannot hide it. It also matches between objects nested in arguments, so whoever cuts checks that what is before is
# whole.
EVENT_KEYS: Final = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args", "id", "bp", "s")
_ANY_KEY: Final = "|".join(EVENT_KEYS).encode()
BOUNDARY: Final = re.compile(rb'\}\s*,?\s*(?=\{\s*"?(?:' + _ANY_KEY + rb')"?\s*:)')
_STRING: Final = rb'\s*:\s*"(.*?)"\s*(?=\}|,\s*"?(?:' + _ANY_KEY + rb')"?\s*:)'
_NUMBER: Final = rb'\s*:\s*"?(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)"?\s*(?=[,}\]])'


def _after_key(key: str, value: bytes) -> re.Pattern[bytes]:
    """Match a value after its key, which may have lost its quotes."""
    name = re.escape(key).encode()
    return re.compile(b'(?:"' + name + rb'"|(?<=[{,\s])' + name + b")" + value, re.DOTALL)


_TEXT_FIELDS: Final = {key: _after_key(key, _STRING) for key in ("ph", "cat", "name", "pid", "tid")}
_NUMBER_FIELDS: Final = {key: _after_key(key, _NUMBER) for key in ("ts", "dur", "pid", "tid")}
_ARGUMENT_FIELDS: Final = {
    field.name: _after_key(field.encode_name, _NUMBER)
    for field in msgspec.structs.fields(Arguments)
    if field.name != "finished"
}


@dataclass
class DamageCount:
    """How many events were repaired, and how many were lost."""

    repaired: int = 0
    skipped: int = 0


def salvage_event(text: bytes, damage: DamageCount) -> ExactEvent | None:
    """Read one damaged event: leniently as JSON, else field by field. Counts what happened in `damage`."""
    event = _lenient_event(text)
    if event is None:
        event = _event_by_fields(text)
    if event is None:
        damage.skipped += 1
    else:
        damage.repaired += 1
        damage.skipped += max(text.count(b'"ph"') - 1, 0)  # where the border to the next event is damaged too
    return event


def _lenient_event(text: bytes) -> ExactEvent | None:
    try:
        fields = json.loads(text.decode("utf-8", "replace"), parse_float=Decimal, strict=False)
    except (ValueError, RecursionError, InvalidOperation):
        return None
    if not isinstance(fields, dict) or not isinstance(fields.get("ph"), str):
        return None
    arguments = fields.get("args")
    return _build_event(fields, arguments if isinstance(arguments, dict) else {})


def _event_by_fields(text: bytes) -> ExactEvent | None:
    text = text.strip()
    if not text.endswith(b"}") or b"\x00" in text:
        return None  # a cut event may hold a cut number
    fields: dict[str, Any] = {}
    for key, pattern in (*_TEXT_FIELDS.items(), *_NUMBER_FIELDS.items()):
        match = pattern.search(text)
        if match:
            fields[key] = match[1].decode("utf-8", "replace")
    if "ph" not in fields or "ts" not in fields:
        return None
    arguments = {
        msgspec_field.encode_name: match[1].decode()
        for msgspec_field in msgspec.structs.fields(Arguments)
        if msgspec_field.name in _ARGUMENT_FIELDS
        and (match := _ARGUMENT_FIELDS[msgspec_field.name].search(text)) is not None
    }
    return _build_event(fields, arguments)


def _build_event(fields: dict[str, Any], arguments: dict[str, Any]) -> ExactEvent:
    columns = {
        field.name: _integer(arguments.get(field.encode_name))
        for field in msgspec.structs.fields(Arguments)
        if field.name != "finished"
    }
    return ExactEvent(
        ph=fields["ph"],
        cat=_text(fields.get("cat")),
        name=_text(fields.get("name")),
        pid=_identifier(fields.get("pid")),
        tid=_identifier(fields.get("tid")),
        ts=_decimal(fields.get("ts")),
        dur=float(_decimal(fields.get("dur"))),
        args=Arguments(**columns, finished=str(arguments.get("finished", "true")).lower()),
    )


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _identifier(value: object) -> int | str:
    if isinstance(value, bool) or value is None:
        return ""
    if isinstance(value, int):
        return value
    text = str(value)
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else text


def _decimal(value: object) -> Decimal:
    if value is None or isinstance(value, bool):
        return Decimal("NaN")
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        return Decimal("NaN")
    return number if number.is_finite() else Decimal("NaN")


def _integer(value: object) -> int:
    number = _decimal(value)
    if number.is_nan() or abs(number) > _INT64_MAX:
        return -1
    return int(number)
