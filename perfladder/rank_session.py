"""Several sessions as one: the ranks of a workload with `nproc` above 1, one guarded child process each."""

from __future__ import annotations

import contextlib
import json
import select
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_type_hints

from perfladder.distributed import RankPlace
from perfladder.errors import NotPossibleHereError, PerfladderError, WorkloadCrashError, WorkloadTimeoutError
from perfladder.session import Request, Result, Session, rebuild_error, step_name
from perfladder.workload import WorkloadFile

_OTHERS_LIMIT_S = 5.0
"""After one rank has failed, the others may still say why they did; most wait for it and never answer."""

_WAITS = ("torch/distributed/", "perfladder/distributed.py")
_Answer = dict[str, Any] | None


class RankSession:
    """A session on every rank; each request goes to all, and one deadline holds for all their answers.

    Args:
        file: The workload and the folder that its relative paths start from.
        log_path: `session.log` makes `session.rank0.log`, `session.rank1.log` and so on.
        environment: The complete environment variables of the ranks, before those that torchrun sets are added.
    """

    def __init__(self, file: WorkloadFile, *, log_path: Path, environment: dict[str, str]) -> None:
        self.file = file
        self.log_path = log_path
        self._environment = environment
        self._sessions: list[Session] = []
        self._folder: str | None = None
        self._port: socket.socket | None = None

    def __enter__(self) -> Self:
        world_size = self.file.workload.nproc
        try:
            self._folder = tempfile.mkdtemp(prefix="perfladder-ranks-")
            self._port = _reserve_port()
            for rank in range(world_size):
                place = RankPlace(rank=rank, world_size=world_size, meeting=f"{self._folder}/meeting")
                session = Session(
                    self.file,
                    log_path=place.own_path(self.log_path),
                    environment=torchrun_environment(self._environment, place, self._port.getsockname()[1]),
                    place=place,
                )
                self._sessions.append(session)
                session.__enter__()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        """Whether every rank still runs."""
        return bool(self._sessions) and all(session.is_alive for session in self._sessions)

    def call(self, measure: Callable[[Any, Request], Result], request: Request, *, timeout_s: float) -> Result:
        """Run `measure(loaded, request)` on every rank, and merge what they answer.

        Raises:
            WorkloadTimeoutError: Some did not answer in `timeout_s`; all were killed.
            WorkloadCrashError: One died; all were killed.
            PerfladderError: What `measure` raised on purpose on a rank, as the same class.
        """
        self.submit(measure, request)
        return self.result(measure, timeout_s=timeout_s)

    def submit(self, measure: Callable[[Any, Request], Result], request: Request) -> None:
        """Send a request to every rank without waiting."""
        if not hasattr(get_type_hints(measure)["return"], "of_ranks"):
            raise NotPossibleHereError(
                f"nproc: '{step_name(_name(measure))}' is not there for several ranks; set nproc to 1 for it."
            )
        for rank, session in enumerate(self._sessions):
            try:
                session.submit(measure, request)
            except WorkloadCrashError as error:
                self.close()
                raise WorkloadCrashError(f"{self._names([rank])}: {error}") from None

    def result(self, measure: Callable[[Any, Request], Result], *, timeout_s: float) -> Result:
        """Wait for the answers to the last `submit`."""
        answers = self._collect(time.monotonic() + timeout_s)
        if any(answer is None for answer in answers.values()):
            raise self._crash(answers)
        if any("error" in answer for answer in answers.values() if answer is not None):
            raise self._raised(answers)
        if len(answers) < len(self._sessions):
            raise self._timeout(answers, step_name(_name(measure)), timeout_s)
        for session in self._sessions:
            session.forget_submitted()
        kind: Any = get_type_hints(measure)["return"]
        results = [kind.model_validate(answers[rank]["result"]) for rank in sorted(answers)]  # type: ignore[index]
        merged: Result = kind.of_ranks(results)
        return merged

    def close(self) -> None:
        """End every rank and everything below it; safe to call again."""
        sessions, self._sessions = self._sessions, []
        for session in sessions:
            session.begin_close()
        for session in sessions:
            session.close()
        if self._port is not None:
            self._port.close()
            self._port = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _collect(self, deadline: float) -> dict[int, _Answer]:
        """The answers by rank in the order they came: None of one that died, nothing of one that was too late."""
        answers: dict[int, _Answer] = {}
        waiting = {session.answers_fd: rank for rank, session in enumerate(self._sessions)}
        poller = select.poll()
        for fd in waiting:
            poller.register(fd, select.POLLIN)
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for fd, _ in poller.poll(1000 * left_s):
                line = self._sessions[waiting[fd]].receive()
                if line is None:
                    continue
                poller.unregister(fd)
                answer = answers[waiting.pop(fd)] = json.loads(line) if line else None
                if answer is None or "error" in answer:
                    deadline = min(deadline, time.monotonic() + _OTHERS_LIMIT_S)
        return answers

    def _crash(self, answers: dict[int, _Answer]) -> PerfladderError:
        died = [rank for rank, answer in answers.items() if answer is None]
        message = str(self._sessions[died[0]].crash())
        others = f" {self._names(died[1:])} died too." if died[1:] else ""
        names = self._names(died[:1])
        self.close()
        return WorkloadCrashError(f"{names}: {message}{others}")

    def _raised(self, answers: dict[int, _Answer]) -> PerfladderError:
        """The first error; an error that all ranks have is told as that of a single process."""
        errors = {rank: answer["error"] for rank, answer in answers.items() if answer is not None and "error" in answer}
        first, error = next(iter(errors.items()))
        if len(errors) == len(self._sessions):
            for session in self._sessions:
                session.forget_submitted()
            if all(other == error for other in errors.values()):
                return rebuild_error(error)
            return rebuild_error({**error, "message": f"{self._names([first])}: {error['message']}"})
        message = f"{self._names([first])}: {error['message']}"
        if others := [rank for rank in range(len(self._sessions)) if rank not in answers]:
            message += f"\n{self._names(others)} waited for it, and all were ended."
        self.close()
        return rebuild_error({**error, "message": message})

    def _timeout(self, answers: dict[int, _Answer], step: str, timeout_s: float) -> PerfladderError:
        late = [rank for rank in range(len(self._sessions)) if rank not in answers]
        places = {rank: self._sessions[rank].where_it_hangs() for rank in late}
        hanging = [rank for rank in late if not any(wait in places[rank].partition(";")[0] for wait in _WAITS)] or late
        told = "".join(f" Rank {rank}:{places[rank]}" for rank in hanging if places[rank])
        waited = [rank for rank in late if rank not in hanging]
        message = f"{self._names(hanging)} did not finish '{step}' within {timeout_s:g} s"
        message += f", and {_ranks(waited)} waited for it" if waited else ""
        self.close()
        return WorkloadTimeoutError(
            f"{message}; all ranks were ended, with all they had started.{told} Raise 'timeout_s' in the workload, or "
            "give it less work."
        )

    def _names(self, ranks: Sequence[int]) -> str:
        return f"{_ranks(ranks).capitalize()} of {self.file.workload.nproc}"


def torchrun_environment(base: dict[str, str], place: RankPlace, port: int) -> dict[str, str]:
    """What torchrun sets for a rank on one machine, its one thread for each rank included.

    Source:
        PyTorch documentation, "torchrun (Elastic Launch)", environment variables; torch/distributed/run.py.
    """
    rank, size = str(place.rank), str(place.world_size)
    kept = {name: value for name, value in base.items() if not name.startswith("TORCHELASTIC_")}
    return {
        "OMP_NUM_THREADS": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **kept,
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": "0",
        "ROLE_RANK": rank,
        "ROLE_NAME": "default",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "perfladder",
    }


def open_session(file: WorkloadFile, *, log_path: Path, environment: dict[str, str]) -> Session | RankSession:
    """The kind of session that the workload needs; not started yet."""
    kind = RankSession if file.workload.nproc > 1 else Session
    return kind(file, log_path=log_path, environment=environment)


def _reserve_port() -> socket.socket:
    """A socket that holds a free port: no other is given it, while rank 0 can listen on it (both reuse addresses)."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with contextlib.suppress(OSError):
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _name(measure: Callable[..., Any]) -> str:
    return f"{measure.__module__}:{measure.__qualname__}"
