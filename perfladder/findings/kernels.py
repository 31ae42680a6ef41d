"""Findings of rung 4: which operators hold the time of the stage, and what they could win."""

from __future__ import annotations

from perfladder.findings.background import Background, spread_text, where
from perfladder.findings.extra_passes import fusable_operators, layout_conversions
from perfladder.findings.finding import Evidence, Finding
from perfladder.findings.host_bound import Pace, pace_findings
from perfladder.findings.movement import transfer_findings
from perfladder.findings.nsight import kernel_question
from perfladder.findings.possible_win import possible_win
from perfladder.profiling.shares import Share
from perfladder.rungs.kernels import KernelsResult
from perfladder.trace.dynamo import is_graph_call, told_operator
from perfladder.trace.launches import FamilyRow
from perfladder.trace.repeats import leads


def kernels_findings(result: KernelsResult, background: Background) -> list[Finding]:
    """Which operators hold the time, what they could win, and who sets the stage's pace."""
    if not result.by_operator:
        return []
    return [
        *_dominant(result),
        *_device_bound(result),
        *layout_conversions(result, background),
        *fusable_operators(result, background),
        *possible_win(result),
        *kernel_question(result, background),
        *_pace_of_call(result, background),
    ]


def _dominant(result: KernelsResult) -> list[Finding]:
    """Which operators hold the time, if the first is the same in most of the replays."""
    what = "kernel time" if result.kind == "kernels" else "operator time"
    top, leaders = result.replaceable[0], result.replaceable[:3]
    if not leads(top, result.replaceable):
        return []
    others = "".join(f", {told_operator(share.name)} {share.share:.0%}" for share in leaders[1:])
    blocks = result.positions.by_block
    block = blocks[0] if leads(blocks[0], blocks) else None
    is_whole = len(blocks) == 1 and blocks[0].name == result.stage  # it has no modules inside, or none that are called
    spread = spread_text(top, result.total_us)
    name = told_operator(top.name)
    replays = f"{name}: {spread} of one call" if spread else f"{result.repeats} profiled replays of one call"
    return [
        Finding(
            kind="dominant_kernels",
            rung="kernels",
            stage=result.stage,
            claim=(
                f"In {result.stage}, {name} holds {top.share:.0%} of the {what}{others}"
                f"{_heaviest(block) if block and not is_whole else ''}."
            ),
            evidence=[
                Evidence(
                    metric=f"{told_operator(share.name)} share",
                    value=share.share,
                    unit=f"of {what}",
                    source=where("kernels", "by_operator"),
                )
                for share in leaders
            ],
            uncertainty=f"{replays}; shares, no latencies",
            refuted_by="another order in an unprofiled comparison with one of these replaced",
            next_experiment=_at_the_top(result, top, block),
        )
    ]


def _at_the_top(result: KernelsResult, top: Share, block: Share | None) -> str:
    if result.bound is not None and result.bound.verdict == "host":
        return "The host sets the pace here, so that faster kernels win little: launch fewer of them first."
    if is_graph_call(top.name):
        return (
            f"What {told_operator(top.name)} runs is fused already: try other options of the compiler, or another "
            "backend, and compare on the whole workload."
        )
    place = f" in {block.name}" if block else ""
    return f"Replace or fuse {top.name}{place}, check the output on the replay, time the workload."


def _heaviest(block: Share) -> str:
    many = block.num_modules or 1
    which = f"the heaviest blocks are {block.name} ({many})" if many > 1 else f"the heaviest block is {block.name}"
    return f"; {which} with {block.share:.0%}"


def _device_bound(result: KernelsResult) -> list[Finding]:
    """The device sets the pace; and which family of kernels its time is in, if that is the same in most replays."""
    if result.bound is None or result.bound.verdict != "device" or not result.families:
        return []
    first = result.families[0] if leads(result.families[0], result.families) else None
    busy = result.bound.plain_busy_frac
    pace = Evidence(
        metric="plain_busy_frac" if busy is not None else "profiled_busy_frac",
        value=busy if busy is not None else result.bound.profiled_busy_frac or 0.0,
        unit="of a call",
        source=where("kernels", "bound"),
    )
    spread = spread_text(first, result.total_us) if first else ""
    return [
        Finding(
            kind="device_bound",
            rung="kernels",
            stage=result.stage,
            claim=f"The device sets the pace of {result.stage}" + (_family_claim(first) if first else "."),
            evidence=[*([_family_evidence(first)] if first else []), pace],
            uncertainty=(
                f"{f'{first.family}: {spread}; ' if first and spread else ''}"
                f"{'' if first else 'which family holds most time changes from replay to replay; '}"
                "says which kernels hold the time, and not what limits them: rungs 4 (roofline) and 5 do"
            ),
            refuted_by="a plain call in which the device waits",
            next_experiment=(
                f"Read the roofline rows of {first.family if first else 'the largest families'}; try another "
                "precision, layout or implementation of it on the replay, and check its output."
            ),
        )
    ]


def _family_claim(row: FamilyRow) -> str:
    return f", and {row.share:.0%} of its kernel time is {row.family} ({row.count} kernels a call)."


def _family_evidence(row: FamilyRow) -> Evidence:
    return Evidence(
        metric=f"{row.family} share", value=row.share, unit="of kernel time", source=where("kernels", "families")
    )


def _pace_of_call(result: KernelsResult, background: Background) -> list[Finding]:
    if result.host is None:
        return []
    pace = Pace(
        rung="kernels",
        stage=result.stage,
        host=result.host,
        idle=result.idle,
        busy_ms=result.device_busy_ms,
        plain_ms=result.unprofiled_ms,
        waits=result.waits,
    )
    return transfer_findings(pace, result.copies, background) or pace_findings(pace, background)
