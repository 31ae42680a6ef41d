"""What tests of child processes share: find those of one test, and wait for something to happen."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "PERFLADDER_TEST_MARK"
"""Environment variable by whose value the processes of one test are told from all others."""


def marked(mark: str) -> list[int]:
    """Live processes that carry the mark in their environment."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                environment = Path(f"/proc/{name}/environ").read_bytes()
            except OSError:
                continue
            if f"{MARK}={mark}".encode() in environment.split(b"\0") and is_alive(int(name)):
                found.append(int(name))
    return found


def is_alive(pid: int | None) -> bool:
    """Whether there is such a process, and it is more than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], Any], limit_s: float, *, poll_s: float = 0.02) -> Any:
    """Look again and again until the condition holds; returns what it gave."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(poll_s)
    return found
