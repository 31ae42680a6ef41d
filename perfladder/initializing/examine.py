"""Load a target, find out how it is called, and call it once."""

from __future__ import annotations

import inspect
import time
import typing
from typing import Any

from pydantic import Field, JsonValue

from perfladder.errors import PerfladderError
from perfladder.initializing.guess import ParameterInfo, find_call, guesses, parameters_of
from perfladder.instrument import Observer, Site, instrument
from perfladder.models import Model
from perfladder.object_parts import attribute_at
from perfladder.sites import stage_sites
from perfladder.target import LoadedInfo, LoadedTarget


class ExamineRequest(Model):
    """Examine the session's target."""


class StageSeen(Model):
    """A stage that the call went through."""

    path: str
    type: str
    num_calls: int


class Examined(Model):
    """What a target is, and a call of it that runs."""

    info: LoadedInfo
    call: str | None = None
    parameters: list[ParameterInfo] = []
    inputs: dict[str, JsonValue] = {}
    stages: list[StageSeen] = []
    run_s: float | None = Field(default=None, description="Of the first call; None: no call ran.")
    is_streamed: bool = False
    error: str | None = Field(default=None, description="Why the last call that was tried did not run.")


class _Counter(Observer):
    def __init__(self) -> None:
        self.num_calls: dict[str, int] = {}

    def enter(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.num_calls[site.path] = self.num_calls.get(site.path, 0) + 1


def examine(loaded: LoadedTarget, request: ExamineRequest) -> Examined:
    """Load the target, and try calls until one runs."""
    found = Examined(info=loaded.info(loaded.load(prepares_call=False)), inputs=loaded.workload.inputs)
    call, given = loaded.workload.call, loaded.workload.inputs
    try:
        call = call or find_call(loaded.obj)
    except LookupError as error:
        why = f"{found.info.target_type} cannot be called; name one of its methods with --set call=NAME ({error})."
        return found.model_copy(update={"error": why})
    function = None if call and ":" in call else attribute_at(loaded.obj, call or "", field_name="call")
    parameters = [] if function is None else parameters_of(function)
    sets = [given] if function is None else guesses(loaded.obj, parameters, _annotations_of(function), given)
    found = found.model_copy(update={"call": call, "parameters": parameters})
    for inputs in sets:
        found = found.model_copy(update={"inputs": inputs} | _attempt(loaded, call, inputs))
        if found.error is None:
            break
    return found


def _attempt(loaded: LoadedTarget, call: str | None, inputs: dict[str, JsonValue]) -> dict[str, Any]:
    """Make a call once, and see which stages it goes through."""
    counter = _Counter()
    try:
        loaded.change_call(call, inputs)
        loaded.prepare_run()
        start = time.perf_counter()
        with instrument(stage_sites(loaded.obj), counter) as seen:
            output = loaded.run()
        loaded.synchronize()
    except PerfladderError as error:
        return {"error": str(error)}
    stages = [
        StageSeen(path=site.path, type=type(site.owner).__name__, num_calls=counter.num_calls[site.path])
        for site in seen.sites
        if site.path in counter.num_calls
    ]
    run_s = time.perf_counter() - start
    return {"stages": stages, "run_s": run_s, "is_streamed": output.is_streamed, "error": None}


def _annotations_of(function: Any) -> dict[str, Any]:
    from torch import nn

    plain = function.forward if isinstance(function, nn.Module) else function
    plain = plain if inspect.isroutine(plain) else type(plain).__call__
    try:
        return typing.get_type_hints(plain)
    except Exception:  # annotations may name what is imported for type checkers only
        return {}
