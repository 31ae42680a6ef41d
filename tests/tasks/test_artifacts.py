"""What Prefect's pages show."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from perfladder.findings import Evidence, Finding
from perfladder.tasks.artifacts import artifact_key, findings_table


@pytest.mark.parametrize("name", ["toy", "SD_1.5--x", "A._-"])
def test_keys_are_as_prefect_accepts_them(name: str) -> None:
    run: Any = SimpleNamespace(record=SimpleNamespace(workload_name=name))
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", artifact_key("report", run))


def test_a_finding_is_a_row_with_its_evidence() -> None:
    finding = Finding(
        kind="dominant_stage",
        rung="stages",
        claim="unet holds most",
        evidence=[Evidence(metric="share", value=0.82351, unit="of wall time", source="stages.json: unet")],
        uncertainty="little",
        refuted_by="another",
        next_experiment="replay it",
    )
    outcome: Any = SimpleNamespace(findings=[finding])
    (row,) = findings_table(outcome)
    assert row["evidence"] == "share = 0.8235 of wall time (stages.json: unet)"
    assert row["next experiment"] == "replay it"
