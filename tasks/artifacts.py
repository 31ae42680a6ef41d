"""What a reader of Prefect's pages sees of a run: the report, and a table of the findings."""

from __future__ import annotations

import re
from typing import Any

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from perfladder.ladder import ClimbOutcome
from perfladder.rundir import RunDirectory
from perfladder.tasks.steps import skill_task


def publish(run: RunDirectory, outcome: ClimbOutcome) -> None:
    """Publish as a task; without it, the run directory still has everything."""
    publish_task(run, outcome, return_state=True)


@skill_task(
    "7. Report",
    name="publish",
    task_run_name="publish",
    cache_policy=NO_CACHE,
    retries=1,
    retry_delay_seconds=1,
    persist_result=False,
)
def publish_task(run: RunDirectory, outcome: ClimbOutcome) -> None:
    """Create the artifacts `report-<workload>` and `findings-<workload>`; each run adds a version."""
    report = run.path / "report.md"
    where = f"Run {run.record.run_id}, in {run.path}"
    if report.is_file():
        create_markdown_artifact(report.read_text(encoding="utf-8"), key=artifact_key("report", run), description=where)
    create_table_artifact(findings_table(outcome), key=artifact_key("findings", run), description=where)
    link_to_mlflow(run.record.mlflow_run_url, run.record.workload_name)


def link_to_mlflow(url: str | None, name: str) -> None:
    """Create the artifact `mlflow-<name>`, a link to the page of the MLflow run; a database as store has no pages."""
    if url is not None:
        create_link_artifact(url, link_text="The run in MLflow", key=key_of("mlflow", name), description=url)


def page_of_flow_run() -> str | None:
    """The page of the flow run that this is called in; None where the server has none, as the one of a run's own."""
    url = flow_run.ui_url if flow_run.get_id() else None
    return url if url and url.startswith("http") else None


def artifact_key(kind: str, run: RunDirectory) -> str:
    """The key of an artifact about a run's workload."""
    return key_of(kind, run.record.workload_name)


def key_of(kind: str, name: str) -> str:
    """A key as Prefect accepts it: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", f"{kind}-{name}".lower()).strip("-")


def findings_table(outcome: ClimbOutcome) -> list[dict[str, Any]]:
    """One row a finding."""
    return [
        {
            "rung": finding.rung,
            "finding": finding.kind,
            "claim": finding.claim,
            "evidence": "; ".join(f"{e.metric} = {e.value:.4g} {e.unit} ({e.source})" for e in finding.evidence),
            "uncertainty": finding.uncertainty,
            "next experiment": finding.next_experiment,
        }
        for finding in outcome.findings
    ]
