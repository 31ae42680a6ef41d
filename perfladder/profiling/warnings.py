"""The one table of warnings of a profile, beside those of the trace: a stable code each, with what it means."""

from __future__ import annotations

from collections.abc import Iterable

from perfladder.instrument import Instrumentation
from perfladder.models import ResultWarning
from perfladder.trace.warnings import ExplainedCode, TraceWarning

SHOWN = 5
"""How many names a message lists before it counts the rest."""


class ProfileWarningCode(ExplainedCode):
    """Codes of warnings about a profile."""

    UNREGISTERED_AOT_REGION = (
        "UNREGISTERED_AOT_REGION",
        "A tuned wrapper was seen in the runs, but is no longer part of the object or gives no known state; its state "
        "is `unknown`.",
    )
    UNMAPPED_AOT_REGION_EVENTS = (
        "UNMAPPED_AOT_REGION_EVENTS",
        "The trace holds spans of a tuned module that is not part of the profiled object.",
    )
    PREBOUND_METHOD = (
        "PREBOUND_METHOD",
        "Somebody holds a method that was taken from a module before profiling began. Calls through it are not seen as "
        "a region of that method.",
    )
    HOOKS_DID_NOT_FIRE = (
        "HOOKS_DID_NOT_FIRE",
        "No module or method of the object was seen in the runs, so all time is residual. The runs may use another "
        "object, call `forward` directly, or run inside one compiled function.",
    )
    HOOK_LOST = (
        "HOOK_LOST",
        "Other code removed the observation of a call site during the runs; its calls are missing.",
    )
    SITE_NOT_OBSERVABLE = (
        "SITE_NOT_OBSERVABLE",
        "A module or method cannot be observed; its time belongs to its caller.",
    )
    CALLS_CUT_OFF = (
        "CALLS_CUT_OFF",
        "Calls never returned (an exception that skips hooks, a generator left open); their regions end where the "
        "observation ended, so their times are too long.",
    )
    COMPILED_MODULE = (
        "COMPILED_MODULE",
        "A compiled module is one region: what is inside runs in its graph, where nothing can be observed.",
    )
    THREADS_NOT_COVERED = (
        "THREADS_NOT_COVERED",
        "Modules were called on threads that the profiler does not record; these calls are in no table.",
    )
    WINDOW_CUT_SHORT = (
        "WINDOW_CUT_SHORT",
        "Fewer runs were profiled than asked for, since the profiler's memory would have passed its limit. What was "
        "profiled is whole.",
    )
    COMPILED_UNDER_MARKS = (
        "COMPILED_UNDER_MARKS",
        "`torch.compile` compiled while named calls were marked. A compiled function that is no module was called from "
        "a module that is not compiled; marking compiles such a function anew, and its calls have no names.",
    )
    FUNCTIONS_NOT_MARKED = (
        "FUNCTIONS_NOT_MARKED",
        "The pass that marks named calls failed, so kernels have an operator and a module, and no function.",
    )
    GRAPH_KERNELS_NOT_PAIRED = (
        "GRAPH_KERNELS_NOT_PAIRED",
        "Kernels ran from CUDA graphs, and a pass without graphs could not be made or does not launch the same ones, "
        "so they have a module and no operator.",
    )
    REPLAYS_DISAGREE = (
        "REPLAYS_DISAGREE",
        "The operator that takes longest is another one from profiled replay to profiled replay, so none is named.",
    )
    SAMPLES_LEFT_OUT = (
        "SAMPLES_LEFT_OUT",
        "Inputs of some calls were not kept: they would have passed the budget, or could not be copied.",
    )
    PROFILED_BEFORE = (
        "PROFILED_BEFORE",
        "This process had recorded a window before and stays slower after that, so its unprofiled runs are slower than "
        "those of a fresh process.",
    )
    NO_UNPROFILED_RUNS = (
        "NO_UNPROFILED_RUNS",
        "Without warm-up runs there is no unprofiled time, so what the profiler costs is unknown.",
    )


def warn(code: ProfileWarningCode, message: str) -> ResultWarning:
    """Return a warning of the profile."""
    return ResultWarning(code=str(code), message=message)


def list_names(names: Iterable[str]) -> str:
    """Return the first names, quoted, and how many more there are."""
    known = list(names)
    more = f" and {len(known) - SHOWN} more" if len(known) > SHOWN else ""
    return ", ".join(repr(name) for name in known[:SHOWN]) + more


def trace_warnings(warnings: Iterable[TraceWarning]) -> list[ResultWarning]:
    """Return warnings of the trace engine as warnings of a result."""
    return [ResultWarning(code=str(w.code), message=w.message, source=w.source) for w in warnings]


def instrumentation_warnings(state: Instrumentation) -> list[ResultWarning]:
    """Return what the observation of call sites could not do."""
    warnings = [
        warn(ProfileWarningCode.HOOK_LOST, f"The observation of {path!r} was removed by other code during the run.")
        for path in state.lost
    ]
    if state.unobservable:
        path, reason = next(iter(state.unobservable.items()))
        message = f"{len(state.unobservable)} sites cannot be observed, such as {path!r}: {reason}"
        warnings.append(warn(ProfileWarningCode.SITE_NOT_OBSERVABLE, message))
    if state.num_cut_off:
        message = f"{state.num_cut_off} observed calls never returned and were closed at the end."
        warnings.append(warn(ProfileWarningCode.CALLS_CUT_OFF, message))
    return warnings
