"""The process that samples the hardware: `python -m perfladder.tuning.hardware_sampler PID PERIOD_S`.

Its first line on stdout is an object: the devices it reads, and why there are none. Every further line is one tick:
[time_ns, host_cpu_frac, host_rss_bytes, [[utilization_frac, memory_used_bytes, power_w] of each device]], with null
where something is unknown. It ends when the process is gone, when nobody reads any more, and, after a last tick, when
something comes on stdin or stdin is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil

from perfladder.environment import nvml_session

Tick = tuple[int, float | None, int | None, list[tuple[float | None, int | None, float | None]]]


def main(arguments: list[str]) -> int:
    """Write ticks until there is a reason to end."""
    process_id, period_s = int(arguments[0]), float(arguments[1])
    with contextlib.suppress(psutil.NoSuchProcess, BrokenPipeError), nvml_session() as nvml:
        host = HostReader(psutil.Process(process_id))
        devices = [] if nvml is None else [DeviceReader(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        reason = None if devices else "no NVIDIA device is known here: only the host was sampled"
        _write({"devices": [[device.index, device.name] for device in devices], "reason": reason})
        _tick_until_told(lambda: (time.monotonic_ns(), *host.read(), [device.read() for device in devices]), period_s)
    return 0


class HostReader:
    """CPU time and memory of one process."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._num_cpus = len(process.cpu_affinity())
        self._clock = _cpu_clock(process.pid)
        self._last_ns: tuple[int, int] | None = None

    def read(self) -> tuple[float | None, int | None]:
        """The fraction of its CPUs that the process used since the last reading, None at the first; resident bytes."""
        rss_bytes = self._process.memory_info().rss
        try:
            now_ns = time.monotonic_ns(), time.clock_gettime_ns(self._clock)
        except OSError:  # it ended between the two readings
            raise psutil.NoSuchProcess(self._process.pid) from None
        last_ns, self._last_ns = self._last_ns, now_ns
        if last_ns is None:
            return None, rss_bytes
        wall_ns, cpu_ns = max(now_ns[0] - last_ns[0], 1), now_ns[1] - last_ns[1]
        return round(min(cpu_ns / wall_ns / self._num_cpus, 1.0), 4), rss_bytes


def _cpu_clock(process_id: int) -> int:
    """The clock of a process's CPU time, exact to the ns, where /proc counts in steps of 10 ms."""
    clock = ctypes.c_int()
    if ctypes.CDLL(None).clock_getcpuclockid(process_id, ctypes.byref(clock)):
        raise psutil.NoSuchProcess(process_id)
    return clock.value


class DeviceReader:
    """What the driver tells of one device; None where it does not."""

    def __init__(self, nvml: Any, index: int) -> None:
        self.index = index
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
        self.name = str(self._ask(nvml.nvmlDeviceGetName))

    def read(self) -> tuple[float | None, int | None, float | None]:
        """Utilization over the driver's last period, memory that anybody uses, and power."""
        utilization = self._ask(self._nvml.nvmlDeviceGetUtilizationRates)
        memory = self._ask(self._nvml.nvmlDeviceGetMemoryInfo)
        power_mw = self._ask(self._nvml.nvmlDeviceGetPowerUsage)
        return (
            None if utilization is None else utilization.gpu / 100,
            None if memory is None else int(memory.used),
            None if power_mw is None else power_mw / 1000,
        )

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        try:
            return question(self._handle)
        except self._nvml.NVMLError:
            return None


def _tick_until_told(tick: Callable[[], Tick], period_s: float) -> None:
    """Ticks lie on a grid, so that they do not drift; one that comes too late is left out."""
    start_s, count, is_told = time.monotonic(), 0, False
    while not is_told:
        _write(tick())
        count = max(count, int((time.monotonic() - start_s) / period_s)) + 1
        wait_s = max(0.0, start_s + count * period_s - time.monotonic())
        is_told = bool(select.select([0], [], [], wait_s)[0])
    _write(tick())


def _write(value: object) -> None:
    # One call a line: whoever ends this process cannot leave half a line (a pipe takes 4 KiB at once).
    os.write(1, json.dumps(value, separators=(",", ":")).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
