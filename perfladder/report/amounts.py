"""Numbers and names as every report writes them; what is not there is a dash."""

from __future__ import annotations

import re
from typing import Final

_REPEATED: Final = re.compile(r"(?<![`\w.])\b[\w.\[\],-]*\.(?:\*|\[\d[\d,.-]*\])(?:[\w.*\[\],-]*[\w*\]])?")


def ms(value: float | None) -> str:
    """Milliseconds with three digits, or one place from 10 on."""
    return "-" if value is None else f"{value:.3g}" if value < 10 else f"{value:.1f}"


def us(value: float | None) -> str:
    """Microseconds."""
    return "-" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def percent(value: float | None) -> str:
    """A fraction of 1 in percent."""
    return "-" if value is None else f"{100 * value:.1f} %"


def gib(value: int | None) -> str:
    """Bytes in GiB."""
    return "-" if value is None else f"{value / 2**30:.2f} GiB"


def short(value: str, length: int = 80) -> str:
    """The beginning of a text that is too long."""
    return value if len(value) <= length else value[: length - 3] + "..."


def first_line(value: str) -> str:
    """The first line of a text."""
    return value.split("\n", 1)[0]


def both_ends(value: str, length: int = 64) -> str:
    """Both ends of a long name: they tell it from others."""
    return value if len(value) <= length else f"{value[: length // 2 - 1]} … {value[-(length // 2 - 2) :]}"


def as_code(text: str) -> str:
    """Text with the paths of repeated modules as code: Markdown reads emphasis at an asterisk."""
    return _REPEATED.sub(lambda match: f"`{match[0]}`", text)
