"""The child's side of `perfladder exec --tune`: `python -P -m perfladder.jit.script REPORT SCRIPT ARGS...`.

The script runs as `python SCRIPT ARGS...` would run it, with just-in-time tuning on; what was tuned is written to the
report's file when the process ends, however it does.
"""

from __future__ import annotations

import atexit
import sys
import traceback
from pathlib import Path

from perfladder.scripts.as_main import own_traceback, run_as_main

FAILED = 1
"""Exit code of a script that raises, as Python has it."""


def main(arguments: list[str]) -> int:
    """Run the script; returns 1 if it raised. What ends it by `sys.exit` goes on up."""
    from perfladder.jit import api
    from perfladder.jit.finder import finder

    report, script, *others = arguments
    path = Path(report)
    atexit.register(lambda: path.write_text(finder.report().model_dump_json()))
    api.enable()
    try:
        run_as_main(script, others)
    except Exception as error:
        traceback.print_exception(type(error), error, own_traceback(error))
        path.with_suffix(".failed").touch()
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
