"""The one code path that profiles runs and attributes them: `perfladder.profile` and the regions rung both use it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from perfladder import _torch_private
from perfladder.errors import RungError
from perfladder.instrument import Instrumentation, Site, any_mark, instrument, known_marks
from perfladder.models import ResultWarning
from perfladder.profiling.discover import AOT, Sites
from perfladder.profiling.memory import MemoryWatch
from perfladder.profiling.observers import AcceleratorMemory, Annotator, MemoryMeter, MemoryObserver, Peak
from perfladder.profiling.warnings import (
    ProfileWarningCode,
    instrumentation_warnings,
    list_names,
    trace_warnings,
    warn,
)
from perfladder.trace.attribution import Attribution, attribute
from perfladder.trace.labels import MARK_KIND, RUN_KIND, WARMUP_KIND, Label, decode_label
from perfladder.trace.model import Trace
from perfladder.trace.operators import OperatorRow, operator_table, top_operators
from perfladder.trace.record import Window, record_window, span
from perfladder.trace.regions import RegionReport, report_regions
from perfladder.trace.timeline import Timeline, report_timeline

_NS_PER_US = 1e3


@dataclass(frozen=True)
class Call:
    """One way to run the work: what to do before a run, outside the measured part, and the run itself.

    `run` returns when the device has finished.
    """

    run: Callable[[], object]
    prepare: Callable[[], None] = lambda: None
    name: str | None = None


@dataclass(frozen=True, eq=False)
class ProfiledRuns:
    """A window of runs, attributed.

    Attributes:
        sites: What was observed.
        activities: What was recorded, e.g. `("cpu", "cuda")`.
        is_first: Whether this process had recorded no window before.
        wall_time_us: Of each run, by the host's clock, in the order of `report.runs`.
        call_names: Of each run, the name of its call.
        trace: The trace.
        attribution: Where its spans belong.
        report: The runs and their regions.
        timeline: What the device did, without the warm-up.
        peaks: Peak memory by a site's path; empty without an accelerator.
        warnings: Everything a reader must know.
        analysis_s: How long reading and attributing took.
    """

    sites: Sites
    activities: tuple[str, ...]
    is_first: bool
    wall_time_us: list[float]
    call_names: list[str | None]
    trace: Trace
    attribution: Attribution
    report: RegionReport
    timeline: Timeline
    peaks: dict[str, Peak]
    warnings: list[ResultWarning]
    analysis_s: float

    def key_averages(self, limit: int = 20) -> dict[str, list[OperatorRow]]:
        """Return the operators with the largest totals over all runs, by host and by device time.

        Of our own spans only those of the flat regions are rows: those of runs and of inner modules would push the
        operators out.
        """
        flat = {row.region_id for run in self.report.runs for row in run.regions}
        rows = operator_table(self.trace, only_runs=True, attribution=self.attribution)
        labels = {row.key: decode_label(row.key) for row in rows}
        kept = [row for row in rows if (label := labels[row.key]) is None or label.region_id in flat]
        return {
            "cpu_time_total": top_operators(kept, "cpu_time_total", limit),
            "device_time_total": top_operators(kept, "device_time_total", limit),
        }


def profile_runs(
    sites: Sites,
    calls: Sequence[Call],
    *,
    repeats: int,
    trace_path: Path,
    activities: Sequence[str] | None = None,
    meter: MemoryMeter | None = None,
    memory_limit_bytes: int | None = None,
    stages: Sequence[Site] = (),
) -> ProfiledRuns:
    """Profile runs of each call with every module, method and mark of user code annotated, and attribute them.

    Each call is first run once, unmeasured, inside the window: that absorbs first-use costs, and there the peak memory
    is taken.

    Args:
        sites: The modules and methods that are the regions, from `find_sites`.
        calls: The calls, one after the other.
        repeats: Measured runs of each.
        trace_path: Where the trace goes.
        activities: What to record; None is all that is there.
        meter: Of the device's memory; None takes the accelerator's if one is recorded.
        memory_limit_bytes: How much the process may grow before the window ends early; None: see `MemoryWatch`.
        stages: Further call sites to be regions, as marks are; those that `sites` has are left out.

    Raises:
        RungError: Another profiler is active, or took over, or the window holds nothing.
        InputError: The trace cannot be written there.
    """
    peaks: dict[str, Peak] = {}
    covers_threads = _torch_private.can_record_all_threads()
    watch = MemoryWatch.of_this_process(memory_limit_bytes)
    with record_window(
        trace_path, activities=activities, mark_garbage_collection=True, all_threads=covers_threads
    ) as window:
        for index, call in enumerate(calls):
            with _peak_memory(sites, peaks, meter or _find_meter(window)):
                call.prepare()
                with span(WARMUP_KIND, str(index)):
                    call.run()
        watch.note()
        more = [site for site in stages if site.path not in sites.labels and not site.is_mark]
        annotator = Annotator(sites.labels, [site.path for site in more])
        with instrument([*sites.sites, *more, any_mark()], annotator) as state:
            walls, names = _timed_runs(calls, repeats, watch)
    foreign = annotator.num_foreign_calls
    observed = Observed(
        sites,
        num_calls=annotator.num_calls | foreign if covers_threads else annotator.num_calls,
        num_foreign_calls={} if covers_threads else foreign,
        num_wanted=repeats * len(calls),
        memory=watch,
        stages=[site.path for site in more],
    )
    return _attribute(window, observed, state, walls, names, peaks)


def check_no_profiler() -> None:
    """Refuse before anything has run if somebody else profiles.

    Raises:
        RungError: Another torch profiler is active.
    """
    if _torch_private.is_profiler_active():
        raise RungError(
            "Cannot profile: another torch profiler is active in this process, and starting a second one would "
            "silently end it. Stop that one first."
        )


def _timed_runs(calls: Sequence[Call], repeats: int, watch: MemoryWatch) -> tuple[list[float], list[str | None]]:
    """Return the wall time in us and the call's name of each run; a call ends early where its share of memory ends."""
    walls: list[float] = []
    names: list[str | None] = []
    for number, call in enumerate(calls):
        for repeat in range(repeats):
            if repeat and not watch.has_room(share=(number + 1) / len(calls)):
                break
            call.prepare()
            walls.append(_timed_run(call, len(walls)))
            names.append(call.name)
            watch.note()
    return walls, names


def _timed_run(call: Call, index: int) -> float:
    with span(RUN_KIND, str(index)):
        start = time.perf_counter_ns()
        call.run()
        end = time.perf_counter_ns()
    return (end - start) / _NS_PER_US


def _find_meter(window: Window) -> MemoryMeter | None:
    if window.activities == ("cpu",):
        return None
    try:
        torch.accelerator.memory_allocated()
    except (RuntimeError, NotImplementedError, AssertionError):  # a device without torch's allocator statistics
        return None
    return AcceleratorMemory()


@contextmanager
def _peak_memory(sites: Sites, peaks: dict[str, Peak], meter: MemoryMeter | None) -> Iterator[None]:
    if meter is None:
        yield
        return
    observer = MemoryObserver(meter)
    with instrument(sites.sites, observer):
        yield
    for path, peak in observer.peaks.items():
        known = peaks.get(path, peak)
        peaks[path] = Peak(max(known.peak_bytes, peak.peak_bytes), max(known.increase_bytes, peak.increase_bytes))


@dataclass(frozen=True)
class Observed:
    """What was seen while the runs were made.

    Attributes:
        sites: What was observed.
        num_calls: Calls of each site on recorded threads.
        num_foreign_calls: Calls of each site on threads that are not recorded.
        num_wanted: How many runs were asked for.
        memory: How the process has grown.
        stages: Paths of the further stages.
    """

    sites: Sites
    num_calls: dict[str, int]
    num_foreign_calls: dict[str, int]
    num_wanted: int
    memory: MemoryWatch
    stages: Sequence[str] = ()


def _attribute(
    window: Window,
    observed: Observed,
    state: Instrumentation,
    walls: list[float],
    names: list[str | None],
    peaks: dict[str, Peak],
) -> ProfiledRuns:
    start = time.perf_counter()
    trace, sites = window.read(), observed.sites
    # A mark of user code stands for what no module in it covers, so that it hides none of them.
    marks = {Label(MARK_KIND, name).region_id for name in [*known_marks(), *observed.stages]}
    attribution = attribute(trace, entered=sites.entered, exclusive=sites.exclusive | marks)
    report = report_regions(trace, attribution)
    timeline = report_timeline(trace, attribution)
    found = [*trace_warnings(trace.warnings), *trace_warnings(report.warnings), *trace_warnings(timeline.warnings)]
    return ProfiledRuns(
        sites=sites,
        activities=window.activities,
        is_first=window.is_first,
        wall_time_us=walls,
        call_names=names,
        trace=trace,
        attribution=attribution,
        report=report,
        timeline=timeline,
        peaks=peaks,
        warnings=[*instrumentation_warnings(state), *_observation_warnings(observed, report), *found],
        analysis_s=round(time.perf_counter() - start, 3),
    )


def _observation_warnings(observed: Observed, report: RegionReport) -> list[ResultWarning]:
    """Return what the runs and the calls that were seen, and those that were not, tell."""
    code, sites, warnings = ProfileWarningCode, observed.sites, _hook_warnings(observed)
    if len(report.runs) < observed.num_wanted:
        message = f"Profiled {len(report.runs)} of {observed.num_wanted} runs: {observed.memory}."
        warnings.append(warn(code.WINDOW_CUT_SHORT, message))
    seen_parts = [part for part in sites.parts if (part.path or part.name) in observed.num_calls]
    compiled = [part.name for part in seen_parts if part.is_compiled]
    if compiled:
        message = f"Compiled, so that what is inside is not seen: {list_names(compiled)}."
        warnings.append(warn(code.COMPILED_MODULE, message))
    if foreign := observed.num_foreign_calls:
        message = f"{sum(foreign.values())} calls on other threads, of {list_names(foreign)}, are not recorded."
        warnings.append(warn(code.THREADS_NOT_COVERED, message))
    seen = {row.region_id for run in report.runs for row in run.regions if row.kind == AOT}
    if unmapped := sorted(seen - set(sites.owner)):
        warnings.append(warn(code.UNMAPPED_AOT_REGION_EVENTS, f"Not part of the object: {list_names(unmapped)}."))
    return warnings


def _hook_warnings(observed: Observed) -> list[ResultWarning]:
    code, num_sites = ProfileWarningCode.HOOKS_DID_NOT_FIRE, len(observed.sites.sites)
    if not num_sites:
        return [warn(code, "The object holds no torch.nn.Module that could be observed.")]
    if not observed.num_calls:
        return [warn(code, f"None of {num_sites} observed modules and methods was called on a recorded thread.")]
    return []
