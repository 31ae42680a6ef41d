"""The command line of ncu: one kernel of one replayed call, a few launches, chosen sections."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from perfladder.models import Model

SECTIONS: Final = (
    "SpeedOfLight",
    "SpeedOfLight_RooflineChart",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "SchedulerStats",
    "WarpStateStats",
    "LaunchStats",
    "Occupancy",
)
"""What the diagnosis rests on; `ncu` repeats the kernel once for each group of counters that fit together."""

MAX_LAUNCHES: Final = 20


class KernelFilter(Model):
    """Which launches ncu profiles, and what of them."""

    function: str = Field(description="The function's own name, compared whole.")
    nvtx_range: str = Field(description="Only launches inside this range, which the replay opens around one call.")
    launch_skip: int = Field(default=0, ge=0, description="Launches of that function in the range to leave out first.")
    launch_count: int = Field(default=1, ge=1, le=MAX_LAUNCHES)
    sections: list[str] = Field(default=list(SECTIONS), min_length=1)
    clock_control: Literal["none", "base"] = Field(
        default="none", description="`base` locks the clocks to the base clock while it measures."
    )
    cache_control: Literal["all", "none"] = Field(
        default="all", description="`all` empties the caches before each pass; `none` leaves them as they are."
    )


def ncu_command(ncu: str, chosen: KernelFilter, report: Path, log: Path, program: Sequence[str]) -> list[str]:
    """The whole command line.

    Args:
        ncu: The executable.
        chosen: The launches.
        report: Where the report goes; ends in `.ncu-rep`.
        log: Receives ncu's own messages, apart from what the program prints.
        program: The command line of the replay.
    """
    options = [
        *("--target-processes", "application-only"),  # A helper that the replay starts is none of our business.
        *("--nvtx", "--nvtx-include", f"{chosen.nvtx_range}/"),
        *("--kernel-name-base", "function", "--kernel-name", chosen.function),
        *("--launch-skip", str(chosen.launch_skip), "--launch-count", str(chosen.launch_count)),
        *(part for section in chosen.sections for part in ("--section", section)),
        *("--clock-control", chosen.clock_control, "--cache-control", chosen.cache_control),
        *("--export", str(report), "--force-overwrite", "--log-file", str(log)),
    ]
    return [ncu, *options, *program]
