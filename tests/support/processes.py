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
                state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if f"{MARK}={mark}".encode() in environment.split(b"\0") and state != "Z":
                found.append(int(name))
    return found


def wait_until(condition: Callable[[], Any], limit_s: float, *, poll_s: float = 0.02) -> Any:
    """Look again and again until the condition holds; returns what it gave."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(poll_s)
    return found
