"""The policy table: when each finding is made, which rungs it makes needless, and where to begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from perfladder.findings.extra_passes import FUSABLE_FRAC, LAYOUT_FRAC
from perfladder.findings.finding import Finding, Kind
from perfladder.findings.host_bound import (
    BUSY_FRAC,
    GLUE_US,
    MAIN_PART,
    OTHER_THREADS_FRAC,
    OWN_WORK_FRAC,
    RECOVERABLE_FRAC,
)
from perfladder.findings.movement import COMMUNICATION_FRAC, TRANSFER_FRAC
from perfladder.findings.setup import DEVICE_FULL_FRAC, HOST_FULL_FRAC, WIDE_SHARE


class PolicyRow(NamedTuple):
    """One kind of finding.

    Attributes:
        kind: Its name.
        rungs: Whose results it is derived from.
        when: The condition.
        skips: Rungs that it makes needless.
        reason: Why it does.
    """

    kind: Kind
    rungs: tuple[str, ...]
    when: str
    skips: tuple[str, ...] = ()
    reason: str = ""


POLICY: Final = (
    PolicyRow(
        "outside_dominates",
        ("stages",),
        "There is no stage; or the lower end of the interval of the time outside is above 50 %, and it is more than "
        "the "
        "largest stage.",
        ("capture", "harness", "kernels", "ncu"),
        "Most of the time is outside every stage, so no stage is worth replaying alone.",
    ),
    PolicyRow(
        "cadence_missed",
        ("stages",),
        "The workload has `media`, and p95 of the chunk times is above media time minus the margin.",
    ),
    PolicyRow(
        "replay_output_differs",
        ("harness",),
        "The replay's output is `different`, or a second replay gives another one than the first.",
        ("kernels", "ncu"),
        "The replay does not compute what the pipeline computes, so its kernels are no evidence.",
    ),
    PolicyRow(
        "not_replayable",
        ("capture",),
        "The dominating stage takes or changes what cannot be stored.",
        ("harness", "kernels", "ncu"),
        "The dominating stage cannot be replayed alone, so there is nothing to attribute kernels in.",
    ),
    PolicyRow(
        "memory_capacity",
        ("stages", "any"),
        f"A rung failed for a lack of memory; or the allocator held {DEVICE_FULL_FRAC:.0%} of the device's memory, "
        "or the "
        f"process {HOST_FULL_FRAC:.0%} of the machine's.",
    ),
    PolicyRow(
        "compile_churn",
        ("stages",),
        "`torch.compile` made graphs in the measured runs, or a function reached its limit of recompilations, or "
        "graphs "
        "break.",
    ),
    PolicyRow(
        "communication_bound",
        ("regions",),
        f"Collectives that no kernel hides take {COMMUNICATION_FRAC:.0%} of a plain run or more.",
    ),
    PolicyRow(
        "transfer_bound",
        ("regions", "kernels"),
        f"Copies between host and device take {TRANSFER_FRAC:.0%} of a plain run or call, or more.",
    ),
    PolicyRow(
        "host_bound_synchronization",
        ("regions", "kernels"),
        f"The device works for less than {BUSY_FRAC:.0%} of a plain run or call, and without the host's waits "
        f"{RECOVERABLE_FRAC:.0%} or more of its idle time would go.",
    ),
    PolicyRow(
        "host_bound_dispatch",
        ("regions", "kernels"),
        f"The device works for less than {BUSY_FRAC:.0%} of a plain run or call, waits are no cause, and Python is "
        f"less than {MAIN_PART:.0%} of the host's own work, or less than {GLUE_US:.0f} us for each operator. On a CPU: "
        f"operators' own work is below {OWN_WORK_FRAC:.0%} of a plain run.",
    ),
    PolicyRow(
        "host_bound_python",
        ("regions", "kernels"),
        f"The same, and Python (or waiting that the profiler does not see) is {MAIN_PART:.0%} of the host's own work "
        f"or more, and {GLUE_US:.0f} us for each operator or more.",
    ),
    PolicyRow(
        "device_mostly_idle",
        ("regions", "kernels"),
        f"The device works for less than {BUSY_FRAC:.0%} of a plain run or call, and none of the three above explains "
        "it; or a run is so short that the device idles mostly before its first and after its last work.",
    ),
    PolicyRow(
        "outside_regions", ("regions",), "More than 20 % of the host time is outside every module, waits left out."
    ),
    PolicyRow(
        "other_threads",
        ("regions",),
        f"Threads other than the run's own do host work for {OTHER_THREADS_FRAC:.0%} of a run or more. What the run's "
        "own thread does meanwhile may be waiting for them, so that it decides neither `outside_regions` nor dispatch "
        "or Python as the cause.",
    ),
    PolicyRow(
        "wider_dtype",
        ("stages",),
        f"A stage with {WIDE_SHARE:.0%} of the time or more has wider weights than another stage.",
    ),
    PolicyRow("kernel_diagnosis", ("ncu",), "Nsight Compute has profiled a kernel; `undecided` is one of its answers."),
    # One option each tries what these two say, so they come before the look at single kernels; a layout comes before a
    # compiler, since trying it takes seconds.
    PolicyRow(
        "layout_conversions",
        ("kernels",),
        "Kernels that only change a tensor's memory layout around convolutions (family `layout`) hold "
        f"{LAYOUT_FRAC:.0%} of a call's kernel time or more.",
    ),
    PolicyRow(
        "fusable_operators",
        ("kernels",),
        "The device sets the pace or shares it, and kernels of elementwise operators, copies, normalizations and "
        f"reductions that no compiler wrote hold {FUSABLE_FRAC:.0%} of the kernel time or more.",
    ),
    PolicyRow(
        "kernel_question",
        ("kernels",),
        "The host does not set the pace, and the heaviest kernel holds 10 % of the kernel time or more, and its "
        "operator is below 80 % of its roof, or its work is unknown. In most of the profiled replays it is the "
        "heaviest.",
    ),
    PolicyRow(
        "largest_possible_win",
        ("kernels",),
        "The device sets the pace or shares it, and the first group of the ranking could win 2 % of a call or more. In "
        "most of the profiled replays it is the first.",
    ),
    PolicyRow("device_bound", ("kernels",), "The device works for 90 % of a plain call or more."),
    PolicyRow(
        "dominant_kernels",
        ("kernels",),
        "Always, if the operator with the largest share is the same in most of the profiled replays.",
    ),
    PolicyRow("no_dominant_stage", ("stages",), "Neither `outside_dominates` nor `dominant_stage`."),
    PolicyRow(
        "dominant_stage", ("stages",), "The lower end of the interval of the largest stage's share is above 20 %."
    ),
    PolicyRow(
        "peak_memory_stage", ("stages",), "The metric is `peak_memory`: the peak was reached in the stage's own part."
    ),
    PolicyRow("memory_grows", ("stages",), "Memory in use after a run grows steadily from run to run."),
    PolicyRow("cadence_met", ("stages",), "The workload has `media`, and the cadence is not missed."),
    PolicyRow(
        "throughput_saturated", ("stages",), "The workload has a `sweep`, and no later value gives `min_gain` more."
    ),
    PolicyRow("throughput_grows", ("stages",), "The workload has a `sweep` that ends before it is saturated."),
    PolicyRow(
        "concurrency_serialized",
        ("stages",),
        "No level of `concurrency` finishes more than 1.1 times the items a second of the lowest.",
    ),
    PolicyRow("concurrency_fails", ("stages",), "Requests of a level above 1 raised."),
    PolicyRow("profiler_distorts", ("regions",), "Profiled runs took more than 1.5 times as long as plain ones."),
    PolicyRow(
        "replay_timing_undecided",
        ("harness",),
        "The output is the same, and the interval of the timing ratio is too wide.",
    ),
    PolicyRow(
        "replay_timing_differs", ("harness",), "The output is the same, and the timing ratio is outside 0.95 to 1.05."
    ),
    PolicyRow("replay_faithful", ("harness",), "The output is the same, and so is the duration."),
)
"""In the order in which their next experiments matter: one that settles a question before one that refines an answer.

What is no row's `skips` goes on to the next rung.
"""

_RANK: Final = {row.kind: place for place, row in enumerate(POLICY)}


def smallest_next_experiment(findings: Sequence[Finding]) -> Finding | None:
    """The finding whose experiment is the one to begin with: of the first kind in the table, the first that was "
    "found."""
    return min(findings, key=lambda finding: _RANK[finding.kind], default=None)


def rungs_to_skip(findings: Sequence[Finding]) -> dict[str, str]:
    """The rungs that the findings make needless, with the reason."""
    kinds = {finding.kind for finding in findings}
    skipped: dict[str, str] = {}
    for row in POLICY:
        if row.kind in kinds:
            for rung in row.skips:
                skipped.setdefault(rung, row.reason)
    return skipped
