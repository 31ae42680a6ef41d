"""What findings are derived before, for tests: a workload, and the environment of a recorded run."""

from pathlib import Path

from perfladder.findings.background import Background
from perfladder.target import LoadedInfo
from perfladder.workload import parse_workload

_RECORDED = Path(__file__).parents[1] / "data" / "golden_v1" / "environment.json"


def make_background(device="cpu", modules=(), **fields) -> Background:
    """A background with that device and stages that are modules; `fields` are those of the workload."""
    info = LoadedInfo.model_validate_json(_RECORDED.read_text()).model_copy(update={"device": device})
    workload = parse_workload({"name": "n", "target": "m:f", **fields})
    return Background(workload, info, "n.yaml", frozenset(modules))
