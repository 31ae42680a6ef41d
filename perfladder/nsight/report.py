"""Reads an `.ncu-rep` file through NVIDIA's own package; in a process of its own, since that package is native code.

Started as `python -m perfladder.nsight.report REPORT OUTPUT [FOLDER_OF_THE_PACKAGE]`.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from perfladder.errors import RungError
from perfladder.files import write_atomically
from perfladder.models import Model

PACKAGE: Final = "ncu_report"


class MetricRow(Model):
    """One number of a report: of which launch, in which section, with its unit as ncu gives it."""

    launch: int
    section: str = Field(description="Empty for a metric that no section shows.")
    metric: str
    unit: str
    value: float


class ReportedLaunch(Model):
    """One launch of a kernel that ncu has profiled."""

    index: int
    name: str = Field(description="The function's name, as ncu filters by it.")
    demangled_name: str
    nvtx_ranges: list[str] = []


class NcuReport(Model):
    """What a report file holds, as plain numbers."""

    launches: list[ReportedLaunch]
    values: list[MetricRow]

    def metrics_of(self, launch: int) -> Mapping[str, float]:
        """Metrics of one launch by name; in each section they are the same."""
        return {row.metric: row.value for row in self.values if row.launch == launch}


def read_report(path: Path, package_folder: Path | None = None) -> NcuReport:
    """Read a report file.

    Args:
        path: The `.ncu-rep` file.
        package_folder: Where NVIDIA's package is, if it is not installed: Nsight Compute brings one along.

    Raises:
        RungError: The file cannot be read as a report, or nothing is in it.
    """
    if package_folder is not None:
        sys.path.insert(0, str(package_folder))
    package = importlib.import_module(PACKAGE)
    try:
        actions = [action for scope in package.load_report(str(path)) for action in scope]
    except Exception as error:  # The native reader raises what it raises.
        raise RungError(f"{path} cannot be read as a report of Nsight Compute: {error}.") from error
    if not actions:
        raise RungError(f"{path} cannot be read as a report of Nsight Compute, or holds no launch.")
    return NcuReport(
        launches=[_launch(index, action) for index, action in enumerate(actions)],
        values=[row for index, action in enumerate(actions) for row in _rows(index, action)],
    )


def _launch(index: int, action: Any) -> ReportedLaunch:
    return ReportedLaunch(
        index=index,
        name=action.name(action.NameBase_FUNCTION),
        demangled_name=action.name(action.NameBase_DEMANGLED),
        nvtx_ranges=_nvtx_ranges(action),
    )


def _nvtx_ranges(action: Any) -> list[str]:
    state = action.nvtx_state()
    if state is None:
        return []
    return [name for domain in state.domains() for name in state.domain_by_id(domain).push_pop_ranges()]


def _rows(index: int, action: Any) -> Iterator[MetricRow]:
    """Each metric once in each section that shows it, and those that none shows.

    The reader of Nsight Compute 2025.3 and older tells no sections.
    """
    seen = set()
    for section in action.sections() if hasattr(action, "sections") else ():
        names = {metric.name(): None for metric in (*section.header_metrics(), *section.body_metrics())}
        for name in names:
            row = _row(index, section.identifier(), action.metric_by_name(name))
            if row is not None:
                seen.add(name)
                yield row
    for name in sorted(set(action.metric_names()) - seen):
        row = _row(index, "", action.metric_by_name(name))
        if row is not None:
            yield row


def _row(index: int, section: str, metric: Any) -> MetricRow | None:
    """A number; texts and metrics with one value an instruction have none."""
    value = metric.value() if metric is not None and metric.has_value() else None
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return MetricRow(launch=index, section=section, metric=metric.name(), unit=metric.unit() or "", value=float(value))


def main(arguments: list[str]) -> int:
    """Read one report and write it as JSON."""
    report, output, *folder = arguments
    try:
        found = read_report(Path(report), Path(folder[0]) if folder else None)
    except (RungError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    write_atomically(Path(output), found.model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
