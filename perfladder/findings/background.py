"""What findings know besides the result that they are derived from, and the words that they share."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from perfladder.profiling.shares import Share
from perfladder.stats import Interval
from perfladder.target import LoadedInfo
from perfladder.trace.launches import FamilyRow
from perfladder.workload import Workload


@dataclass(frozen=True)
class Background:
    """The work that was measured.

    Attributes:
        workload: As it was run.
        info: What was found when the target was loaded.
        source: What names the workload on a command line: its file, or the name of a built-in.
        modules: Stages that are modules, so that they can be tuned by their names.
    """

    workload: Workload
    info: LoadedInfo
    source: str
    modules: frozenset[str] = frozenset()

    def command(self, verb: str, *options: str) -> str:
        """A command of ours on the same workload, to be pasted into a shell."""
        return shlex.join(["perfladder", verb, self.source, *options])

    def tune_command(self, stage: str | None, *options: str) -> str | None:
        """The same to tune a stage, or where it is no module what is called most.

        None where modules are tuned or compiled already, or run in several processes: `tune` takes none of these.
        """
        work = self.workload
        if work.tuned is not None or work.compile is not None or work.nproc > 1:
            return None
        return self.command("tune", *(("--module", stage) if stage in self.modules else ()), *options)

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


def spread_text(row: Share | FamilyRow, whole_us: float) -> str:
    """The lowest and the highest share by a row's own time in each profiled replay; empty where that is not known.

    What else there is counts with its typical time, so that a stall there does not move this row's share. A row's
    typical time is made of its parts' own, and may be below all of its times: it counts too.
    """
    rest_us = whole_us - row.total_us
    if not row.repeat_us or whole_us <= 0:
        return ""
    shares = [us / (us + rest_us) for us in (row.total_us, *row.repeat_us) if us + rest_us > 0]
    return f"{min(shares):.0%} to {max(shares):.0%} by its times in {len(row.repeat_us)} profiled replays"
