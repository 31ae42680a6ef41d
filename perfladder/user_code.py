"""Code of the user's: found, imported and called, with whatever it raises told in the words of its own lines."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from perfladder.errors import InputError, PerfladderError, WorkloadError
from perfladder.text import near_names

_ENGINE = str(Path(__file__).parent) + os.sep
LIBRARY_FOLDERS = (
    os.sep + "site-packages" + os.sep,
    os.sep + "dist-packages" + os.sep,
    str(Path(os.__file__).parent) + os.sep,
)
"""Parts of the paths of files that are not the user's own code."""

_FRAMES_SHOWN = 2
_IMPORTED_FILES: dict[Path, ModuleType] = {}


@dataclass
class RunOutput:
    """What one run of the workload gave; for a generator the last item, with the moment at which each arrived."""

    value: Any
    item_end_ns: list[int] = field(default_factory=list)
    is_streamed: bool = False


def find_callable(spec: str, base_dir: Path, *, field_name: str) -> Callable[..., Any]:
    """Import `module:name` or `file.py:name`.

    Raises:
        InputError: No such file, module or name, or it cannot be called.
        WorkloadError: The module's own code raised.
    """
    module_name, _, name = spec.rpartition(":")
    module = (
        _import_file(module_name, base_dir, field_name)
        if module_name.endswith(".py")
        else _import(module_name, field_name)
    )
    try:
        found = getattr(module, name)
    except AttributeError:
        public = [n for n in vars(module) if not n.startswith("_") and callable(getattr(module, n))]
        raise InputError(
            f"{field_name}: {module_name} has no {name!r}. {near_names(name, public, 'callables')}"
        ) from None
    if not callable(found):
        raise InputError(f"{field_name}: {spec} is a {type(found).__name__} and cannot be called.")
    function: Callable[..., Any] = found
    return function


def _import(name: str, field_name: str) -> ModuleType:
    with user_code(f"{field_name}: importing {name}"):
        try:
            found = None if name.startswith(".") else importlib.util.find_spec(name)
        except ModuleNotFoundError as error:
            # A parent package that exists may itself fail to import something: that is not a missing target.
            if error.name != name and not name.startswith(f"{error.name}."):
                raise
            found = None
        except ValueError:
            found = None
    if found is None:
        raise InputError(
            f"{field_name}: there is no module {name!r} on the Python path (the workload's folder and the current one "
            "are on it). For a file, write 'path/to/file.py:factory'."
        )
    with user_code(f"{field_name}: importing {name}"):
        return importlib.import_module(name)


def _import_file(name: str, base_dir: Path, field_name: str) -> ModuleType:
    path = (base_dir / name).resolve()
    if not path.is_file():
        raise InputError(f"{field_name}: there is no file {path} (relative paths start at the workload's folder).")
    if path in _IMPORTED_FILES:
        return _IMPORTED_FILES[path]
    # A user's file may be called like a module that is already there, such as types.py.
    found = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
    is_taken = (
        path.stem in sys.modules
        or path.stem in sys.stdlib_module_names
        or (found is not None and found.origin != str(path))
    )
    module_name = f"perfladder_target_{path.stem}" if is_taken else path.stem
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        with user_code(f"{field_name}: importing {path}"):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(module_name, None)
        raise
    _IMPORTED_FILES[path] = module
    return module


def parameter_names(function: Callable[..., Any]) -> set[str]:
    """The names that a function takes; none where it does not tell."""
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()


def check_arguments(function: Callable[..., Any], arguments: dict[str, Any], *, where: str, what: str) -> None:
    """Refuse arguments that cannot be bound, by name, before anything is run."""
    from torch import nn

    # The signature of a module's own __call__ says nothing; a class that is a factory takes what its __init__ takes.
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except Exception:  # looking a signature up runs the object's own attribute code
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        names = [n for n, p in signature.parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        unknown = None if takes_any else next((name for name in arguments if name not in names), None)
        if unknown and not names:
            hint = "It takes no keyword arguments, and inputs are keywords; write a function for call: module:function."
        else:
            hint = near_names(unknown, names, "parameters") if unknown else f"Parameters: {', '.join(names)}."
        raise InputError(f"{where}: {what} does not accept these arguments: {error}. {hint}") from error


@contextlib.contextmanager
def user_code(what: str) -> Iterator[None]:
    """Turn whatever the user's code raises into one message with the last frames of their own code.

    Raises:
        WorkloadError: The code raised, exited, or ran out of memory.
    """
    try:
        yield
    except PerfladderError:
        raise
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        shown = "".join(traceback.format_list(_telling_frames(error))).rstrip()
        memory = " ran out of memory" if _is_out_of_memory(error) else " raised"
        traceback.print_exception(error)
        raise WorkloadError(f"{what}{memory}: {type(error).__name__}: {error}\n{shown}".rstrip()) from error


def _telling_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The last frames of the user's own code, and where it ended when that is inside a library."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_ENGINE, "<frozen "))]
    own = [f for f in frames if not any(library in f.filename for library in LIBRARY_FOLDERS)][-_FRAMES_SHOWN:]
    return own + [frame for frame in frames[-1:] if frame not in own]


def _is_out_of_memory(error: BaseException) -> bool:
    """torch raises a class of its own on an accelerator, and a plain RuntimeError on the CPU."""
    text = str(error)
    return (
        isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in text
    )


def consume(value: Any, clock: Callable[[], int]) -> RunOutput:
    """Run what the call returned to its end: an iterator item by item, a coroutine on a loop of its own."""
    if inspect.iscoroutine(value):
        return consume(_run_on_a_loop(value), clock)
    if isinstance(value, AsyncIterator):
        return _run_on_a_loop(_consume_async(value, clock))
    if not isinstance(value, Iterator):
        return RunOutput(value)
    output = RunOutput(None, is_streamed=True)
    for item in value:
        output.item_end_ns.append(clock())
        output.value = item
    return output


def _run_on_a_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end; where this thread has a running loop, as in a notebook, on a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run_on_new_loop(coroutine)
    import torch

    is_grad_enabled = torch.is_grad_enabled()

    def run() -> Any:
        # The grad mode belongs to the thread.
        with torch.set_grad_enabled(is_grad_enabled):
            return _run_on_new_loop(coroutine)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def _run_on_new_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """As `asyncio.run`, without its handler of SIGINT: setting that writes the task out, with the tensor it returns."""
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(coroutine)
    finally:
        try:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            asyncio.set_event_loop(None)
            loop.close()


async def _consume_async(items: AsyncIterator[Any], clock: Callable[[], int]) -> RunOutput:
    output = RunOutput(None, is_streamed=True)
    async for item in items:
        output.item_end_ns.append(clock())
        output.value = item
    return output
