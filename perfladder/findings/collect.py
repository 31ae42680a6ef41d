"""All findings of a climb, from the results of its rungs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from perfladder.findings.background import Background
from perfladder.findings.finding import Finding
from perfladder.findings.harness import capture_findings, harness_findings
from perfladder.findings.kernels import kernels_findings
from perfladder.findings.nsight import kernel_diagnosis
from perfladder.findings.regions import regions_findings
from perfladder.findings.setup import out_of_memory_findings
from perfladder.findings.stages import stages_findings
from perfladder.rungs.base import RungResult
from perfladder.rungs.capture import CaptureResult
from perfladder.rungs.harness import HarnessResult
from perfladder.rungs.kernels import KernelsResult
from perfladder.rungs.ncu import NcuResult
from perfladder.rungs.regions import RegionsResult
from perfladder.rungs.stages import StagesResult
from perfladder.target import LoadedInfo
from perfladder.workload import Workload

_DERIVATIONS: Final[dict[type[RungResult], Callable[[Any, Background], list[Finding]]]] = {
    StagesResult: stages_findings,
    HarnessResult: harness_findings,
    RegionsResult: regions_findings,
    KernelsResult: kernels_findings,
    NcuResult: kernel_diagnosis,
}


def collect_findings(
    workload: Workload, info: LoadedInfo, results: Mapping[str, RungResult], *, source: str | None = None
) -> list[Finding]:
    """Derive all findings from the results so far; the same results always give the same findings.

    Args:
        workload: What was run.
        info: What was found when the target was loaded.
        results: By rung, in the order in which they were made.
        source: What names the workload on a command line; by default its own name.
    """
    stages = results.get("stages")
    scenarios = stages.scenarios if isinstance(stages, StagesResult) else []
    modules = frozenset(stage.name for scenario in scenarios for stage in scenario.stages if stage.is_module)
    background = Background(workload, info, source or workload.name, modules)
    found: list[Finding] = []
    for result in results.values():
        derive = _DERIVATIONS.get(type(result))
        if result.status == "done" and derive is not None:
            found += derive(result, background)
        elif isinstance(result, CaptureResult) and result.status == "not_applicable" and result.stage is not None:
            found += capture_findings(result)
        found += out_of_memory_findings(result, background)
    return found
