"""What ncu tells when it writes no report: the one table of its messages, and the kernels that it has seen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

from perfladder.nsight.preflight import Obstacle

_TAIL_LINES: Final = 12
_TAIL_BYTES: Final = 1 << 16
_NOTE: Final = re.compile(r"^==(ERROR|WARNING|PROF)== ?(.*)$")
_LISTED: Final = re.compile(r"^\s*\d+\.\s+(\S.*)$")
_LIST_BEGINS: Final = "Available Kernels:"
_NOTHING: Final = "No kernels were profiled"
_FAILED: Final = re.compile(r"application returned an error code|before first instrumented")


class Message(NamedTuple):
    """A message of ncu that says what stands in the way; searched in its errors and warnings, the first one counts."""

    obstacle: Obstacle
    pattern: re.Pattern[str]


# In this order: after any of these ncu adds that nothing was profiled, and that the application failed.
MESSAGES: Final = (
    Message("no_permission", re.compile(r"ERR_NVGPUCTRPERM|insufficient privileges", re.IGNORECASE)),
    Message("counters_in_use", re.compile(r"driver resource was unavailable|already under profiling", re.IGNORECASE)),
    Message("unsupported_gpu", re.compile(r"profiling is not supported on|unsupported (gpu|device)", re.IGNORECASE)),
    Message(
        "no_profiling_library",
        re.compile(r"failed to initialize the profiler|LibraryNotLoaded|driver is not compatible", re.IGNORECASE),
    ),
    Message("lock_file", re.compile(r"lock file", re.IGNORECASE)),
)


class Told(NamedTuple):
    """What ncu told.

    Attributes:
        obstacle: What stands in the way, by its messages.
        errors: Its errors, as it words them.
        matched_nothing: No kernel fitted the filters.
        seen: Names of the kernels that it has seen, if it lists them.
        has_application_failed: The program that was profiled ended with an error, by itself.
    """

    obstacle: Obstacle | None
    errors: list[str]
    matched_nothing: bool
    seen: list[str]
    has_application_failed: bool


def read_output(log: Path, printed: Path, *, has_report: bool) -> Told:
    """Read ncu's own log; and what was printed, where there is no log, or a report is missing that it does not explain.

    What was printed is the program's too, which may print anything: it counts only where nothing else is known.
    """
    own, other = _told(_lines(log)), _told(_lines(printed))
    if has_report or own.obstacle is not None or own.has_application_failed:
        return own
    if own.matched_nothing:
        return own if own.seen else own._replace(seen=other.seen)
    return other._replace(errors=own.errors or other.errors)


def _told(lines: list[str]) -> Told:
    notes = [(match[1], match[2].strip()) for line in lines if (match := _NOTE.match(line))]
    errors = list(dict.fromkeys(text for kind, text in notes if kind == "ERROR"))
    complaints = [text for kind, text in notes if kind in ("ERROR", "WARNING")]
    obstacle = next((m.obstacle for m in MESSAGES if any(m.pattern.search(text) for text in complaints)), None)
    return Told(
        obstacle=obstacle,
        errors=errors,
        matched_nothing=any(_NOTHING in text for text in complaints),
        seen=_seen(lines),
        has_application_failed=any(_FAILED.search(text) for text in complaints),
    )


def tail(path: Path) -> str:
    """The last lines of what was printed, for a message."""
    lines = [line for line in _lines(path) if line.strip()]
    return " | ".join(line.strip()[:300] for line in lines[-_TAIL_LINES:]) or "nothing was printed"


def _lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - (_TAIL_BYTES << 4)))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def _seen(lines: list[str]) -> list[str]:
    """The numbered list after its title; lines of the program may stand between."""
    begins = next((index for index, line in enumerate(lines) if line.strip() == _LIST_BEGINS), None)
    if begins is None:
        return []
    return list(dict.fromkeys(match[1].strip() for line in lines[begins + 1 :] if (match := _LISTED.match(line))))
