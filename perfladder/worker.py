"""The child's side of a session: `python -P -m perfladder.worker REQUESTS_FD ANSWERS_FD`."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, get_type_hints

from perfladder.distributed import RankPlace
from perfladder.errors import PerfladderError
from perfladder.progress import Progress
from perfladder.target import LoadedTarget
from perfladder.workload import parse_workload


def main(arguments: list[str]) -> int:
    """Answer requests until the parent closes the pipe."""
    # A descriptor of its own: the target may close or redirect stderr, and the parent still asks where it hangs.
    faulthandler.register(signal.SIGUSR1, file=os.dup(2), all_threads=False)
    requests, answers = (int(number) for number in arguments)
    pipes, own_pid = [(fd, os.fstat(fd)) for fd in (requests, answers)], os.getpid()
    # What the target starts must not hold the pipes open after this process has gone.
    for fd in (requests, answers):
        os.set_inheritable(fd, False)
    with os.fdopen(requests, "rb") as lines, os.fdopen(answers, "wb") as out:
        hello = json.loads(lines.readline() or "null")
        if hello is None:
            return 0
        place = RankPlace.model_validate(hello["place"]) if hello["place"] else None
        loaded = LoadedTarget(parse_workload(hello["workload"]), Path(hello["base_dir"]), place)

        def send(message: dict[str, Any]) -> None:
            answer = json.dumps(message).encode() + b"\n"
            if os.getpid() != own_pid:
                os._exit(0)  # a child that the target forked and never ended; it must not answer in its parent's place
            if not all(_is_still(fd, before) for fd, before in pipes):
                # The number may belong to a file of the target's by now: write nothing to it.
                os.write(2, b"The workload closed file descriptors that it did not open; leave those above 2 alone.\n")
                os._exit(70)
            out.write(answer)
            out.flush()

        def tell(progress: Progress) -> None:
            send({"progress": progress.model_dump(mode="json")})

        loaded.tell = tell
        for line in lines:
            send(_answer(loaded, json.loads(line)))
    return 0


def _is_still(fd: int, before: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), before)
    except OSError:
        return False


def _answer(loaded: LoadedTarget, message: dict[str, Any]) -> dict[str, Any]:
    try:
        module_name, _, function_name = message["operation"].partition(":")
        if module_name.split(".")[0] != "perfladder":
            raise AssertionError(f"{module_name} is no part of perfladder")
        measure = getattr(importlib.import_module(module_name), function_name)
        request_type = next(hint for name, hint in get_type_hints(measure).items() if name == "request")
        result = measure(loaded, request_type.model_validate(message["request"]))
        return {"result": result.model_dump(mode="json")}
    except Exception as error:
        return {"error": _describe(error)}


def _describe(error: BaseException) -> dict[str, Any]:
    """Errors raised on purpose travel as they are; anything else is a fault in perfladder and says so."""
    if isinstance(error, PerfladderError):
        return {"type": type(error).__name__, "message": str(error)}
    traceback.print_exception(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
    return {
        "type": "RungError",
        "message": f"Internal error, please report it: {type(error).__name__}: {error} ({where})",
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
