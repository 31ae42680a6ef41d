"""JSON Schemas of what `--json` prints and of the files of a run directory, made from the models that write them.

python -m perfladder.schemas docs/schemas
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from perfladder.errors import InputError
from perfladder.files import write_atomically
from perfladder.models import Model

PRINTED: Mapping[str, str] = {
    "attribute": "perfladder.profiling.attribute:TraceAnalyses",
    "capture": "perfladder.rungs.capture:CaptureResult",
    "compare": "perfladder.comparing.model:RunComparison",
    "demo": "perfladder.report.answer:RunAnswer",
    "doctor": "perfladder.doctor.examine:Examination",
    "down": "perfladder.flows.services:ServersStatus",
    "error": "perfladder.schemas:ErrorDocument",
    "exec": "perfladder.report.answer:RunAnswer",
    "exec --tune": "perfladder.jit.execute:ExecResult",
    "gc": "perfladder.retention:GcResult",
    "init": "perfladder.initializing.write:InitResult",
    "inspect": "perfladder.tuning.inspect_workload:InspectResult",
    "kernels": "perfladder.kernels.export:ExportResult",
    "ncu": "perfladder.rungs.ncu:NcuResult",
    "nightly": "perfladder.nightly.outcome:NightlyOutcome",
    "nightly --history": "perfladder.nightly.trend:Trends",
    "replay": "perfladder.rungs.harness:HarnessResult",
    "report": "perfladder.report.model:Report",
    "run": "perfladder.report.answer:RunAnswer",
    "show": "perfladder.report.tables:ShownTable",
    "skill check": "perfladder.skills:SkillsResult",
    "skill install": "perfladder.skills:SkillsResult",
    "skill list": "perfladder.skills:SkillList",
    "skill uninstall": "perfladder.skills:SkillsResult",
    "status": "perfladder.flows.services:ServersStatus",
    "sweep": "perfladder.variations:SweepResult",
    "sync": "perfladder.tasks.uploads:SyncResult",
    "tune": "perfladder.tuning.tune_result:TuneWorkloadResult",
    "tune --prove": "perfladder.tuning.proof_model:ProofOutcome",
    "up": "perfladder.flows.services:ServersStatus",
}
"""Verb, with an option where that changes what is printed, to the model of its JSON; any verb may print `error`.

By name, not imported: the models of servers and uploads need Prefect and MLflow, which not every installation has.
"""

WRITTEN: Mapping[str, str] = {
    "capture.json": "perfladder.rungs.capture:CaptureResult",
    "environment.json": "perfladder.target:LoadedInfo",
    "harness.json": "perfladder.rungs.harness:HarnessResult",
    "kernels.json": "perfladder.rungs.kernels:KernelsResult",
    "key.json": "perfladder.content_key:ContentKey",
    "mlflow.json": "perfladder.tasks.uploads:Uploads",
    "night.json": "perfladder.nightly.model:NightRecord",
    "ncu.json": "perfladder.rungs.ncu:NcuResult",
    "proof.json": "perfladder.tuning.proof_model:ProofOutcome",
    "regions.json": "perfladder.rungs.regions:RegionsResult",
    "removed.json": "perfladder.retention:Removed",
    "report.json": "perfladder.report.model:Report",
    "run.json": "perfladder.rundir:RunRecord",
    "stages.json": "perfladder.timing.results:StagesResult",
}
"""File of a run directory to its model."""

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class ErrorDetail(Model):
    """What went wrong, in the words that stderr has too."""

    type: str
    message: str
    exit_code: int


class ErrorDocument(Model):
    """What `--json` prints in place of a result."""

    error: ErrorDetail


class _Untitled(GenerateJsonSchema):
    """Without a title for each field: it would be the field's name once more."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def schema_files() -> dict[str, str]:
    """Every schema as text, by its path in the folder of schemas."""
    files = {f"{verb.replace(' --', '-').replace(' ', '-')}.json": model for verb, model in PRINTED.items()}
    files |= {f"run-directory/{name}": model for name, model in WRITTEN.items()}
    return {path: json.dumps(schema_of(model), indent=1, ensure_ascii=False) + "\n" for path, model in files.items()}


def schema_of(model: str) -> dict[str, Any]:
    """The schema of what a model writes; fields that a later perfladder adds are no error."""
    module, _, name = model.partition(":")
    kind: type[BaseModel] = getattr(importlib.import_module(module), name)
    schema = kind.model_json_schema(mode="serialization", schema_generator=_Untitled)
    return {"$schema": _DIALECT, **_open(schema)}


def _open(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _open(inner) for key, inner in value.items() if (key, inner) != ("additionalProperties", False)}
    return [_open(inner) for inner in value] if isinstance(value, list) else value


def write_schemas(folder: Path) -> list[str]:
    """Write every schema; one that is no more is not deleted."""
    files = schema_files()
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / path, text)
    return sorted(files)


def main() -> None:
    """Write them into the folder that is given."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m perfladder.schemas FOLDER")
    try:
        written = write_schemas(Path(sys.argv[1]))
    except InputError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{len(written)} schemas in {sys.argv[1]}")


if __name__ == "__main__":
    main()
