"""Switch just-in-time tuning on and off, and see what it did."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from perfladder.errors import InputError
from perfladder.files import private_folder
from perfladder.jit.config import jit_config
from perfladder.jit.finder import finder

_Function = TypeVar("_Function", bound=Callable[..., Any])

_INSPECTION_LEVELS: Final = 7


def enable() -> None:
    """Find modules as they are called, in all threads, and tune them as `jit_config` says.

    Raises:
        InputError: `jit_config.cache_dir` is no folder.
        NotPossibleHereError: It cannot be made, or is not the user's own.
    """
    private_folder(jit_config.cache_dir)
    finder.enable()


def disable() -> None:
    """Put torch and all modules back as they were; what was chosen is served again after the next `enable`."""
    finder.disable()


def patch_for_jit_tuning(func: _Function) -> _Function:
    """Decorate a function so that modules are found and tuned while it runs, in its own thread or task.

    Raises:
        InputError: It is a generator function, whose caller runs in between, or cannot be called.
    """
    if not callable(func):
        raise InputError(f"patch_for_jit_tuning: a {type(func).__name__} cannot be called; decorate a function.")
    if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
        raise InputError(
            f"patch_for_jit_tuning: {func.__qualname__} is a generator function; decorate what consumes it."
        )
    if inspect.iscoroutinefunction(func):

        @functools.wraps(func)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            private_folder(jit_config.cache_dir)
            with finder.block():
                return await func(*args, **kwargs)

        return cast(_Function, run_async)

    @functools.wraps(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        private_folder(jit_config.cache_dir)
        with finder.block():
            return func(*args, **kwargs)

    return cast(_Function, run)


def tune_deferred() -> None:
    """Tune what was recorded, and what will be, from the next call of each module on.

    Raises:
        InputError: `jit_config.mode` is not `tune_deferred`.
    """
    if jit_config.mode != "tune_deferred":
        raise InputError(f"tune_deferred: jit_config.mode is {jit_config.mode!r}; set it to 'tune_deferred' first.")
    finder.tuner.is_armed = True


def enable_inspection() -> None:
    """Time the modules of the program, down to seven levels below the topmost ones, and tune nothing."""
    jit_config.mode = "inspect"
    jit_config.max_depth_level = _INSPECTION_LEVELS
    finder.enable()


def save_report(path: str | Path, model_name: str | None = None) -> None:
    """Write the hierarchy of modules as one HTML page.

    Args:
        path: The file; one that is there is replaced.
        model_name: The page's title.

    Raises:
        InputError: It cannot be written.
    """
    finder.report().save(path, model_name)


def print_hierarchy() -> None:
    """Print the modules that were found, each with its state and what serves it."""
    print(finder.report().describe(), end="")
