"""The flow that compares finished runs, with real servers, read back with Prefect's and MLflow's own clients."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clocked_runs import clocked_run

from perfladder.comparing.model import RunComparison
from perfladder.flows.prefect_server import PrefectServer

pytestmark = pytest.mark.slow

BeginFlow = Callable[..., Any]
COMMITS = ("a" * 40, "b" * 40)


def artifacts(runs_dir: Path) -> dict[str, Any]:
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with (
        PrefectServer(runs_dir, variables=os.environ) as server,
        temporary_settings({PREFECT_API_URL: server.wait()}),
        get_client(sync_client=True) as client,
    ):
        return {artifact.key: artifact.data for artifact in client.read_artifacts()}


def test_a_comparison_is_kept_as_files_as_artifacts_and_in_mlflow(begin_flow: BeginFlow, runs_dir: Path) -> None:
    from mlflow import MlflowClient

    for seed, (ms, commit) in enumerate(zip((10.0, 14.0), COMMITS, strict=True)):
        clocked_run(runs_dir, {"part": ms}, seed=seed, commit=commit)
    flow = begin_flow("", hooks={"compare": True}, baseline=COMMITS[0][:8], candidate=COMMITS[1][:8])
    answer = flow.answer()
    answer.pop("prefect_url_after")
    found = RunComparison.model_validate(answer)
    assert found.verdict == "slower", flow.log.read_text()
    (folder,) = (runs_dir / "comparisons").iterdir()
    assert {path.name for path in folder.iterdir()} == {"comparison.json", "comparison.md", "comparison.html"}

    client = MlflowClient(tracking_uri=f"sqlite:///{runs_dir / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("perfladder")
    (run,) = client.search_runs([experiment.experiment_id], "tags.`perfladder.kind` = 'comparison'")
    assert run.info.status == "FINISHED"
    assert run.data.tags["perfladder.verdict"] == "slower"
    assert run.data.tags["perfladder.candidate_commit"] == COMMITS[1]
    assert run.data.metrics["stage/part/candidate_ms"] == pytest.approx(14, rel=0.05)
    assert run.data.metrics["metric/latency_p50/speedup_ratio"] == pytest.approx(found.metric.speedup)
    assert {"comparison.json", "comparison.md"} <= {info.path for info in client.list_artifacts(run.info.run_id)}

    published = artifacts(runs_dir)
    assert "clocked: latency_p50 is slower" in published["comparison-clocked"]
    assert '"part"' in published["changes-clocked"]
