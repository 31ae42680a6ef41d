"""The errors that perfladder raises on purpose, each with the exit code that the command line ends with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar


class PerfladderError(Exception):
    """Base of all errors raised on purpose; the message says what happened, what was expected and what to do."""

    exit_code: ClassVar[int] = 5


class InputError(PerfladderError):
    """The user's input is wrong: a workload field, a path, a stage name, an option."""

    exit_code: ClassVar[int] = 2


class WorkloadError(PerfladderError):
    """The user's workload failed: its factory or its call raised, crashed, hung or ran out of memory."""

    exit_code: ClassVar[int] = 3


class WorkloadTimeoutError(WorkloadError):
    """The workload did not finish within its time limit and was killed with everything it had started."""


class WorkloadCrashError(WorkloadError):
    """The process that held the workload died: a segmentation fault, a kill for memory, an exit."""


class NotPossibleHereError(PerfladderError):
    """This machine cannot do what was asked: a device, a library or a permission is missing."""

    exit_code: ClassVar[int] = 4


class RungError(PerfladderError):
    """One rung could not answer its question, while what was measured before it stays valid."""

    exit_code: ClassVar[int] = 5


class TraceError(PerfladderError):
    """A trace file cannot be read at all: no file, no JSON, no events."""

    exit_code: ClassVar[int] = 2


class CaptureError(PerfladderError):
    """A capture cannot be made or is refused: damaged, oversized, unsafe, or it holds what cannot be stored."""

    exit_code: ClassVar[int] = 2


class TuningError(PerfladderError):
    """A module cannot be tuned, or a call of a tuned one cannot be served as was asked.

    `candidates` has what is known of the backends that were tried.
    """

    exit_code: ClassVar[int] = 5

    def __init__(self, message: str, candidates: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.candidates = list(candidates)


class UnseenGraphWarning(UserWarning):
    """A tuned module was called in a form that it was not tuned for, and ran as it is."""


class ArchiveError(PerfladderError):
    """An archive of tuned modules is refused: damaged, oversized, unsafe, foreign, or from a newer perfladder."""

    exit_code: ClassVar[int] = 2
