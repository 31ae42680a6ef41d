"""Peak memory of stages and runs, the memory of the whole process tree, and growth from run to run."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from perfladder.instrument import Observer, Site, instrument
from perfladder.target import LoadedTarget
from perfladder.timing.results import HostMemory, MemoryGrowth, StageMemory

if TYPE_CHECKING:
    import torch

    from perfladder._torch_private import AllocatorState

_LOOK_EVERY_S = 0.02
_MIN_GROWTH_RUNS = 6
DEVICE_NOISE_BYTES = 1 << 10
HOST_NOISE_BYTES = 1 << 20
"""Growth below this a run is no leak: the host's allocator spreads out by 0.7 MiB a run for some 15 runs (streaming
workload, glibc), where the device's allocator repeats itself to the byte."""


class Reading(NamedTuple):
    """Bytes in use now, the most since the last reset, and the most that was reserved since then (None: unknown)."""

    current: int
    peak: int
    peak_reserved: int | None = None


class Meter(Protocol):
    """A memory counter with a peak that can be begun anew."""

    def read(self) -> Reading:
        """What is in use, and the peak since `reset`."""
        ...

    def reset(self) -> None:
        """Begin a new peak."""
        ...


class AllocatorMeter:
    """The allocator of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def read(self) -> Reading:
        """What is in use, and the peak since `reset`."""
        state = _allocator_state(self.device)
        return Reading(state.allocated, state.peak_allocated, state.peak_reserved)

    def reset(self) -> None:
        """Begin a new peak; nobody can undo that."""
        import torch

        torch.accelerator.reset_peak_memory_stats(self.device)


class ResidentMeter:
    """This process's resident memory by the kernel's own peak, which misses nothing between two readings.

    Freed memory that the C library keeps would hide later peaks, so `reset` hands it back first; that makes the next
    allocations slower, which is why memory has runs of its own.

    Raises:
        OSError: The kernel lets nobody reset the peak, as in some sandboxes.

    Source:
        proc(5), /proc/pid/clear_refs, value 5 (Linux 4.0).
    """

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self.reset()

    def read(self) -> Reading:
        """What is in use, and the peak since `reset`."""
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        current, peak = (int(fields[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
        return Reading(current, max(current, peak))

    def reset(self) -> None:
        """Begin a new peak."""
        if self._trim is not None:
            self._trim(0)
        Path("/proc/self/clear_refs").write_text("5")


@dataclass(eq=False)
class _OpenCall:
    site: Site
    start_bytes: int
    peak_bytes: int
    reserved_bytes: int | None


@dataclass
class _Peaks:
    peak_bytes: int = 0
    increase_bytes: int = 0
    self_peak_bytes: int = 0
    reserved_bytes: int | None = None


class StagePeaks(Observer):
    """Finds the peak of each site's calls. At each border the peak so far goes to the calls that are open, and a new
    one begins, so that an outer stage has the peaks of the inner ones, and the inner ones not those around them.

    Calls on other threads than the one that made this object are left out, since all share one counter.

    Attributes:
        peak_bytes: Of the whole time, in stages or not.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._thread = threading.get_ident()
        self._open: list[_OpenCall] = []
        self._peaks: dict[str, _Peaks] = {}
        self.peak_bytes = 0
        self._meter.reset()

    def enter(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _OpenCall | None:
        """Settle what was before, and begin anew for this call."""
        if threading.get_ident() != self._thread:
            return None
        reading = self._settle()
        call = _OpenCall(site, reading.current, reading.current, None)
        self._open.append(call)
        return call

    def leave(self, site: Site, token: _OpenCall | None, result: Any) -> None:
        """Note this call's peak and hand it to the outer call."""
        if token is None or token not in self._open:
            return
        self._settle()
        self._open.remove(token)
        peaks = self._peaks_of(site)
        peaks.peak_bytes = max(peaks.peak_bytes, token.peak_bytes)
        peaks.increase_bytes = max(peaks.increase_bytes, token.peak_bytes - token.start_bytes)
        peaks.reserved_bytes = _larger(peaks.reserved_bytes, token.reserved_bytes)

    def finish(self) -> dict[str, StageMemory]:
        """Settle what was after the last call, and return the peaks by the site's path."""
        self._settle()
        return {
            path: StageMemory(
                peak_bytes=peaks.peak_bytes,
                increase_bytes=peaks.increase_bytes,
                self_peak_bytes=peaks.self_peak_bytes,
                reserved_bytes=peaks.reserved_bytes,
            )
            for path, peaks in self._peaks.items()
        }

    def _settle(self) -> Reading:
        reading = self._meter.read()
        self.peak_bytes = max(self.peak_bytes, reading.peak)
        for call in self._open:
            call.peak_bytes = max(call.peak_bytes, reading.peak)
            call.reserved_bytes = _larger(call.reserved_bytes, reading.peak_reserved)
        if self._open:
            innermost = self._peaks_of(self._open[-1].site)
            innermost.self_peak_bytes = max(innermost.self_peak_bytes, reading.peak)
        self._meter.reset()
        return reading

    def _peaks_of(self, site: Site) -> _Peaks:
        return self._peaks.setdefault(site.path, _Peaks())


def _larger(first: int | None, second: int | None) -> int | None:
    return second if first is None else first if second is None else max(first, second)


class TreeWatch:
    """A thread that looks at the resident memory of this process and all below it while the block runs."""

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="perfladder-memory", daemon=True)
        self._own = self._tree = self._count = self._looks = 0
        self._cost_s = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    @property
    def seen(self) -> HostMemory:
        """The most of all looks."""
        return HostMemory(
            peak_process_bytes=self._own,
            peak_tree_bytes=self._tree,
            num_processes=self._count,
            num_looks=self._looks,
            look_us=round(self._cost_s / max(1, self._looks) * 1e6, 1),
        )

    def _watch(self) -> None:
        while True:
            start = time.perf_counter()
            self._look()
            self._cost_s += time.perf_counter() - start
            self._looks += 1
            if self._end.wait(_LOOK_EVERY_S):
                return

    def _look(self) -> None:
        import psutil

        own, below, count = resident_bytes(), 0, 1
        with contextlib.suppress(psutil.Error):
            for child in self._process.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    below += child.memory_info().rss
                    count += 1
        self._own, self._tree = max(self._own, own), max(self._tree, own + below)
        self._count = max(self._count, count)


def measure_memory(loaded: LoadedTarget, sites: list[Site]) -> tuple[dict[str, StageMemory], HostMemory]:
    """Run the workload once more, untimed, and see the peak of each stage and of the whole process tree.

    Returns:
        Peaks by the site's path (none where the kernel tells no peak of the host's memory), and the tree's memory.
    """
    loaded.prepare_run()
    peaks = _stage_peaks(loaded.device)
    with TreeWatch() as watch, instrument(sites if peaks else [], peaks or Observer()):
        output = loaded.run()
        loaded.synchronize()
    del output
    return peaks.finish() if peaks else {}, watch.seen


def _stage_peaks(device: torch.device) -> StagePeaks | None:
    try:
        return StagePeaks(ResidentMeter() if device.type == "cpu" else AllocatorMeter(device))
    except OSError:
        return None


def resident_bytes() -> int:
    """Resident memory of this process now; some 10 us."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _allocator_state(device: torch.device) -> AllocatorState:
    # Imported here: the command line's own process reads results of this module, and does without torch.
    from perfladder import _torch_private

    return _torch_private.allocator_state(device)


def allocated_bytes(loaded: LoadedTarget) -> int | None:
    """What the device's allocator has given out now; None on a CPU."""
    return None if loaded.device.type == "cpu" else _allocator_state(loaded.device).allocated


def find_growth(after_run_bytes: Sequence[int], *, noise_bytes: int) -> MemoryGrowth:
    """Find steady growth of what is in use after each run, from six runs on.

    It is a leak when the 95 % interval of the Theil-Sen slope lies above zero, when the second half alone rises as
    well (caches fill and then stop), and when both slopes are at least `noise_bytes` a run.
    """
    values = list(after_run_bytes)
    if len(values) < _MIN_GROWTH_RUNS:
        reason = f"{len(values)} runs are too few to see growth; {_MIN_GROWTH_RUNS} are needed."
        return MemoryGrowth(is_growing=False, reason=reason)
    from scipy.stats import theilslopes

    if len(set(values)) == 1:
        return MemoryGrowth(is_growing=False, bytes_per_run=0.0, reason="It is the same after every run.")
    slope, _, low, _ = theilslopes(values)
    later = theilslopes(values[len(values) // 2 :]).slope
    is_growing = bool(low > 0 and min(later, slope) >= noise_bytes)
    told = f"From run to run it changes by {slope / 2**10:.0f} KiB (over the second half by {later / 2**10:.0f} KiB)"
    reason = f"{told}, {'steadily' if is_growing else 'not steadily upwards'}."
    return MemoryGrowth(is_growing=is_growing, bytes_per_run=float(slope), reason=reason)


def reset_peak_memory(loaded: LoadedTarget) -> None:
    """Begin a new peak of the device's allocator; nothing to do on a CPU."""
    if loaded.device.type != "cpu":
        import torch

        torch.accelerator.reset_peak_memory_stats(loaded.device)


def peak_device_memory(loaded: LoadedTarget) -> tuple[int | None, int | None]:
    """Peaks of what the device's allocator gave out and of what it held; None on a CPU."""
    if loaded.device.type == "cpu":
        return None, None
    state = _allocator_state(loaded.device)
    return state.peak_allocated, state.peak_reserved
