"""The workload that an unmodified script stands for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import JsonValue

from perfladder.changes import with_changes
from perfladder.errors import InputError
from perfladder.workload import WorkloadFile, parse_workload


def script_workload(
    script: str,
    arguments: Sequence[str] = (),
    *,
    function: str | None = None,
    nth: int = 1,
    changes: Sequence[str] = (),
) -> WorkloadFile:
    """A workload whose target is a script, stopped at the call that is profiled.

    Args:
        script: A Python file.
        arguments: Its own.
        function: Whose call; None for that of a known pipeline.
        nth: Which of its calls, from 1.
        changes: `field=value`, as `--set` takes them.

    Raises:
        InputError: There is no such file, or a change is wrong.
    """
    path = Path(script)
    if not path.is_file():
        raise InputError(f"{script} is no file; give the script that you would give to python.")
    target_args: dict[str, JsonValue] = {"script": str(path.resolve())}
    if arguments:
        target_args["arguments"] = list(arguments)
    if function is not None:
        target_args["function"] = function
    if nth != 1:
        target_args["nth"] = nth
    fields: dict[str, JsonValue] = {
        "name": re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._")[:80] or "script",
        "target": "perfladder.scripts:build",
        "target_args": target_args,
        "call": "perfladder.scripts:call_again",
    }
    return with_changes(WorkloadFile(parse_workload(fields), path.resolve().parent), list(changes), source=script)
