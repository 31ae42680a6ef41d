"""What a tuning found and decided, as one document."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, JsonValue

from perfladder import __version__
from perfladder.errors import InputError, PerfladderError
from perfladder.files import write_atomically
from perfladder.models import SCHEMA_VERSION, Model
from perfladder.tuning.inspect import num_layers, precisions
from perfladder.tuning.observe import HardwareSummary
from perfladder.tuning.records import CandidateRecord, DecisionRecord
from perfladder.tuning.specs import ScalarSpec, TensorSpec

if TYPE_CHECKING:
    from perfladder.tuning.candidates import GraphWork
    from perfladder.tuning.control import ModuleControl
    from perfladder.tuning.strategies import TuneStrategy

_logger = logging.getLogger("perfladder.tuning")
_MAX_MESSAGE_BYTES = 1024


class Failure(Model):
    """Why a module stayed as it was."""

    type: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """An error, its message cut to a length that a report bears."""
        text = str(error).encode(errors="backslashreplace")[:_MAX_MESSAGE_BYTES]
        return cls(type=type(error).__name__, message=text.decode(errors="ignore"))


class GraphReport(Model):
    """One form of call."""

    name: str
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    others: list[ScalarSpec] = Field(description="Arguments that are no tensors.")
    num_samples: int
    strategy: str
    strategy_description: str
    backends: list[str]
    cache_dir: str
    decision: DecisionRecord | None = Field(default=None, description="None: a dry run, or a failure.")
    candidates: list[CandidateRecord] = Field(default=[], description="What was tried before a failure.")

    @classmethod
    def of(
        cls,
        work: GraphWork,
        strategy: TuneStrategy,
        *,
        decision: DecisionRecord | None = None,
        candidates: Sequence[CandidateRecord] = (),
    ) -> GraphReport:
        """What is known of a graph, with what was decided, or tried before that failed."""
        graph = work.graph
        return cls(
            name=graph.name,
            inputs=graph.inputs,
            outputs=graph.outputs,
            others=[*graph.others, *graph.unsupported],
            num_samples=graph.num_samples,
            strategy=strategy.title,
            strategy_description=strategy.describe(),
            backends=[repr(backend) for backend in strategy.backends_for(work.control.inner, work.device.type)],
            cache_dir=str(work.folder),
            decision=decision,
            candidates=list(candidates),
        )


class ModuleReport(Model):
    """One wrapped module."""

    name: str
    path: str | None
    module_type: str
    num_parameters: int
    num_layers: int
    precisions: list[str]
    device: str
    state: str
    error: Failure | None = None
    graphs: list[GraphReport] = []

    @classmethod
    def of(cls, control: ModuleControl, graphs: Sequence[GraphReport], error: PerfladderError | None) -> ModuleReport:
        """What is known of a module, with the reports of its graphs."""
        inner = control.inner
        return cls(
            name=control.name,
            path=control.path,
            module_type=f"{type(inner).__module__}.{type(inner).__qualname__}",
            num_parameters=sum(weight.numel() for weight in inner.parameters()),
            num_layers=num_layers(inner),
            precisions=precisions(inner),
            device=str(control.device),
            state=control.state,
            error=Failure.of(error) if error is not None else None,
            graphs=list(graphs),
        )


class TuningReport(Model):
    """All that a call of `tune` did."""

    schema_version: int = SCHEMA_VERSION
    perfladder_version: str = __version__
    created_at: str
    duration_s: float
    is_dry_run: bool
    num_builds: int = Field(description="Builds in this process; those that an earlier tuning made do not count.")
    settings: dict[str, JsonValue]
    modules: list[ModuleReport]
    error: Failure | None = Field(default=None, description="What ended the tuning before all modules were through.")
    hardware: HardwareSummary | None = Field(default=None, description="Where `config.hardware_metrics` asked for it.")

    def module(self, name: str) -> ModuleReport:
        """The module of that name.

        Raises:
            InputError: There is none.
        """
        for module in self.modules:
            if name in (module.name, module.path):
                return module
        raise InputError(f"No module {name!r} was tuned; there are {', '.join(m.name for m in self.modules)}.")

    def describe(self) -> str:
        """What was chosen, a line for each graph, and where the logs of builds that failed are."""
        lines = []
        for module in self.modules:
            if module.error is not None:
                lines.append(f"{module.name}: stays as it is. {module.error.message}")
            for graph in module.graphs:
                if graph.decision is not None:
                    lines.append(
                        f"{module.name}, graph {graph.name}: {graph.decision.selected}. {graph.decision.reason}"
                    )
                for candidate in graph.decision.candidates if graph.decision is not None else graph.candidates:
                    if candidate.status == "failed" and candidate.log_file is not None:
                        lines.append(f"  {candidate.description} failed; its log: {candidate.log_file}")
        return "\n".join(lines)


_last: TuningReport | None = None


def publish(report: TuningReport, path: Path) -> None:
    """Keep the report of this process's last tuning, and write it; a tuning does not fail because this cannot be."""
    global _last
    _last = report
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, report.model_dump_json(indent=1))
    except OSError as error:
        _logger.warning("The tuning report could not be written to %s: %s", path, error)


def snapshot_tuning_data(path: str | Path | None = None) -> TuningReport:
    """The report of this process's last tuning, written to a file as well if one is given.

    Raises:
        InputError: Nothing was tuned yet, or the file cannot be written.
    """
    if _last is None:
        raise InputError("Nothing was tuned in this process yet; call pl.tune first.")
    if path is not None:
        try:
            write_atomically(Path(path), _last.model_dump_json(indent=1))
        except OSError as error:
            raise InputError(f"path: {path} cannot be written: {error.strerror}.") from error
    return _last
