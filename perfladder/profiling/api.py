"""`perfladder.profile`: where the time of an object's runs goes, in which module, and how much outside any."""

from __future__ import annotations

import functools
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from perfladder.errors import InputError
from perfladder.models import ResultWarning
from perfladder.profiling.assemble import assemble
from perfladder.profiling.data import Config, Input
from perfladder.profiling.discover import Sites, find_sites
from perfladder.profiling.prebound import prebound_warnings
from perfladder.profiling.view import render
from perfladder.profiling.warnings import ProfileWarningCode, warn
from perfladder.profiling.window import Call, check_no_profiler, profile_runs
from perfladder.trace import record
from perfladder.user_code import consume

_NS_PER_US = 1e3


@dataclass(frozen=True)
class PerformanceProfile:
    """What a profile saw.

    Attributes:
        data: Everything, ready for JSON; `docs/profile.md` tells what each key means.
        trace_file: Absolute path of the trace if one was asked for.
    """

    data: dict[str, Any]
    trace_file: Path | None = None

    def markdown(self, **options: object) -> str:
        """Return the profile as Markdown; the same data always gives the same text.

        Raises:
            ValueError: There are no options.
        """
        if options:
            raise ValueError(f"markdown() takes no options; got {', '.join(sorted(options))}.")
        return render(self.data)


def profile(
    obj: Any,
    input_data: Any,
    *,
    inference_function: Callable[..., Any] | None = None,
    warmup_runs: int = 3,
    measured_runs: int = 10,
    trace_file: str | Path | None = None,
    scenarios: Mapping[str, Any] | None = None,
) -> PerformanceProfile:
    """Run an object's inference under the profiler and attribute the time to its modules and their methods.

    A mapping is passed as keyword arguments, a tuple as positional ones, None as no argument, anything else as one
    argument. All runs are without gradients. The warm-up runs are plain and timed; the profiler starts after them, and
    once more inside it a run is made that is not counted. What the call streams is consumed.

    Args:
        obj: A module, or any object that holds modules, such as a pipeline.
        input_data: What to call it with.
        inference_function: What to call instead of `obj`, with the same input.
        warmup_runs: Plain runs before the profiler.
        measured_runs: Profiled runs.
        trace_file: Where to keep the trace (`.json` or `.json.gz`); by default nothing is written.
        scenarios: Named inputs, each warmed up, run and reported apart. A mapping overrides single entries of
            `input_data` if that is a mapping too; anything else takes its place.

    Raises:
        ValueError: `warmup_runs` is negative, or `measured_runs` not positive.
        InputError: Nothing to call, no scenario, or the trace cannot be written there.
        RungError: Another torch profiler is active.
    """
    _check_counts(warmup_runs, measured_runs)
    function = _function(obj, inference_function)
    inputs = {name: _Arguments.of(value) for name, value in _inputs(input_data, scenarios).items()}
    check_no_profiler()
    calls = [Call(functools.partial(_run, function, given), name=name) for name, given in inputs.items()]
    sites = find_sites(obj)
    found = _warnings_before(obj, sites, inference_function, warmup_runs)
    with _trace_path(trace_file) as path, torch.no_grad():
        unprofiled_us = {call.name: _timed(call, warmup_runs) for call in calls}
        profiled = profile_runs(sites, calls, repeats=measured_runs, trace_path=path)
    data = assemble(
        obj,
        profiled,
        config=Config(
            warmup_runs=warmup_runs,
            measured_runs=measured_runs,
            uses_inference_function=inference_function is not None,
        ),
        inputs={name: Input(args_count=len(given.args), kwargs=list(given.kwargs)) for name, given in inputs.items()},
        unprofiled_us=unprofiled_us,
        warnings=found,
    )
    return PerformanceProfile(data.model_dump(mode="json"), path if trace_file is not None else None)


class _Arguments(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, value: Any) -> _Arguments:
        if isinstance(value, Mapping):
            return cls((), {str(name): inner for name, inner in value.items()})
        if value is None:
            return cls((), {})
        # A named tuple is one argument: it is a structure, not a list of arguments.
        is_arguments = isinstance(value, tuple) and not hasattr(value, "_fields")
        return cls(tuple(value) if is_arguments else (value,), {})


def _check_counts(warmup_runs: int, measured_runs: int) -> None:
    if warmup_runs < 0:
        raise ValueError(f"warmup_runs must be 0 or more, not {warmup_runs}.")
    if measured_runs <= 0:
        raise ValueError(f"measured_runs must be 1 or more, not {measured_runs}.")


def _function(obj: Any, inference_function: Callable[..., Any] | None) -> Callable[..., Any]:
    function = obj if inference_function is None else inference_function
    if not callable(function):
        what = "obj" if inference_function is None else "inference_function"
        raise InputError(
            f"{what}: a {type(function).__name__} cannot be called. Give a callable object or an inference_function."
        )
    return late_bound(function)


def late_bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what looks a bound method up anew at each call, so that the method itself is seen; others as they are."""
    if isinstance(function, types.MethodType):
        name = function.__func__.__name__
        if getattr(function.__self__, name, None) == function:
            return functools.partial(_call_method, function.__self__, name)
    return function


def _call_method(owner: Any, name: str, /, *args: Any, **kwargs: Any) -> Any:
    return getattr(owner, name)(*args, **kwargs)


def _inputs(input_data: Any, scenarios: Mapping[str, Any] | None) -> dict[str | None, Any]:
    if scenarios is None:
        return {None: input_data}
    if not isinstance(scenarios, Mapping) or not scenarios or not all(isinstance(name, str) for name in scenarios):
        raise InputError("scenarios: expected a mapping from names to inputs with at least one entry.")
    is_base = isinstance(input_data, Mapping)
    return {
        name: {**input_data, **value} if is_base and isinstance(value, Mapping) else value
        for name, value in scenarios.items()
    }


def _run(function: Callable[..., Any], given: _Arguments) -> None:
    """Run once, consume what is streamed, and wait for the device."""
    consume(function(*given.args, **given.kwargs), time.perf_counter_ns)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _timed(call: Call, num_runs: int) -> list[float]:
    walls = []
    for _ in range(num_runs):
        start = time.perf_counter_ns()
        call.run()
        walls.append((time.perf_counter_ns() - start) / _NS_PER_US)
    return walls


def _warnings_before(
    obj: Any, sites: Sites, inference_function: Callable[..., Any] | None, warmup_runs: int
) -> list[ResultWarning]:
    code, found = ProfileWarningCode, prebound_warnings(obj, sites, inference_function)
    if not warmup_runs:
        found.append(warn(code.NO_UNPROFILED_RUNS, "warmup_runs is 0: there is no unprofiled time to compare with."))
    if record.has_profiled_before:
        found.append(warn(code.PROFILED_BEFORE, "This process had recorded a window before its unprofiled runs."))
    return found


@contextmanager
def _trace_path(trace_file: str | Path | None) -> Iterator[Path]:
    """Where the trace goes: where the user wants it, or into a folder that is removed again."""
    if trace_file is None:
        with tempfile.TemporaryDirectory(prefix="perfladder-") as folder:
            yield Path(folder) / "trace.json"
        return
    path = Path(trace_file).absolute()
    if not path.parent.is_dir():
        raise InputError(f"trace_file: there is no folder {path.parent}.")
    if path.is_dir():
        raise InputError(f"trace_file: {path} is a folder; name a file in it.")
    yield path
