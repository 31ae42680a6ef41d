"""What a run comes to, in a few hundred tokens: for programs and coding agents that pay for every word they read."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from perfladder.models import SCHEMA_VERSION, Model
from perfladder.report.model import Report
from perfladder.timing.results import MetricValue

_TOP = 3


class FindingLine(Model):
    """A finding without its evidence, which `perfladder show RUN findings` and the report have."""

    kind: str
    claim: str
    next_command: str | None


class RunAnswer(Model):
    """The one object that `perfladder run --json` prints."""

    schema_version: int = SCHEMA_VERSION
    status: str
    exit_code: int | None
    error: str | None
    metric: MetricValue | None = Field(description="The metric that matters, with its 95 % interval.")
    dominating_stage: str | None
    dominating_share: float | None
    findings: list[FindingLine] = Field(description="The most important ones first.")
    num_findings: int
    not_done: dict[str, str] = Field(description="Rungs that have no result, with the reason.")
    warnings: list[str] = Field(description="Codes; `perfladder show RUN warnings` has the messages.")
    next_experiment: str | None
    next_command: str | None
    run_dir: str
    files: dict[str, str] = Field(description="In the run directory.")


def answer_of(report: Report) -> RunAnswer:
    """The short form of a report."""
    stages = report.stages[0].stages if report.stages else []
    share = next((stage.share for stage in stages if stage.name == report.dominating), None)
    folders = {entry.name: f"{entry.folder}/{entry.name}.json" for entry in report.run.rungs}
    done = {line.name for line in report.rungs if line.status == "done"}
    views = {name: name for name in ("report.md", "report.html") if (Path(report.run_dir) / name).is_file()}
    return RunAnswer(
        status=report.run.status,
        exit_code=report.run.exit_code,
        error=report.run.error,
        metric=report.metric,
        dominating_stage=report.dominating,
        dominating_share=share,
        findings=[
            FindingLine(kind=finding.kind, claim=finding.claim, next_command=finding.next_command)
            for finding in report.findings[:_TOP]
        ],
        num_findings=len(report.findings),
        not_done={line.name: f"{line.status}: {line.reason}" for line in report.rungs if line.status != "done"},
        warnings=sorted({warning.code for line in report.rungs for warning in line.warnings}),
        next_experiment=report.next_experiment,
        next_command=report.next_command,
        run_dir=report.run_dir,
        files=views | {name: path for name, path in folders.items() if name in done},
    )
