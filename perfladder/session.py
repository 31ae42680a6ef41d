"""The child process that holds the loaded target and runs rungs in it, with a deadline that really ends it.

A measuring function lives in a rung's module as `measure(loaded, request) -> result`, both pydantic models.
`Session.call(measure, request)` runs it in the child; `LocalSession.call` runs it here (notebooks).
Requests and results travel as JSON lines on their own pipes, never on stdout: user code prints.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, get_type_hints

from perfladder import errors
from perfladder.distributed import RankPlace
from perfladder.errors import PerfladderError, WorkloadCrashError, WorkloadTimeoutError
from perfladder.guard import descendants, guarded
from perfladder.models import Model
from perfladder.progress import Progress
from perfladder.workload import WorkloadFile

Request = TypeVar("Request", bound=Model)
Result = TypeVar("Result", bound=Model)

_LOG_TAIL_LINES = 15
_MAX_LINE = 400
_TAIL_BYTES = 1 << 16
_STACK_LIMIT_S = 3.0
_END_LIMIT_S = 20.0


class Caller(Protocol):
    """Runs a rung's measuring function on a loaded target, here or in a child."""

    def call(self, measure: Callable[[Any, Request], Result], request: Request, *, timeout_s: float) -> Result:
        """Run `measure` and return its result."""
        ...


class Session:
    """One guarded child process; use it as a context manager, and everything it started ends with the block.

    Args:
        file: The workload and the folder that its relative paths start from.
        log_path: Receives all that the child and its own children print; None: a file that is gone after the block.
        environment: The complete environment variables of the child.
        place: Which rank the child is, if it is one of several.
        folder: The current folder of the child; by default that of this process.
    """

    def __init__(
        self,
        file: WorkloadFile,
        *,
        log_path: Path | None,
        environment: dict[str, str] | None = None,
        place: RankPlace | None = None,
        folder: Path | None = None,
    ) -> None:
        self.file = file
        self._scratch = contextlib.ExitStack()
        self._keeps_log = log_path is not None
        self.log_path = log_path or self._scratch_folder() / "session.log"
        self._environment = environment
        self._place = place
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: int | None = None
        self._pending: str | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._scratch.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._scratch.close()

    @property
    def is_alive(self) -> bool:
        """Whether the child still runs."""
        return self._process is not None and self._process.poll() is None

    def call(
        self,
        measure: Callable[[Any, Request], Result],
        request: Request,
        *,
        timeout_s: float,
        on_progress: Callable[[Progress], None] = lambda _: None,
    ) -> Result:
        """Run `measure(loaded, request)` in the child.

        Args:
            measure: What to run; it may tell how far it is by `loaded.tell`.
            request: For it.
            timeout_s: How long it may be silent.
            on_progress: Receives what it tells.

        Raises:
            WorkloadTimeoutError: No answer in `timeout_s`; the child and all below it were killed.
            WorkloadCrashError: The child died.
            PerfladderError: What `measure` raised on purpose, as the same class.
        """
        self.submit(measure, request)
        return self.result(measure, timeout_s=timeout_s, on_progress=on_progress)

    def submit(self, measure: Callable[[Any, Request], Result], request: Request) -> None:
        """Send a request without waiting, so that servers can start while the target loads."""
        assert self._pending is None, f"{self._pending} has not been collected"
        name = f"{measure.__module__}:{measure.__qualname__}"
        line = json.dumps({"operation": name, "request": request.model_dump(mode="json")}) + "\n"
        if not self.is_alive:
            raise WorkloadCrashError(f"The workload's process has ended already. {self._log_tail()}")
        self._pending = name
        try:
            self._requests.write(line.encode())
            self._requests.flush()
        except BrokenPipeError:
            self._pending = None
            raise self.crash() from None

    def result(
        self,
        measure: Callable[[Any, Request], Result],
        *,
        timeout_s: float,
        on_progress: Callable[[Progress], None] = lambda _: None,
    ) -> Result:
        """Wait for the answer to the last `submit`."""
        name, self._pending = self._pending, None
        assert name is not None, "nothing was submitted"
        answer = self._answer(name, timeout_s)
        while "progress" in answer:
            told = Progress.model_validate(answer["progress"])
            on_progress(told)
            answer = self._answer(name, told.limit_s or timeout_s)
        if "error" in answer:
            raise rebuild_error(answer["error"])
        result: Result = get_type_hints(measure)["return"].model_validate(answer["result"])
        return result

    def _answer(self, name: str, limit_s: float) -> dict[str, Any]:
        """The child's next line: progress, a result, or an error."""
        line = self._read_line(time.monotonic() + limit_s)
        if line is None:
            where = self.where_it_hangs()
            self.close()
            raise WorkloadTimeoutError(
                f"The workload did not finish '{step_name(name)}' within {limit_s:g} s and was ended, with all it "
                f"had started.{where} Raise 'timeout_s' in the workload, or give it less work."
            )
        if not line:
            raise self.crash()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def forget_submitted(self) -> None:
        """The last `submit` is answered; for who collects the answer with `receive`."""
        self._pending = None

    def begin_close(self) -> None:
        """Tell the guard to end the child, without waiting; `close` must follow."""
        if self._process is None or self._lifeline is None:
            return
        # A request that a dead child never read is still in the buffer, and closing would try to write it again.
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        os.close(self._lifeline)
        os.close(self.answers_fd)
        self._lifeline = None

    def close(self) -> None:
        """End the child and everything below it; safe to call again."""
        self.begin_close()
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(timeout=_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _scratch_folder(self) -> Path:
        return Path(self._scratch.enter_context(tempfile.TemporaryDirectory(prefix="perfladder-")))

    def _start(self) -> None:
        request_read, request_write = os.pipe()
        answer_read, answer_write = os.pipe()
        lifeline_read, lifeline_write = os.pipe()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        python = [sys.executable, "-P", "-u", "-X", "faulthandler", "-m", "perfladder.worker"]
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen(
                guarded([*python, str(request_read), str(answer_write)], lifeline_read),
                pass_fds=(request_read, answer_write, lifeline_read),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                cwd=self._folder,
                # Ctrl-C reaches this process only, which then ends the child in order.
                start_new_session=True,
            )
        for fd in (request_read, answer_write, lifeline_read):
            os.close(fd)
        self._requests = os.fdopen(request_write, "wb")
        self.answers_fd, self._lifeline = answer_read, lifeline_write
        self._buffer = b""
        hello = {
            "workload": self.file.workload.model_dump(mode="json"),
            "base_dir": str(self.file.base_dir),
            "place": self._place.model_dump() if self._place else None,
        }
        try:
            self._requests.write(json.dumps(hello).encode() + b"\n")
            self._requests.flush()
        except BrokenPipeError:
            raise self.crash() from None
        except BaseException:
            self.close()
            raise

    def _read_line(self, deadline: float) -> bytes | None:
        """One answer; empty when the child has died; None at the deadline."""
        if b"\n" in self._buffer:
            return self._take_line()
        poller = select.poll()
        poller.register(self.answers_fd, select.POLLIN)
        while poller.poll(1000 * max(0.0, deadline - time.monotonic())):
            line = self.receive()
            if line is not None:
                return line
        return None

    def receive(self) -> bytes | None:
        """Read what has come: the answer once it is whole, else None; empty when the child has died."""
        chunk = os.read(self.answers_fd, 1 << 16)
        if not chunk:
            return b""
        self._buffer += chunk
        return self._take_line() if b"\n" in chunk else None

    def _take_line(self) -> bytes:
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def where_it_hangs(self) -> str:
        """Ask the child for its Python stack (faulthandler answers inside C code too); quote the innermost frames."""
        assert self._process is not None
        size = self.log_path.stat().st_size
        worker = next((pid for pid in descendants(self._process.pid) if _is_worker(pid)), None)
        if worker is None:
            return ""
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGUSR1)
        frames: list[str] = []
        deadline = time.monotonic() + _STACK_LIMIT_S
        while not frames and time.monotonic() < deadline:
            time.sleep(0.1)
            with open(self.log_path, "rb") as log:
                log.seek(size)
                lines = log.read(_TAIL_BYTES).decode(errors="replace").splitlines()
            frames = [line.strip() for line in lines if line.startswith("  File ")]
        own = next((frame for frame in frames if "/lib/python" not in frame and "site-packages" not in frame), None)
        return f" It was at: {'; in '.join(dict.fromkeys(filter(None, (*frames[:1], own))))}." if frames else ""

    def crash(self) -> WorkloadCrashError:
        """Close, and tell why the child died."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        self.close()
        return WorkloadCrashError(f"The workload's process ended: {_reason(code)}. {self._log_tail()}")

    def _log_tail(self) -> str:
        """The last lines that the child printed; it may have printed gigabytes."""
        with open(self.log_path, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = log.read(_TAIL_BYTES).decode(errors="replace")
        lines = [line[-_MAX_LINE:] for line in text.splitlines() if line.strip()]
        fatal = next((n for n, line in reversed(list(enumerate(lines))) if line.startswith("Fatal Python error")), None)
        # The fault handler lists the innermost frames first: those say more than the end of its list.
        end = len(lines) if fatal is None else fatal + _LOG_TAIL_LINES // 2
        lines = lines[:end][-_LOG_TAIL_LINES:]
        if not lines:
            return "It printed nothing."
        where = f" ({self.log_path})" if self._keeps_log else ""
        return f"Its last output{where}:\n" + "\n".join(f"  {line}" for line in lines)


class LocalSession:
    """Runs measuring functions in this process, for notebooks: rungs 1, 2 and 4 in place."""

    def __init__(self, loaded: Any) -> None:
        self.loaded = loaded

    def call(self, measure: Callable[[Any, Request], Result], request: Request, *, timeout_s: float) -> Result:
        """Run `measure` here; nothing can end it at `timeout_s`."""
        return measure(self.loaded, request)


def _reason(code: int | None) -> str:
    if code is None:
        return "it closed its pipe without ending"
    if code > 128 and code - 128 in set(signal.Signals):
        name = signal.Signals(code - 128).name
        hint = {"SIGKILL": ", as the kernel does when memory runs out", "SIGSEGV": " (a segmentation fault)"}
        return f"killed by {name}{hint.get(name, '')}"
    return f"it exited with code {code}"


def _is_worker(pid: int) -> bool:
    try:
        return b"perfladder.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def step_name(name: str) -> str:
    """What a person calls `module:function`."""
    module, _, function = name.partition(":")
    return module.rpartition(".")[2] if function == "measure" else function


def rebuild_error(error: dict[str, str]) -> PerfladderError:
    """The child's error, as the class it was there."""
    kind: type[PerfladderError] = getattr(errors, error["type"])
    return kind(error["message"])
