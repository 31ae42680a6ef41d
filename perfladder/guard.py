"""Run one command so that nothing it started outlives it, or outlives the process that asked for it.

Started as a script by its path, with the standard library only (about 20 ms), as

    python -I -S guard.py LIFELINE_FD COMMAND...

It is a child subreaper: whatever the command starts, also in sessions of its own (torchrun ranks), stays below the
guard in the process tree. The guard ends everything when the command ends, when the lifeline (the read end of a pipe
whose only writer is the parent) closes, or when the parent is gone, even by SIGKILL. Its exit code is the command's,
or 128 + the signal that ended it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PARENT_CHECK_S = 1.0
_KILL_LIMIT_S = 10.0
# In /proc/PID/stat, after the parent's number.
_NUM_THREADS = 15


def guarded(command: list[str], lifeline: int) -> list[str]:
    """The command line that runs a command under a guard; `lifeline` must be among the passed descriptors."""
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(lifeline), *command]


def main(arguments: list[str]) -> int:
    """Run the command to its end under the guard's rules."""
    lifeline, command = int(arguments[0]), arguments[1:]
    parent = os.getppid()
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: kill_descendants(exit_code=143))
    inherited = [int(name) for name in os.listdir("/proc/self/fd")]
    passed = [fd for fd in inherited if fd > 2 and fd != lifeline and _is_open(fd)]
    process = subprocess.Popen(
        command,
        pass_fds=passed,
        # A target that signals its own process group must not end the guard.
        start_new_session=True,
        # The guard may be killed itself; its direct child then still ends.
        preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
    )
    for fd in passed:
        os.close(fd)
    code = _wait(process, lifeline, parent)
    kill_descendants()
    return code


def _wait(process: subprocess.Popen[bytes], lifeline: int, parent: int) -> int:
    """Return the command's exit code, or 137 after the lifeline closed or the parent vanished."""
    ended = os.pidfd_open(process.pid)
    poller = select.poll()
    poller.register(ended, select.POLLIN)
    poller.register(lifeline, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poller.poll(_PARENT_CHECK_S * 1000)]
        if ended in ready:
            code = process.wait()
            return code if code >= 0 else 128 - code
        if lifeline in ready or os.getppid() != parent:
            return 137


def kill_descendants(exit_code: int | None = None) -> None:
    """SIGKILL the whole tree below this process, again until none is left."""
    deadline = time.monotonic() + _KILL_LIMIT_S
    own = os.getpid()
    # Twice, for /proc is not read at one instant: a child read before its parent, which then ends, is missed once.
    while (pids := descendants(own) or descendants(own)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.01)
    _reap()
    if exit_code is not None:
        os._exit(exit_code)


def descendants(root: int) -> list[int]:
    """All live processes below `root`, read from /proc."""
    children: dict[int, list[int]] = {}
    ended = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stat:
                    state, parent, *rest = stat.read().rpartition(b")")[2].split()
            except OSError:
                continue
            children.setdefault(int(parent), []).append(int(name))
            # A process whose first thread has ended reads as a zombie while its others live, and keeps its children.
            if state in b"ZX" and int(rest[_NUM_THREADS]) <= 1:
                ended.add(int(name))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += [pid for pid in below if pid not in ended]
        queue += below
    return found


def _reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
