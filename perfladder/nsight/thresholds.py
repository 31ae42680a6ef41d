"""The one table of limits by which a kernel's metrics are judged; `diagnosis.py` combines what they say."""

from __future__ import annotations

from typing import Final, NamedTuple

COMPUTE: Final = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
MEMORY: Final = "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"
DRAM: Final = "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"
L2: Final = "lts__throughput.avg.pct_of_peak_sustained_elapsed"
L1: Final = "l1tex__throughput.avg.pct_of_peak_sustained_active"
L1_HITS: Final = "l1tex__t_sector_hit_rate.pct"
L2_HITS: Final = "lts__t_sector_hit_rate.pct"
ACHIEVED_OCCUPANCY: Final = "sm__warps_active.avg.pct_of_peak_sustained_active"
POSSIBLE_OCCUPANCY: Final = "sm__maximum_warps_per_active_cycle_pct"
OCCUPANCY_LIMITS: Final = {
    "launch__occupancy_limit_registers": "registers",
    "launch__occupancy_limit_shared_mem": "shared memory",
    "launch__occupancy_limit_warps": "warps of a block",
    "launch__occupancy_limit_blocks": "blocks of a multiprocessor",
    "launch__occupancy_limit_barriers": "barriers",
}
"""By how many blocks fit on a multiprocessor at once, as far as this resource goes."""
ISSUE: Final = "smsp__issue_active.avg.per_cycle_active"
WARP_LATENCY: Final = "smsp__average_warp_latency_per_inst_issued.ratio"
STALL_PREFIX: Final = "smsp__average_warps_issue_stalled_"
STALL_SUFFIX: Final = "_per_issue_active.ratio"
PIPE_PREFIXES: Final = ("sm__pipe_", "sm__inst_executed_pipe_")
PIPE_SUFFIX: Final = ".avg.pct_of_peak_sustained_elapsed"
NOT_COMPUTING: Final = ("adu", "lsu", "tex", "tma", "tmem", "workid")
"""Pipes that fetch, store or hand out work: much used, they are no sign of much arithmetic."""
WAVES: Final = "launch__waves_per_multiprocessor"
GRID: Final = "launch__grid_size"
MULTIPROCESSORS: Final = ("launch__sm_count", "device__attribute_multiprocessor_count")


class Threshold(NamedTuple):
    """One limit.

    Attributes:
        name: How `diagnosis.py` and the documentation call it.
        metric: What is held against it.
        limit: The number, in the metric's own unit.
        unit: That unit.
        says: What it means to be on the far side.
        source: Where the number is from.
    """

    name: str
    metric: str
    limit: float
    unit: str
    says: str
    source: str


_SOL: Final = "Nsight Compute, rule SOLBottleneck"

THRESHOLDS: Final = (
    Threshold("busy", f"{COMPUTE}, {MEMORY}", 60.0, "%", "A unit from here on is used much; below, it is not.", _SOL),
    Threshold(
        "saturated", f"{COMPUTE}, {MEMORY}", 80.0, "%", "From here on there is little left to win in this unit.", _SOL
    ),
    Threshold(
        "balanced", f"{COMPUTE}, {MEMORY}", 10.0, "points", "Compute and memory so close: neither limits alone.", _SOL
    ),
    Threshold("full_wave", WAVES, 1.0, "waves", "Below, the blocks do not fill the device once.", _SOL),
    Threshold(
        "memory_level",
        f"{DRAM}, {L2}, {L1}",
        60.0,
        "%",
        "The level of memory that is used much, the outermost first.",
        "as `busy`: the memory throughput is the largest of its levels",
    ),
    Threshold(
        "busy_pipe",
        f"{PIPE_PREFIXES[0]}*{PIPE_SUFFIX}, {PIPE_PREFIXES[1]}*{PIPE_SUFFIX}",
        60.0,
        "%",
        "One unit that computes is used much; below for all, none limits. Pipes that fetch or store do not count.",
        "as `busy`: the compute throughput is the largest of its units",
    ),
    Threshold(
        "stall",
        f"{STALL_PREFIX}*{STALL_SUFFIX}",
        0.3,
        f"of {WARP_LATENCY}",
        "A warp spends so much of its time between two instructions waiting for this.",
        "Nsight Compute, rule CPIStall",
    ),
    Threshold(
        "issue",
        ISSUE,
        0.6,
        "instructions a cycle",
        "Below, the schedulers often find no warp that is ready.",
        "Nsight Compute, rule IssueSlotUtilization",
    ),
    Threshold(
        "possible_occupancy",
        POSSIBLE_OCCUPANCY,
        80.0,
        "%",
        "Below, a resource keeps warps away that could hide latency.",
        "Nsight Compute, rule TheoreticalOccupancy",
    ),
    Threshold(
        "lost_occupancy",
        f"{POSSIBLE_OCCUPANCY} minus {ACHIEVED_OCCUPANCY}",
        10.0,
        "points",
        "Above, blocks end at different times, or are too few.",
        "Nsight Compute, rule AchievedOccupancy",
    ),
    Threshold(
        "tail",
        WAVES,
        0.2,
        "of the time",
        "The last wave is not full, and so much of all places for blocks stays empty.",
        "ours: 1 - waves / (waves, rounded up); a fifth of the time is worth a change of the grid",
    ),
    Threshold(
        "cached",
        f"{L2_HITS}, {L1_HITS}",
        80.0,
        "%",
        "From here on the cache serves most of what is asked of it.",
        "ours: a fifth of the traffic is left for the next level",
    ),
)
"""Limits of NVIDIA's rules are those in the files `sections/*.py` that Nsight Compute 2025 installs."""

_BY_NAME: Final = {row.name: row for row in THRESHOLDS}


def limit(name: str) -> float:
    """The number of a row."""
    return _BY_NAME[name].limit


def is_stall_of_memory(reason: str) -> bool:
    """Whether warps that wait for this wait for memory."""
    return reason in ("long_scoreboard", "lg_throttle", "tex_throttle", "drain", "membar", "imc_miss")


def is_stall_of_compute(reason: str) -> bool:
    """Whether warps that wait for this wait for a unit that computes, or for their turn."""
    return reason in ("math_pipe_throttle", "gmma", "not_selected", "selected", "dispatch_stall")
