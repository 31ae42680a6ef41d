"""One member of a sweep, in a process of its own: `python -m perfladder.flows.member`.

It reads its request from the first line of stdin, tells its progress on stderr, and prints its outcome, or its error,
as the last line of stdout. It ends, like a command that is interrupted, when its stdin closes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any, NoReturn

from perfladder.errors import PerfladderError
from perfladder.flows.config import ProfilePipelineConfig
from perfladder.flows.run import run_profile_pipeline

_TERMINATED = 128 + signal.SIGTERM


def main() -> int:
    """Climb as asked; returns the exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    request = sys.stdin.readline()
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        config = ProfilePipelineConfig.model_validate_json(request)
        answer = run_profile_pipeline(config, _tell).model_dump(mode="json")
    except PerfladderError as error:
        answer = {"error": str(error), "exit_code": error.exit_code}
    except SystemExit:
        answer = {"error": "interrupted", "exit_code": _TERMINATED}
    print(json.dumps(answer), flush=True)
    return int(answer["exit_code"])


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _end_with_stdin() -> None:
    """Wait for the end of stdin; read without a buffer, which could not be closed at this process's own end."""
    while os.read(0, 1):
        pass
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def _terminate(*_: Any) -> NoReturn:
    raise SystemExit(_TERMINATED)


if __name__ == "__main__":
    sys.exit(main())
