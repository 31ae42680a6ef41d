"""The one table of warnings about a trace: a stable code each, with what it means for the numbers."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from perfladder.trace.rows import Row


class ExplainedCode(StrEnum):
    """A table of stable codes; each member is its code and carries what it means in `explanation`."""

    explanation: str

    def __new__(cls, value: str, explanation: str) -> Self:
        """Make a member that is its code and carries its explanation."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.explanation = explanation
        return member


class WarningCode(ExplainedCode):
    """Codes of warnings about a trace."""

    TRUNCATED_FILE = (
        "TRUNCATED_FILE",
        "The file ends in the middle. What was read before the cut is used; totals are lower bounds.",
    )
    EVENTS_AFTER_END = (
        "EVENTS_AFTER_END",
        "More events follow the end of the event list: a stray bracket, or several traces in one file. They are "
        "missing from all totals.",
    )
    REPAIRED_EVENTS = (
        "REPAIRED_EVENTS",
        "Events with invalid JSON (bad escapes, stray quotes, wrong types) were read field by field. Their times are "
        "as written, their names may differ from what the program used.",
    )
    SKIPPED_EVENTS = (
        "SKIPPED_EVENTS",
        "Events could not be read even field by field and are missing from all totals.",
    )
    UNREADABLE_HEADER = (
        "UNREADABLE_HEADER",
        "What stands beside the events (ranks, device properties) is invalid JSON and was not used.",
    )
    UNFINISHED_EVENTS = (
        "UNFINISHED_EVENTS",
        "Events with a missing, negative or absurd duration or start, or a begin without its end, were dropped.",
    )
    MISSING_FIELDS = (
        "MISSING_FIELDS",
        "Spans without a name, process or thread; they are kept, but cannot be told apart by what is missing.",
    )
    UNKNOWN_CATEGORY = (
        "UNKNOWN_CATEGORY",
        "Spans of a category that is not known here; they are kept in the trace but counted neither as operators nor "
        "as device work.",
    )
    COARSE_TIMESTAMPS = (
        "COARSE_TIMESTAMPS",
        "Timestamps are rounded to more than a nanosecond; nesting allows for it, and short spans are less exact.",
    )
    OVERLAPPING_SPANS = (
        "OVERLAPPING_SPANS",
        "Spans of one thread overlap without nesting, so self times of that thread may not add up.",
    )
    SEVERAL_PROCESSES = (
        "SEVERAL_PROCESSES",
        "The file holds host events of several processes; each is attributed on its own.",
    )
    DUPLICATED_CORRELATION = (
        "DUPLICATED_CORRELATION",
        "One correlation id belongs to several launches; device events were joined to the latest launch before them.",
    )
    AMBIGUOUS_CORRELATION = (
        "AMBIGUOUS_CORRELATION",
        "Device events could belong to launches of several processes and are left unlinked.",
    )
    UNLINKED_DEVICE_EVENTS = (
        "UNLINKED_DEVICE_EVENTS",
        "Device work whose launch is not in the window. It counts in kernel and busy time and is listed as unlinked.",
    )
    UNATTRIBUTED_DEVICE_TIME = (
        "UNATTRIBUTED_DEVICE_TIME",
        "Device work that belongs to no run of the window, or to no thread that carries a region.",
    )
    AMBIGUOUS_SEQUENCE_NUMBERS = (
        "AMBIGUOUS_SEQUENCE_NUMBERS",
        "Backward operators whose sequence number occurs in several forward threads are left unattributed.",
    )
    NO_DEVICE_EVENTS = (
        "NO_DEVICE_EVENTS",
        "The host called a device runtime, but the trace holds no device work: device times are unknown, not zero.",
    )
    NO_RUNS = ("NO_RUNS", "The trace holds no span of ours around a run, so nothing is reported per run.")
    NEGATIVE_RESIDUAL = (
        "NEGATIVE_RESIDUAL",
        "Regions add up to more than their run; the residual was clamped to zero.",
    )
    EVENTS_OUTSIDE_RUNS = (
        "EVENTS_OUTSIDE_RUNS",
        "Region spans lie outside every run (for example in a warm-up) and are in no run's table.",
    )
    FIRST_RUN_SLOW = (
        "FIRST_RUN_SLOW",
        "The first run took several times as long as any other: it pays what is done once, such as loading kernels or "
        "the profiler's buffers, and whatever ran then is charged with it. Read the other runs.",
    )
    OTHER_THREADS = (
        "OTHER_THREADS",
        "Host work of other threads ran during a run. It overlaps the run's own thread and is in no fraction.",
    )
    UNTRUSTED_GRAPH_TIMES = (
        "UNTRUSTED_GRAPH_TIMES",
        "Kernels ran from CUDA graphs under a CUPTI older than that of CUDA 13.1 update 1, which mends wrong times of "
        "such kernels. Their number and order hold; compare their sum with the replay's time by events.",
    )
    DEVICE_EVENTS_OVERLAP = (
        "DEVICE_EVENTS_OVERLAP",
        "Device events of one stream overlap by more than 0.5 % of its busy time, which is their union, so that it is "
        "less than the sum of durations.",
    )


class TraceWarning(Row):
    """Something about the trace that a reader of the numbers must know.

    Attributes:
        code: One of `WarningCode`.
        message: What was seen, with counts.
        source: The part that saw it: `trace.read`, `trace.regions`, ...
    """

    code: WarningCode
    message: str
    source: str
