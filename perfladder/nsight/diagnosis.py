"""From a kernel's metrics to what limits it: several that agree, what each rules out, and `undecided` otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from perfladder.models import Model
from perfladder.nsight import thresholds as t
from perfladder.nsight.roofline import RooflinePoint, roofline_point
from perfladder.nsight.thresholds import limit

Verdict = Literal["compute", "memory", "latency", "launch", "balanced", "undecided"]
Level = Literal["dram", "l2", "l1"]

_LEVELS: tuple[tuple[Level, str, str], ...] = (
    ("dram", t.DRAM, "device memory"),
    ("l2", t.L2, "the L2 cache"),
    ("l1", t.L1, "the L1 cache"),
)


class Observation(Model):
    """What one metric says."""

    metric: str
    value: float
    unit: str
    statement: str
    rules_out: str | None = Field(default=None, description="What it cannot be, as this metric stands.")


class Stall(Model):
    """What warps wait for, as a part of the time between two instructions of a warp."""

    reason: str
    share: float


class Diagnosis(Model):
    """What limits a kernel, as far as its metrics tell."""

    verdict: Verdict
    level: Level | None = Field(default=None, description="Which memory, where memory limits.")
    statement: str
    observations: list[Observation] = []
    stalls: list[Stall] = Field(default=[], description="The largest first.")
    busiest_pipe: str | None = None
    occupancy_limiter: str | None = Field(default=None, description="The resource that bounds the possible occupancy.")
    tail_frac: float | None = Field(default=None, description="Part of all places for blocks that stays empty.")
    roofline: RooflinePoint | None = None
    rules_out: list[str] = []
    undecided_because: list[str] = []
    missing: list[str] = Field(default=[], description="Metrics that a verdict would have rested on.")


def diagnose(metrics: Mapping[str, float]) -> Diagnosis:
    """Judge one launch by its metrics, by name as ncu gives them; the same metrics always give the same diagnosis."""
    missing = [name for name in (t.COMPUTE, t.MEMORY) if name not in metrics]
    stalls = _stalls(metrics)
    observations = [
        *_throughputs(metrics),
        *_pipes(metrics),
        *_occupancy(metrics),
        *_issue(metrics),
        *_stall_observations(metrics, stalls),
        *_caches(metrics),
        *_launch(metrics),
    ]
    verdict, level, statement, because = _verdict(metrics, stalls) if not missing else _unknown(missing)
    return Diagnosis(
        verdict=verdict,
        level=level,
        statement=statement,
        observations=observations,
        stalls=stalls,
        busiest_pipe=(_busiest_pipe(metrics) or (None, 0.0))[0],
        occupancy_limiter=_limiter(metrics),
        tail_frac=_tail_frac(metrics),
        roofline=roofline_point(metrics),
        rules_out=[observation.rules_out for observation in observations if observation.rules_out],
        undecided_because=because,
        missing=missing,
    )


_Judged = tuple[Verdict, Level | None, str, list[str]]


def _unknown(missing: list[str]) -> _Judged:
    because = [f"{name} was not collected: add its section, SpeedOfLight." for name in missing]
    return "undecided", None, "What limits it is undecided: its throughput is not known.", because


def _verdict(metrics: Mapping[str, float], stalls: list[Stall]) -> _Judged:
    compute, memory = metrics[t.COMPUTE], metrics[t.MEMORY]
    figures = f"compute at {compute:.0f} % and memory at {memory:.0f} % of their peaks"
    busy = limit("busy")
    if compute < busy and memory < busy:
        return _of_an_idle_device(metrics, stalls, figures)
    if compute >= busy and memory >= busy and abs(compute - memory) < limit("balanced"):
        if _feeds_tensor_cores(metrics):
            statement = (
                f"Compute limits it: {figures}, but of memory only the L1 cache, whose shared memory feeds the tensor "
                "cores, is used so much."
            )
            return "compute", None, statement, []
        return "balanced", None, f"Both limit it, {figures}: less of one alone wins little.", []
    return _of_compute(metrics, stalls, figures) if compute > memory else _of_memory(metrics, stalls, figures)


def _feeds_tensor_cores(metrics: Mapping[str, float]) -> bool:
    """Whether tensor cores are busy, and no memory outside the multiprocessor is.

    Operands that tensor cores read from shared memory count as traffic of the L1 cache, which is then as busy as they.
    """
    pipe = _busiest_pipe(metrics)
    is_tensor = pipe is not None and pipe[0].startswith("tensor") and pipe[1] >= limit("busy_pipe")
    outside = [metrics.get(name) for name in (t.DRAM, t.L2)]
    return is_tensor and all(value is not None and value < limit("memory_level") for value in outside)


def _of_an_idle_device(metrics: Mapping[str, float], stalls: list[Stall], figures: str) -> _Judged:
    """Neither compute nor memory is used much: too few blocks, or warps that wait."""
    waves, issue = metrics.get(t.WAVES), metrics.get(t.ISSUE)
    if waves is not None and waves < limit("full_wave"):
        statement = f"Its launch is too small for the device: {waves:.2g} waves of blocks, {figures}."
        return "launch", None, statement, []
    cause = _cause_of_latency(metrics, stalls)
    if issue is not None and issue < limit("issue") and cause is not None:
        statement = (
            f"Latency limits it: neither unit is used much ({figures}), a scheduler issues {issue:.2f} instructions a "
            f"cycle, and {cause}."
        )
        return "latency", None, statement, []
    because = []
    if waves is None:
        because.append(f"{t.WAVES} was not collected, so that a launch too small for the device is possible.")
    if issue is None:
        because.append(f"{t.ISSUE} was not collected, so that nothing tells whether the schedulers find work.")
    elif issue >= limit("issue"):
        because.append(f"Instructions are issued at {issue:.2f} a cycle, which contradicts waiting.")
    if cause is None:
        because.append("No stall reason stands out, and occupancy is not short.")
    return "undecided", None, f"What limits it is undecided: neither unit is used much ({figures}).", because


def _cause_of_latency(metrics: Mapping[str, float], stalls: list[Stall]) -> str | None:
    top = next((stall for stall in stalls if stall.share >= limit("stall") and stall.reason != "selected"), None)
    if top is not None:
        return f"warps spend {top.share:.0%} of their time waiting ({top.reason})"
    possible = metrics.get(t.POSSIBLE_OCCUPANCY)
    if possible is not None and possible < limit("possible_occupancy"):
        return f"only {possible:.0f} % of the warps fit ({_limiter(metrics) or 'limiter unknown'})"
    return None


def _of_compute(metrics: Mapping[str, float], stalls: list[Stall], figures: str) -> _Judged:
    """A busy unit of the multiprocessor or stalls on one must agree with the throughput."""
    pipe, top = _busiest_pipe(metrics), _top_stall(stalls)
    is_pipe_busy = pipe is not None and pipe[1] >= limit("busy_pipe")
    is_waiting_for_compute = top is not None and t.is_stall_of_compute(top.reason)
    if is_pipe_busy or is_waiting_for_compute:
        witness = f"pipe {pipe[0]} at {pipe[1]:.0f} %" if is_pipe_busy and pipe else f"stalls on {top and top.reason}"
        return "compute", None, f"Compute limits it: {figures}, and {witness} agrees.", []
    because = []
    if pipe is None:
        because.append("No pipe was measured: add the section ComputeWorkloadAnalysis.")
    else:
        because.append(f"The busiest pipe, {pipe[0]}, is used {pipe[1]:.0f} % only.")
    because.append(_stall_reason(top, "a unit that computes"))
    return "undecided", None, f"What limits it is undecided: {figures}, but nothing else agrees.", because


def _of_memory(metrics: Mapping[str, float], stalls: list[Stall], figures: str) -> _Judged:
    """One level of memory that is busy must agree with the throughput, or stalls on memory."""
    known = [(level, metrics[name], what) for level, name, what in _LEVELS if name in metrics]
    busy = next((entry for entry in known if entry[1] >= limit("memory_level")), None)
    if busy is not None:
        level, value, what = busy
        return "memory", level, f"Memory limits it: {figures}, and {what} is at {value:.0f} %.", []
    top = _top_stall(stalls)
    if top is not None and t.is_stall_of_memory(top.reason):
        statement = f"Memory limits it: {figures}, and {top.share:.0%} of the stalls are on it ({top.reason})."
        return "memory", None, statement, []
    because = [f"{_capital(what)} is used {value:.0f} % only." for _, value, what in known]
    if not known:
        because.append("No level of memory was measured: add the section SpeedOfLight.")
    because.append(_stall_reason(top, "memory"))
    return "undecided", None, f"What limits it is undecided: {figures}, but nothing else agrees.", because


def _stall_reason(top: Stall | None, what: str) -> str:
    if top is None:
        return "No stall reason stands out, or none was measured (section WarpStateStats)."
    return f"Warps wait for {top.reason} most ({top.share:.0%}), which is not {what}."


def _throughputs(metrics: Mapping[str, float]) -> list[Observation]:
    names = {
        t.COMPUTE: "compute",
        t.MEMORY: "memory",
        **{name: what for _, name, what in _LEVELS},
    }
    found = []
    for name, what in names.items():
        if name not in metrics:
            continue
        value = metrics[name]
        is_idle = value < limit("busy")
        statement = f"{_capital(what)} is at {value:.0f} % of its peak"
        statement += ": little is left to win there." if value >= limit("saturated") else "."
        rules_out = f"{_capital(what)} at {value:.0f} %: its throughput is no limit." if is_idle else None
        found.append(Observation(metric=name, value=value, unit="%", statement=statement, rules_out=rules_out))
    return found


def _pipes(metrics: Mapping[str, float]) -> list[Observation]:
    pipe = _busiest_pipe(metrics)
    if pipe is None:
        return []
    name, value, metric = pipe
    return [
        Observation(
            metric=metric,
            value=value,
            unit="%",
            statement=f"The busiest pipe is {name}, at {value:.0f} %.",
            rules_out=None if value >= limit("busy_pipe") else f"No pipe is used more than {value:.0f} %: none limits.",
        )
    ]


def _occupancy(metrics: Mapping[str, float]) -> list[Observation]:
    achieved, possible = metrics.get(t.ACHIEVED_OCCUPANCY), metrics.get(t.POSSIBLE_OCCUPANCY)
    found = []
    if possible is not None:
        is_short = possible < limit("possible_occupancy")
        limiter = _limiter(metrics)
        statement = f"{possible:.0f} % of the warps fit{f', limited by {limiter}' if is_short and limiter else ''}."
        rules_out = None if is_short else f"{possible:.0f} % of the warps fit: no resource keeps warps away."
        found.append(
            Observation(metric=t.POSSIBLE_OCCUPANCY, value=possible, unit="%", statement=statement, rules_out=rules_out)
        )
    if achieved is not None:
        lost = None if possible is None else possible - achieved
        is_lost = lost is not None and lost > limit("lost_occupancy")
        statement = f"{achieved:.0f} % of the warps were there" + (
            ": blocks end at different times, or are too few." if is_lost else "."
        )
        rules_out = None if lost is None or is_lost else "As many warps were there as fit: blocks are spread evenly."
        found.append(
            Observation(metric=t.ACHIEVED_OCCUPANCY, value=achieved, unit="%", statement=statement, rules_out=rules_out)
        )
    return found


def _issue(metrics: Mapping[str, float]) -> list[Observation]:
    if t.ISSUE not in metrics:
        return []
    value = metrics[t.ISSUE]
    is_low = value < limit("issue")
    return [
        Observation(
            metric=t.ISSUE,
            value=value,
            unit="instructions a cycle",
            statement=f"A scheduler issues {value:.2f} instructions a cycle.",
            rules_out=None if is_low else "The schedulers nearly always find a warp that is ready: latency is hidden.",
        )
    ]


def _stall_observations(metrics: Mapping[str, float], stalls: list[Stall]) -> list[Observation]:
    if not stalls:
        return []
    top = stalls[0]
    return [
        Observation(
            metric=f"{t.STALL_PREFIX}{top.reason}{t.STALL_SUFFIX}",
            value=metrics[f"{t.STALL_PREFIX}{top.reason}{t.STALL_SUFFIX}"],
            unit="cycles",
            statement=f"Warps spend {top.share:.0%} of their time on {top.reason}.",
            rules_out=None if top.share >= limit("stall") else "No single stall reason explains the waiting.",
        )
    ]


def _caches(metrics: Mapping[str, float]) -> list[Observation]:
    found = []
    for name, what, next_level in ((t.L1_HITS, "L1", "the L2 cache"), (t.L2_HITS, "L2", "device memory")):
        if name in metrics:
            value = metrics[name]
            is_cached = value >= limit("cached")
            found.append(
                Observation(
                    metric=name,
                    value=value,
                    unit="%",
                    statement=f"The {what} cache serves {value:.0f} % of what is asked of it.",
                    rules_out=f"{what} serves {value:.0f} %: little of its traffic reaches {next_level}."
                    if is_cached
                    else None,
                )
            )
    return found


def _launch(metrics: Mapping[str, float]) -> list[Observation]:
    waves, tail = metrics.get(t.WAVES), _tail_frac(metrics)
    if waves is None:
        return []
    blocks, units = metrics.get(t.GRID), next((metrics[m] for m in t.MULTIPROCESSORS if m in metrics), None)
    size = f" ({blocks:.0f} blocks on {units:.0f} multiprocessors)" if blocks is not None and units is not None else ""
    is_small = waves < limit("full_wave")
    has_tail = tail is not None and tail >= limit("tail")
    statement = f"The launch makes {waves:.2f} waves of blocks{size}"
    if is_small:
        statement += ": fewer than the device holds at once."
    elif has_tail:
        statement += f"; the last one leaves {tail:.0%} of all places empty."
    else:
        statement += "."
    rules_out = None if is_small or has_tail else "The launch fills the device, and its last wave costs little."
    return [Observation(metric=t.WAVES, value=waves, unit="waves", statement=statement, rules_out=rules_out)]


def _stalls(metrics: Mapping[str, float]) -> list[Stall]:
    """Shares of the time between two instructions of a warp; issuing itself is `selected`."""
    cycles = {
        name.removeprefix(t.STALL_PREFIX).removesuffix(t.STALL_SUFFIX): value
        for name, value in metrics.items()
        if name.startswith(t.STALL_PREFIX) and name.endswith(t.STALL_SUFFIX) and math.isfinite(value)
    }
    whole = metrics.get(t.WARP_LATENCY) or sum(cycles.values())
    if not whole or not math.isfinite(whole):
        return []
    ordered = sorted(cycles.items(), key=lambda item: (-item[1], item[0]))
    return [Stall(reason=reason, share=min(value / whole, 1.0)) for reason, value in ordered]


def _top_stall(stalls: list[Stall]) -> Stall | None:
    return stalls[0] if stalls and stalls[0].share >= limit("stall") else None


def _busiest_pipe(metrics: Mapping[str, float]) -> tuple[str, float, str] | None:
    """Name, utilization and metric of the pipe that computes and is used most."""
    pipes = [
        (name.removesuffix(t.PIPE_SUFFIX).removeprefix(prefix).removesuffix("_cycles_active"), value, name)
        for name, value in metrics.items()
        for prefix in t.PIPE_PREFIXES
        if name.startswith(prefix) and name.endswith(t.PIPE_SUFFIX)
    ]
    computing = (pipe for pipe in pipes if pipe[0] not in t.NOT_COMPUTING)
    return max(computing, key=lambda pipe: (pipe[1], pipe[2]), default=None)


def _limiter(metrics: Mapping[str, float]) -> str | None:
    """The resource, or the resources, by which the fewest blocks fit."""
    limits = {what: metrics[name] for name, what in t.OCCUPANCY_LIMITS.items() if name in metrics}
    if not limits:
        return None
    return " and ".join(what for what, blocks in limits.items() if blocks == min(limits.values()))


def _tail_frac(metrics: Mapping[str, float]) -> float | None:
    waves = metrics.get(t.WAVES)
    if waves is None or not waves >= limit("full_wave"):
        return None
    return 1 - waves / math.ceil(waves)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
