"""What just-in-time tuning did, for people and files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from perfladder import __version__
from perfladder.errors import InputError
from perfladder.files import write_atomically
from perfladder.models import SCHEMA_VERSION, Model
from perfladder.tuning.graph_tables import as_text
from perfladder.tuning.graphs import GraphSpec
from perfladder.tuning.records import CandidateRecord

State = Literal["init", "recording", "tuned", "eager", "skipped", "detached"]


class JitGraph(Model):
    """One form of call of a module."""

    name: str
    inputs: list[str] = Field(description="Its tensors, with sizes.")
    selected: str | None = Field(description="What serves it; None: nothing could be chosen.")
    reason: str
    speedup: float | None = None
    num_tried: int = Field(default=0, description="Candidates that were tried now.")
    num_reused: int = Field(default=0, description="Candidates that are known from an earlier process.")
    num_builds: int = Field(default=0, description="Builds in this process.")
    tuning_s: float | None = Field(default=None, description="What tuning it took; a build of what is known included.")

    @classmethod
    def of(
        cls,
        graph: GraphSpec,
        *,
        selected: str | None,
        reason: str,
        speedup: float | None = None,
        candidates: Sequence[CandidateRecord] = (),
        num_builds: int = 0,
        tuning_s: float | None = None,
    ) -> JitGraph:
        """A graph, with what was found."""
        num_reused = sum(candidate.is_reused for candidate in candidates)
        return cls(
            name=graph.name,
            inputs=[f"{spec.access_path} {list(spec.shape)} {spec.dtype}" for spec in graph.inputs],
            selected=selected,
            reason=reason,
            speedup=speedup,
            num_tried=len(candidates) - num_reused,
            num_reused=num_reused,
            num_builds=num_builds,
            tuning_s=tuning_s,
        )


class JitModuleReport(Model):
    """One module that was called, or lies in one that was tuned."""

    name: str
    level: int = Field(description="How far below the topmost module that was called.")
    module_type: str
    num_parameters: int
    device: str
    state: State
    reason: str | None = Field(default=None, description="Why it is in that state, where that is not plain.")
    num_calls: int
    time_ms: float | None = Field(default=None, description="Of all its calls, in inspect mode.")
    graphs: list[JitGraph] = []

    @property
    def choice(self) -> str:
        """What serves it, or why it runs as it is."""
        chosen = dict.fromkeys(graph.selected for graph in self.graphs if graph.selected)
        return ", ".join(chosen) or self.reason or next((graph.reason for graph in self.graphs), "")


class JitReport(Model):
    """All modules that were found, outer ones before those in them."""

    schema_version: int = SCHEMA_VERSION
    perfladder_version: str = __version__
    mode: str
    cache_dir: str
    modules: list[JitModuleReport]

    @property
    def graphs(self) -> Iterator[JitGraph]:
        """Of all modules."""
        return (graph for module in self.modules for graph in module.graphs)

    @property
    def num_tuned(self) -> int:
        """Modules that are served by what was chosen."""
        return sum(module.state == "tuned" for module in self.modules)

    @property
    def total_ms(self) -> float | None:
        """Time of the topmost modules; None where nothing was timed."""
        times = [module.time_ms for module in self.modules if module.level == 0 and module.time_ms is not None]
        return sum(times) if times else None

    def share(self, module: JitModuleReport) -> float | None:
        """A module's part of the time of the topmost ones."""
        return module.time_ms / self.total_ms if module.time_ms is not None and self.total_ms else None

    def describe(self) -> str:
        """The hierarchy as a table."""
        if not self.modules:
            return "No module was called.\n"
        return as_text([("Modules", ("module", "class", "parameters", "calls", "ms", "state", "choice"), self._rows())])

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                "  " * module.level + module.name,
                module.module_type.rpartition(".")[2],
                str(module.num_parameters),
                str(module.num_calls),
                "" if module.time_ms is None else f"{module.time_ms:.3g}",
                module.state,
                _short(module.choice),
            )
            for module in self.modules
        ]

    def html(self, model_name: str | None) -> str:
        """A page of its own that needs no other file."""
        from jinja2 import Environment, PackageLoader, StrictUndefined

        environment = Environment(
            loader=PackageLoader("perfladder.jit"),
            undefined=StrictUndefined,
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        page = environment.get_template("hierarchy.html.j2")
        return page.render(report=self, title=model_name or "Modules of this program")

    def save(self, path: str | Path, model_name: str | None) -> None:
        """Write the page.

        Raises:
            InputError: It cannot be written there.
        """
        try:
            write_atomically(Path(path), self.html(model_name))
        except OSError as error:
            raise InputError(f"path: {path} cannot be written: {error.strerror}. Choose another file.") from error


def _short(text: str, limit: int = 100) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
