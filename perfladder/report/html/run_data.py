"""What the sections of a run's page are made from: its report, and the samples and lists that the report leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from perfladder.ladder import RUNGS, rung_named
from perfladder.report.html.blocks import Cell, Code, Column, Inline, Section, absent
from perfladder.report.html.plots import colours_of
from perfladder.report.model import Report
from perfladder.rungs.base import R, RungResult
from perfladder.rungs.harness import HarnessResult
from perfladder.rungs.kernels import KernelsResult
from perfladder.rungs.ncu import NcuResult
from perfladder.rungs.regions import RegionsResult
from perfladder.rungs.stages import StagesResult

SECTION_OF_RUNG = {
    "stages": "stages",
    "capture": "harness",
    "regions": "regions",
    "harness": "harness",
    "kernels": "kernels",
    "ncu": "ncu",
}
"""Where on the page the numbers of a rung stand."""


@dataclass(frozen=True)
class RunData:
    """One run.

    Attributes:
        report: As in `report.json`.
        results: By rung, as they lie in the run directory.
        base: The run directory as seen from the page's folder.
    """

    report: Report
    results: Mapping[str, RungResult]
    base: str = "."

    def link(self, path: str) -> str:
        """Where a file of the run directory is, for a link on the page."""
        return path if self.base == "." else f"{self.base}/{path}"

    @cached_property
    def stages(self) -> StagesResult | None:
        """Rung 1, if it is done."""
        return self._done(StagesResult)

    @cached_property
    def regions(self) -> RegionsResult | None:
        """Rung 2, if it is done."""
        return self._done(RegionsResult)

    @cached_property
    def harness(self) -> HarnessResult | None:
        """The replay of rung 3, if it is done."""
        return self._done(HarnessResult)

    @cached_property
    def kernels(self) -> KernelsResult | None:
        """Rung 4, if it is done."""
        return self._done(KernelsResult)

    @cached_property
    def ncu(self) -> NcuResult | None:
        """Rung 5, if it is done."""
        return self._done(NcuResult)

    @cached_property
    def colours(self) -> dict[str, str]:
        """One colour for a stage or region wherever it is drawn."""
        stages = [stage.name for stage in self.stages.default.stages] if self.stages else []
        regions = [region.name for region in self.regions.regions] if self.regions else []
        return colours_of([*stages, *regions])

    def missing(self, rung: str, section_id: str, title: str) -> Section:
        """The section of a rung that is not done, with the reason."""
        return absent(section_id, title, self._why_not(rung))

    def _done(self, kind: type[R]) -> R | None:
        return next((r for r in self.results.values() if isinstance(r, kind) and r.status == "done"), None)

    def _why_not(self, name: str) -> str:
        rung = rung_named(name)
        line = next((line for line in self.report.rungs if line.name == name), None)
        what = f"Rung {rung.number} ({name}) asks: {rung.question}"
        if line is not None:
            return f"{what} It {_STATUS[line.status]}: {line.reason or 'no reason was given'}"
        if rung.is_optional:
            return f"{what} It is optional and was not climbed; climb to it with --until {name}."
        if self.report.run.status in ("running", "interrupted"):
            return f"{what} It was not climbed: the run is {self.report.run.status}."
        earlier = [r.name for r in RUNGS if any(line.name == r.name for line in self.report.rungs)]
        return f"{what} It was not climbed: the run ended after {earlier[-1] if earlier else 'loading the target'}."


_STATUS = {"failed": "failed", "skipped": "was skipped", "not_applicable": "is not applicable", "done": "is done"}


def number(value: float | None, shown: str | None = None, *, bar: float | None = None) -> Cell:
    """A number's cell, in words of its own or written as its column is; what is not there is a dash, sorted last."""
    return Cell(text="–") if value is None else Cell(text=shown or "", value=value, bar=bar)


def name(text: str) -> Cell:
    """A cell with a name from the program."""
    return Cell(text=text, is_code=True)


def numbers(*titles: str, unit: str | None = None) -> list[Column]:
    """Columns of numbers."""
    return [Column(title=title, is_number=True, unit=unit) for title in titles]


def grouped(value: float) -> str:
    """Three significant digits, all of a whole number, thousands set apart."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.2e}"


def place_of(region_id: str | None, num_modules: int | None = None) -> str:
    """A region's name without its kind, with the number of modules that it stands for."""
    return counted((region_id or "–").split(":", 1)[-1], num_modules)


def counted(path: str, num_modules: int | None) -> str:
    """A path with the number of modules that it stands for, if these are several."""
    return f"{path} \N{MULTIPLICATION SIGN}{num_modules}" if num_modules and num_modules > 1 else path


def listed(items: list[str], limit: int = 8) -> list[Inline]:
    """Names in a line, the first of them."""
    line: list[Inline] = []
    for index, item in enumerate(items[:limit]):
        line += [", ", Code(text=item)] if index else [Code(text=item)]
    return [*line, f", and {len(items) - limit} more"] if len(items) > limit else line or ["–"]
