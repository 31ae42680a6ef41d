"""Run a script in this process as `python SCRIPT ARGS...` would."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import TracebackType
from typing import Any


def run_as_main(
    script: str,
    arguments: Sequence[str],
    *,
    change: Callable[[ast.Module], ast.Module] = lambda tree: tree,
    names: Mapping[str, Any] | None = None,
) -> None:
    """Run a script as `__main__`, with its own folder first on the path. What it raises goes on up.

    Args:
        script: Its file, as the user names it.
        arguments: Its own.
        change: What is done to its syntax tree before.
        names: Further global names that it finds.
    """
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    module = types.ModuleType("__main__")
    module.__file__ = script
    module.__loader__ = SourceFileLoader("__main__", script)
    vars(module)["__builtins__"] = __builtins__
    vars(module).update(names or {})
    sys.modules["__main__"] = module
    tree = change(ast.parse(Path(script).read_bytes(), script))
    exec(compile(tree, script, "exec"), vars(module))


def own_traceback(error: BaseException) -> TracebackType | None:
    """The frames of the script and below, without those that run it, as Python itself would show them."""
    found = error.__traceback__
    while found is not None and found.tb_frame.f_code.co_filename != __file__:
        found = found.tb_next
    while found is not None and found.tb_frame.f_code.co_filename in (__file__, ast.__file__):
        found = found.tb_next
    return found
