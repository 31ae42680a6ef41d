"""The child's side of `perfladder exec --tune`: `python -P -m perfladder.jit.script REPORT SCRIPT ARGS...`.

The script runs as `python SCRIPT ARGS...` would run it, with just-in-time tuning on; what was tuned is written to the
report's file when the process ends, however it does.
"""

from __future__ import annotations

import atexit
import sys
import traceback
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path

FAILED = 1
"""Exit code of a script that raises, as Python has it."""


def main(arguments: list[str]) -> int:
    """Run the script; returns 1 if it raised. What ends it by `sys.exit` goes on up."""
    from perfladder.jit import api
    from perfladder.jit.finder import finder

    report, script, *others = arguments
    path = Path(report)
    atexit.register(lambda: path.write_text(finder.report().model_dump_json()))
    sys.argv[:] = [script, *others]
    sys.path.insert(0, str(Path(script).resolve().parent))
    module = types.ModuleType("__main__")
    module.__file__ = script
    module.__loader__ = SourceFileLoader("__main__", script)
    vars(module)["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    api.enable()
    try:
        exec(compile(Path(script).read_bytes(), script, "exec"), vars(module))
    except Exception as error:
        # Without the frame of this file, as Python itself would show it.
        below = error.__traceback__.tb_next if error.__traceback__ is not None else None
        traceback.print_exception(type(error), error, below)
        path.with_suffix(".failed").touch()
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
