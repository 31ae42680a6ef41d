"""One profiled window in which every module and every named call is marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from perfladder import _torch_private
from perfladder.functional.launch_sites import mark_launch_sites
from perfladder.functional.mode import FunctionObserver, OnCall
from perfladder.functional.sites import ModuleSites, same_path_as_without_mode
from perfladder.instrument import instrument
from perfladder.models import ResultWarning
from perfladder.profiling.observers import Annotator
from perfladder.profiling.warnings import ProfileWarningCode, instrumentation_warnings, warn
from perfladder.trace.model import Trace
from perfladder.trace.record import record_window


def record_marked(
    path: Path,
    sites: ModuleSites,
    run: Callable[[], None],
    *,
    activities: Sequence[str] | None = None,
    on_call: OnCall | None = None,
) -> tuple[Trace, list[ResultWarning]]:
    """Run once in a window with named calls and launches marked, which slows the host: quote no duration from it.

    Args:
        path: Where the trace goes.
        sites: The modules to mark.
        run: What to run; it waits for the device.
        activities: What to record; None is all that is there.
        on_call: Told of each named call before it is made.

    Raises:
        RungError: Another profiler is active, or took over, or the window holds nothing.
    """
    observer = FunctionObserver(Annotator(sites.labels), opaque=sites.opaque, on_call=on_call)
    before = _torch_private.compile_counters()
    all_threads = _torch_private.can_record_all_threads()
    with (
        record_window(path, activities=activities, all_threads=all_threads) as window,
        same_path_as_without_mode(sites.modules.values()),
        mark_launch_sites(),
        instrument(sites.sites, observer) as state,
    ):
        run()
    warnings = instrumentation_warnings(state)
    change = _torch_private.compile_counters().since(before)
    if num_compiled := max(change.graphs, change.recompiles):
        message = f"torch.compile compiled {num_compiled} times while named calls were marked."
        warnings.append(warn(ProfileWarningCode.COMPILED_UNDER_MARKS, message))
    return window.read(), warnings
