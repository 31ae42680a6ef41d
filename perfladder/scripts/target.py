"""The factory that runs a script up to its call, and the call that is made again."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from perfladder.errors import InputError, WorkloadError
from perfladder.scripts.as_main import own_traceback, run_as_main
from perfladder.scripts.watch import KNOWN_CALLS, WATCH_NAME, Caught, Reached, Watch, modules_used
from perfladder.target import Placed
from perfladder.user_code import user_code


class ScriptFunction:
    """Stands for a function of a script: what it reaches by name and holds modules are its attributes."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


def build(script: str, arguments: Sequence[str] = (), function: str | None = None, nth: int = 1) -> Placed:
    """Run a script up to the call that matters; it goes no further than that.

    Args:
        script: A Python file; a relative path starts at the current folder.
        arguments: Its own.
        function: `name` or `Class.method` in the script, or `module:name`; by default the first call of a diffusers or
            transformers pipeline or of `generate`, or else the module that the script spends most time in.
        nth: Which of its calls, from 1.

    Raises:
        InputError: There is no such script or function.
        WorkloadError: The script raised, or ended without that call.
    """
    path = Path(script)
    if not path.is_file():
        raise InputError(f"script: {script} is no file; give the script that you would give to python.")
    if nth < 1:
        raise InputError(f"nth: {nth}; the calls are counted from 1.")
    watch = Watch(function, nth)
    caught = _run(watch, str(path), [str(argument) for argument in arguments])
    description = f"{caught.name}, called at {caught.where}"
    print(f"{script}: stopped at {description}")
    obj = caught.owner
    if obj is None:
        obj = ScriptFunction(**modules_used(caught.function, _by_name(caught)))
    return Placed(obj, _device_of(obj), {"script_call": caught}, description)


def call_again(obj: Any, script_call: Caught) -> Any:
    """Make the script's call once more, with copies of the arguments that it had, under the modes that it had."""
    from perfladder.capturing.context import context_restored

    with context_restored(script_call.context, script_call.autocast_device):
        return script_call.again(obj)


def _run(watch: Watch, script: str, arguments: Sequence[str]) -> Caught:
    from perfladder.capturing.context import settings_in_force

    end = "to its end"
    with watch.watching(), user_code(f"The script {script}"):
        try:
            run_as_main(script, arguments, change=watch.change, names={WATCH_NAME: watch.mark})
        except Reached as reached:
            reached.__traceback__ = None
        except SystemExit as error:
            if error.code not in (None, 0):
                raise WorkloadError(_why_it_ended(script, arguments, error.code)) from None
            end = "to its sys.exit()"
        except Exception as error:
            raise error.with_traceback(own_traceback(error)) from None
    caught = watch.best()
    if caught is None:
        raise WorkloadError(f"The script {script} ran {end}, and {_what_is_missing(watch)}.")
    # What the script itself has set is still in force; what a block of it had set is to be set for the call again.
    now = settings_in_force()
    scoped = {name: value for name, value in caught.context.settings.items() if now.get(name) != value}
    return replace(caught, context=caught.context.model_copy(update={"settings": scoped}))


def _why_it_ended(script: str, arguments: Sequence[str], code: object) -> str:
    how = f"with exit code {code}" if isinstance(code, int) else f"saying: {code}"
    given = f" It was given: {' '.join(arguments)}." if arguments else ""
    return (
        f"The script {script} ended before its call, {how}. What it printed is in session.log of the run directory."
        f"{given} Options of perfladder stand before the script's name."
    )


def _what_is_missing(watch: Watch) -> str:
    if watch.num_calls:
        return f"made {watch.num_calls} such calls, not {watch.nth}: choose an earlier one with --nth"
    if watch.function is not None:
        return f"did not call {watch.function}"
    known = ", ".join(f"{call.owner}.{call.method}" for call in KNOWN_CALLS)
    return f"called no module and none of {known}. Name the function to profile with --function"


def _by_name(caught: Caught) -> dict[str, Any]:
    try:
        return dict(inspect.signature(caught.function).bind(*caught.args, **caught.kwargs).arguments)
    except (TypeError, ValueError):
        return dict(caught.kwargs)


def _device_of(obj: Any) -> Any:
    """Where a pipeline says that it computes, as one does whose weights wait elsewhere; or where the weights are."""
    import torch

    from perfladder.in_place import device_of

    said = getattr(obj, "_execution_device", None)
    if isinstance(said, torch.device):
        return said
    found = device_of(obj)
    return torch.device("cpu" if found == "auto" else found)
