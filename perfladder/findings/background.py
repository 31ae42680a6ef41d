"""What findings know besides the result that they are derived from, and the words that they share."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from perfladder.stats import Interval
from perfladder.target import LoadedInfo
from perfladder.workload import Workload


@dataclass(frozen=True)
class Background:
    """The work that was measured.

    Attributes:
        workload: As it was run.
        info: What was found when the target was loaded.
        source: What names the workload on a command line: its file, or the name of a built-in.
    """

    workload: Workload
    info: LoadedInfo
    source: str

    def command(self, verb: str, *options: str) -> str:
        """A command of ours on the same workload, to be pasted into a shell."""
        return shlex.join(["perfladder", verb, self.source, *options])

    @property
    def total_device_bytes(self) -> int | None:
        """Memory of the device that was measured on; None on a CPU."""
        devices = self.info.environment.devices
        index = int(self.info.device.partition(":")[2] or 0)
        return devices[index].total_memory_bytes if self.info.device != "cpu" and index < len(devices) else None


def where(rung: str, field: str) -> str:
    """The place of a number, for evidence."""
    return f"{rung}.json: {field}"


def interval_text(interval: Interval, *, percent: bool = True) -> str:
    """An interval, and what it speaks for."""
    if percent:
        return f"95 % interval {interval.low:.1%} to {interval.high:.1%}, runs of one process"
    return f"95 % interval {interval.low:.2f} to {interval.high:.2f}"
