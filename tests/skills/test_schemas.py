"""The published schemas are those of the models, of every verb, and real output keeps to them."""

import json
from pathlib import Path

import jsonschema
import pytest
from commands import options_of, verbs
from documents import SCHEMAS, printed, written
from recorded_runs import make_run
from typer.testing import CliRunner

from perfladder.cli import app
from perfladder.schemas import PRINTED, WRITTEN, schema_files
from perfladder.tasks.uploads import Uploads


def test_schemas_are_what_the_models_say_now():
    there = {path.relative_to(SCHEMAS).as_posix(): path.read_text() for path in SCHEMAS.rglob("*.json")}
    made = schema_files()
    assert sorted(there) == sorted(made)
    for text in made.values():
        jsonschema.Draft202012Validator.check_schema(json.loads(text))
    changed = [path for path, text in made.items() if there[path] != text]
    assert changed == [], "run: python -m perfladder.schemas docs/schemas"


def test_every_verb_with_json_has_a_schema_and_no_other():
    wanted = {verb for verb in verbs() if "--json" in options_of(verb)}
    assert {name.partition(" --")[0] for name in PRINTED} - {"error"} == wanted
    for name in PRINTED:
        verb, separator, option = name.partition(" --")
        assert not separator or f"--{option}" in options_of(verb)


def test_a_field_that_a_later_version_adds_is_no_error_and_one_that_is_gone_is():
    schema = json.loads((SCHEMAS / "show.json").read_text())
    row = {"schema_version": 1, "run_dir": "r", "table": "t", "source": None, "num_rows": 0, "rows": []}
    jsonschema.validate(row | {"later": 1}, schema)
    with pytest.raises(jsonschema.ValidationError, match="'rows' is a required property"):
        jsonschema.validate({name: value for name, value in row.items() if name != "rows"}, schema)


def run(*words, code=0):
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == code, done.output
    return done.stdout


def test_what_is_read_from_a_run_keeps_to_its_schema(tmp_path):
    one, two = (make_run(tmp_path / name, name) for name in ("waiting", "chain"))
    assert printed("report", run("report", str(one)))["findings"]
    assert printed("show", run("show", str(two), "wins", "--top", "2"))["rows"]
    assert printed("error", run("show", str(two), "launches", code=2))["error"]["exit_code"] == 2
    runs = printed("gc", run("gc", "--out", str(tmp_path / "waiting")))["runs"]
    assert [Path(row["run"]).name for row in runs] == [one.name]


def test_finished_runs_compared_keep_to_the_schema(tmp_path):
    one, two = (make_run(tmp_path / name, "ahead") for name in ("a", "b"))
    assert printed("compare", run("compare", str(one), str(two)))["verdict"] == "undecided"


@pytest.mark.parametrize("name", ["copies", "waiting"])
def test_recorded_results_keep_to_the_schemas_of_their_files(name, tmp_path):
    found = [path for path in make_run(tmp_path, name).rglob("*.json") if path.name in WRITTEN]
    assert {"run.json", "environment.json", "stages.json", "kernels.json"} <= {path.name for path in found}
    for path in found:
        written(path)


def test_what_uploads_note_keeps_to_the_schema(tmp_path):
    path = tmp_path / "mlflow.json"
    path.write_text(Uploads().model_dump_json())
    assert written(path)["schema_version"] == 1
