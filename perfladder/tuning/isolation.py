"""A first build in a process of its own, so that a crash, a hang or a lack of memory costs that candidate only."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from perfladder import guard
from perfladder.tuning.build_log import BuildLog

if TYPE_CHECKING:
    from perfladder.backend.base import Backend, BuildRequest

_POLL_S: Final = 0.2
_END_S: Final = 10.0
_TAIL_BYTES: Final = 2000


@dataclass(frozen=True)
class TrialLimits:
    """When a first build is ended.

    Attributes:
        timeout_s: From its start.
        max_memory_bytes: Of its processes together; None: what the machine has.
        is_wanted: Without it the first build is made in this process, which may take it down.
        cache_dir: For what compilers keep.
    """

    timeout_s: float
    max_memory_bytes: int | None = None
    is_wanted: bool = True
    cache_dir: Path | None = None


@dataclass(frozen=True)
class Trial:
    """How a first build ended.

    Attributes:
        error: Why it failed; None: it did not.
        duration_s: All of it, imports included.
        peak_host_rss_bytes: Of its processes together, as far as was seen.
    """

    error: str | None
    duration_s: float
    peak_host_rss_bytes: int | None = None


def try_in_child(backend: Backend, request: BuildRequest, limits: TrialLimits) -> Trial:
    """Build, and run what was built, in a fresh process.

    The module and its samples go there through a pipe, pickled for that process alone; no file is written. A module
    that cannot be sent this way is an error: such a backend then does not run here at all. All that the process prints
    goes into the log of the build.
    """
    if not limits.is_wanted:
        return Trial(None, 0.0)
    start = time.monotonic()
    log = BuildLog(backend, request, in_child=True)
    with tempfile.TemporaryFile() as output:
        error, peak = _run(backend, request, limits, output.fileno(), start + limits.timeout_s)
        if error is not None and error.startswith("its process"):
            output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL_BYTES))
            printed = output.read().decode(errors="replace").strip()
            error += f". Its last output:\n{printed}" if printed else ". It printed nothing"
        log.write(output, "built, and run on all samples" if error is None else f"failed: {error}")
    return Trial(error, round(time.monotonic() - start, 3), peak)


def _run(
    backend: Backend, request: BuildRequest, limits: TrialLimits, log_fd: int, deadline: float
) -> tuple[str | None, int | None]:
    answer_read, answer_write = os.pipe()
    lifeline_read, lifeline_write = os.pipe()
    python = [sys.executable, "-P", "-X", "faulthandler", "-m", "perfladder.tuning.trial", str(answer_write)]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, str(lifeline_read), *python],
        stdin=subprocess.PIPE,
        stdout=log_fd,
        stderr=log_fd,
        pass_fds=(answer_write, lifeline_read),
        start_new_session=True,
    )
    for fd in (answer_write, lifeline_read):
        os.close(fd)
    sender = _Sender(process, backend, request, limits.cache_dir)
    try:
        sender.start()
        answer, peak, why = _wait(process, answer_read, limits, deadline)
    finally:
        os.close(lifeline_write)
        process.wait()
        sender.join()
        os.close(answer_read)
    if sender.error is not None:
        return sender.error, peak
    if why is not None:
        return why, peak
    if not answer:
        return f"its process ended: {_reason(process.returncode)}", peak
    error: str | None = json.loads(answer)["error"]
    return error, peak


class _Sender(threading.Thread):
    """Writes the work into the child's pipe, which may take no more at any time."""

    def __init__(
        self, process: subprocess.Popen[bytes], backend: Backend, request: BuildRequest, cache_dir: Path | None
    ) -> None:
        super().__init__(name="perfladder-trial", daemon=True)
        self._process, self._work, self._cache_dir = process, (backend, request), cache_dir
        self.error: str | None = None

    def run(self) -> None:
        """Pickle into the pipe; classes of scripts and notebooks go by value."""
        import cloudpickle  # type: ignore[import-untyped]

        assert self._process.stdin is not None
        backend, request = self._work
        work = {
            "backend": backend,
            "module": request.module,
            "graph": request.graph,
            "samples": request.samples,
            "device": str(request.device),
            "folder": str(request.folder),
            "shared_folder": request.shared_folder,
            "cache_dir": self._cache_dir,
        }
        try:
            self._process.stdin.write(json.dumps(sys.path).encode() + b"\n")
            with _by_value([*(type(part) for part in request.module.modules()), type(backend)]):
                cloudpickle.dump(work, self._process.stdin)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the child has ended, and the other side tells why
        except Exception as error:
            self.error = (
                f"it cannot be tried in a process of its own: the module cannot be sent there ({error}). "
                "Set config.isolate_builds = False to build it in this process, which a crash or a hang would end."
            )
            self._process.kill()
        finally:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()


@contextlib.contextmanager
def _by_value(kinds: Iterable[type]) -> Iterator[None]:
    """Let classes of modules that another process cannot import travel with their code, as those of scripts do."""
    import cloudpickle

    names = {kind.__module__ for kind in kinds} - {"__main__", "builtins"}
    modules = [sys.modules[name] for name in sorted(names) if name in sys.modules and not _is_importable(name)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _is_importable(name: str) -> bool:
    """Whether a fresh process finds the package of a module, which this one may have loaded from elsewhere."""
    package = name.partition(".")[0]
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    return any(finder.find_spec(package, None) is not None for finder in finders)


def _wait(
    process: subprocess.Popen[bytes], answer_fd: int, limits: TrialLimits, deadline: float
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
        peak = max(peak, _memory_of(process.pid))
        if limits.max_memory_bytes is not None and peak > limits.max_memory_bytes:
            return b"", peak, f"it took {peak} bytes of memory; the limit is {limits.max_memory_bytes}"
        if time.monotonic() > deadline:
            return b"", peak or None, f"it did not end within {limits.timeout_s:g} s (config.build_timeout_s)"


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
