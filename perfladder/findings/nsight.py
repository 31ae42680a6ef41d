"""Findings about one kernel: the question that rung 4 leaves open, and what Nsight Compute answers."""

from __future__ import annotations

from typing import Final

from perfladder.findings.background import Background, spread_text
from perfladder.findings.finding import Evidence, Finding
from perfladder.nsight.diagnosis import Diagnosis, Verdict
from perfladder.nsight.names import function_name
from perfladder.nsight.question import achieved_frac, open_question
from perfladder.rungs.kernels import KernelsResult
from perfladder.rungs.ncu import NcuResult, ProfiledLaunch
from perfladder.text import clause

_MAX_EVIDENCE: Final = 8

_NEXT: Final[dict[Verdict, str]] = {
    "compute": (
        "Give it less to compute or faster units: a lower precision, tensor cores, another algorithm. Check the output "
        "on the replay, then time the workload."
    ),
    "memory": (
        "Move fewer bytes: fuse it with its neighbours, use a smaller type, or a layout that reads each byte once. "
        "Check the output on the replay, then time the workload."
    ),
    "latency": (
        "Give the schedulers more that is ready: more warps or more independent work in a thread; look at the stall "
        "reason first. Then time the workload."
    ),
    "launch": (
        "Give it more blocks at once: a larger batch, one launch in place of several, or work beside it on another "
        "stream. Then time the workload."
    ),
    "balanced": "Leave it as it is, unless its work can be left out: both units are used.",
    "undecided": (
        "Profile more launches (--launch-count), another launch (--launch-skip) or more sections (--section) before "
        "changing anything."
    ),
}


def kernel_question(result: KernelsResult, background: Background) -> list[Finding]:
    """That one kernel's slowness is unexplained, if it is."""
    share = open_question(result)
    if share is None:
        return []
    achieved = achieved_frac(result, share.name)
    spread = spread_text(share, result.total_us)
    reach = "how near it is to its roof is unknown" if achieved is None else f"it reaches {achieved:.0%} of its roof"
    evidence = [Evidence(metric="share", value=share.share, unit="of kernel time", source="kernels.json: by_kernel")]
    if achieved is not None:
        evidence.append(
            Evidence(metric="achieved_frac", value=achieved, unit="of the nearer roof", source="kernels.json: ranking")
        )
    return [
        Finding(
            kind="kernel_question",
            rung="kernels",
            stage=result.stage,
            claim=(
                f"Kernel {function_name(share.name)} holds {share.share:.0%} of the kernel time, in "
                f"{share.count} {'launch' if share.count == 1 else 'launches'} a call, and {reach}: what holds it back "
                "is not known."
            ),
            evidence=evidence,
            uncertainty=(
                f"a share of profiled replays{f' ({spread})' if spread else ''}; the roof is by counted work, without "
                "caches"
            ),
            refuted_by="another kernel with a larger share",
            next_experiment="If it is yours to change, look at it with Nsight Compute.",
            next_command=background.command("run", "--until", "ncu"),
        )
    ]


def kernel_diagnosis(result: NcuResult, background: Background) -> list[Finding]:
    """What limits the kernel, or that it is undecided."""
    if result.verdict is None or result.statement is None or result.chosen is None:
        return []
    own = [launch for launch in result.launches if launch.is_asked_kernel] or result.launches
    diagnosis = own[0].diagnosis
    return [
        Finding(
            kind="kernel_diagnosis",
            rung="ncu",
            stage=result.stage,
            claim=f"Kernel {result.chosen.function}: {result.statement}",
            evidence=_evidence(diagnosis),
            uncertainty=_uncertainty(result, own),
            refuted_by="another launch of it, or other inputs, with which these metrics change sides",
            next_experiment=_NEXT[result.verdict],
        )
    ]


def _evidence(diagnosis: Diagnosis) -> list[Evidence]:
    return [
        Evidence(
            metric=observation.metric,
            value=observation.value,
            unit=observation.unit,
            source="ncu.json: launches[].diagnosis",
        )
        for observation in diagnosis.observations[:_MAX_EVIDENCE]
    ]


def _uncertainty(result: NcuResult, own: list[ProfiledLaunch]) -> str:
    assert result.chosen is not None
    caches = "emptied caches" if result.chosen.cache_control == "all" else "caches as they were"
    clocks = "clocks as they were" if result.chosen.clock_control == "none" else "the base clock"
    text = f"{len(own)} of the kernel's launches, each repeated by ncu with {caches} and {clocks}"
    reasons = own[0].diagnosis.undecided_because if result.verdict == "undecided" else []
    return "; ".join([text, *map(clause, reasons)])
