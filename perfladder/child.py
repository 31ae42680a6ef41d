"""A Python process under a guard that answers through a pipe: it may crash, hang or eat memory, and leaves nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from perfladder import guard

_POLL_S: Final = 0.2
_END_S: Final = 10.0
_TAIL_BYTES: Final = 2000
_MAX_OUTPUT_BYTES: Final = 64 << 20
_KEPT_OUTPUT_BYTES: Final = 1 << 20
"""Of output that grows above the most; what is printed afterwards follows it."""


@dataclass(frozen=True)
class ChildLimits:
    """When a process is ended.

    Attributes:
        timeout_s: From its start.
        max_memory_bytes: Of its processes together; None: what the machine has.
        setting: What sets the time, for the message.
    """

    timeout_s: float
    max_memory_bytes: int | None
    setting: str


@dataclass(frozen=True)
class ChildAnswer:
    """How it ended.

    Attributes:
        answer: What it wrote into the pipe.
        peak_host_rss_bytes: Of its processes together, as far as was seen.
        error: Why there is no answer; None: there is one.
    """

    answer: bytes
    peak_host_rss_bytes: int | None
    error: str | None


def ask_child(
    arguments: Callable[[int], list[str]],
    limits: ChildLimits,
    output: IO[bytes],
    *,
    send: Callable[[subprocess.Popen[bytes]], threading.Thread] | None = None,
) -> ChildAnswer:
    """Run Python in a fresh process until it has answered and ended, or is ended with all that it started.

    Args:
        arguments: Those of the interpreter, given the descriptor to write the answer to.
        limits: When it is ended.
        output: A file that takes what it prints; the end of it is told where it ended by itself. One that prints
            without an end does not fill the disk: the middle of it is dropped.
        send: Makes a thread that writes to the process's stdin and closes it; None: there is nothing to read.
    """
    deadline = time.monotonic() + limits.timeout_s
    answer, peak, error = _run(arguments, limits, send, output.fileno(), deadline)
    if error is not None and error.startswith("its process"):
        output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL_BYTES))
        printed = output.read().decode(errors="replace").strip()
        error += f". Its last output:\n{printed}" if printed else ". It printed nothing"
    return ChildAnswer(answer, peak, error)


def _run(
    arguments: Callable[[int], list[str]],
    limits: ChildLimits,
    send: Callable[[subprocess.Popen[bytes]], threading.Thread] | None,
    log_fd: int,
    deadline: float,
) -> tuple[bytes, int | None, str | None]:
    # All that is printed goes to the end of the file, also while the middle of it is dropped.
    fcntl.fcntl(log_fd, fcntl.F_SETFL, fcntl.fcntl(log_fd, fcntl.F_GETFL) | os.O_APPEND)
    answer_read, answer_write = os.pipe()
    lifeline_read, lifeline_write = os.pipe()
    process = subprocess.Popen(
        guard.guarded([sys.executable, *arguments(answer_write)], lifeline_read),
        stdin=subprocess.DEVNULL if send is None else subprocess.PIPE,
        stdout=log_fd,
        stderr=log_fd,
        pass_fds=(answer_write, lifeline_read),
        start_new_session=True,
    )
    for fd in (answer_write, lifeline_read):
        os.close(fd)
    sender = None if send is None else send(process)
    try:
        if sender is not None:
            sender.start()
        answer, peak, why = _wait(process, answer_read, limits, deadline, log_fd)
    finally:
        os.close(lifeline_write)
        process.wait()
        if sender is not None:
            sender.join()
        os.close(answer_read)
    if why is None and not answer:
        why = f"its process ended: {_reason(process.returncode)}"
    return answer, peak, why


def _wait(
    process: subprocess.Popen[bytes], answer_fd: int, limits: ChildLimits, deadline: float, log_fd: int
) -> tuple[bytes, int | None, str | None]:
    """The answer, the largest memory seen, and why the child is to be ended."""
    peak = 0
    answer = b""
    poller = select.poll()
    poller.register(answer_fd, select.POLLIN)
    while True:
        if poller.poll(_POLL_S * 1000):
            chunk = os.read(answer_fd, 1 << 16)
            answer += chunk
            if not chunk:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)  # so that its own end is what the guard reports
                return answer, peak or None, None
        _shorten(log_fd)
        peak = max(peak, _memory_of(process.pid))
        if limits.max_memory_bytes is not None and peak > limits.max_memory_bytes:
            return b"", peak, f"it took {peak} bytes of memory; the limit is {limits.max_memory_bytes}"
        if time.monotonic() > deadline:
            return b"", peak or None, f"it did not end within {limits.timeout_s:g} s ({limits.setting})"


def _shorten(log_fd: int) -> None:
    """Drop all but the beginning of what was printed, where that is too much; the child writes on behind it."""
    if os.fstat(log_fd).st_size > _MAX_OUTPUT_BYTES:
        os.ftruncate(log_fd, _KEPT_OUTPUT_BYTES)


def _memory_of(root: int) -> int:
    """Resident memory of all processes below one."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = 0
    for pid in guard.descendants(root):
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page
        except (OSError, IndexError):
            continue
    return total


def _reason(code: int) -> str:
    if code > 128 and code - 128 in set(signal.Signals):
        return f"killed by {signal.Signals(code - 128).name}"
    return f"it exited with code {code}"
