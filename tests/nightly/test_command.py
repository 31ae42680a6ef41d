"""`perfladder nightly` without measuring: history, acceptance, wrong options."""

import json

import pytest
from nights import make_night, make_nights
from typer.testing import CliRunner

from perfladder.cli import app
from perfladder.nightly.model import NightRecord

runner = CliRunner()


@pytest.fixture
def out(tmp_path):
    slow = make_night(30, slow={"decoder": 1.3}, verdict="regression")
    for night in [*make_nights(30), slow.model_copy(update={"changed_at": slow.run_id})]:
        folder = tmp_path / "runs" / "pipe" / night.run_id
        folder.mkdir(parents=True)
        (folder / "night.json").write_text(NightRecord(night=night).model_dump_json())
        run = {"run_id": night.run_id, "workload_name": "pipe", "workload_source": "-", "base_dir": "."}
        run |= {"perfladder_version": "0", "started_at": night.started_at}
        (folder / "run.json").write_text(json.dumps(run))
    return tmp_path / "runs"


def call(*arguments):
    return runner.invoke(app, ["nightly", *map(str, arguments)])


def test_the_history_is_a_table_and_one_json_document(out):
    shown = call("--history", "--out", out)
    assert shown.exit_code == 0
    assert "# pipe: 31 nights of latency_p50" in shown.stdout
    assert "**regression**" in shown.stdout
    document = json.loads(call("--history", "--out", out, "--json").stdout)
    assert len(document["trends"][0]["points"]) == 31
    assert "There are no nights yet" in call("--history", "--out", out / "none").stdout


def test_accepting_marks_the_night(out):
    run_id = max(path.name for path in (out / "pipe").iterdir())
    done = call("--accept", run_id, "--out", out)
    assert done.exit_code == 0, done.output
    record = NightRecord.model_validate_json((out / "pipe" / run_id / "night.json").read_text())
    assert record.night.is_accepted


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "say what to profile: --workloads DIR"),
        (["--history", "--accept", "x"], "--history and --accept do not go together"),
        (["--workloads", "none"], "neither a folder nor a file"),
        (["--workloads", ".", "--last-good", "1"], "rules.last_good"),
        (["--workloads", ".", "--plain", "--cron", "0 2 * * *"], "--cron needs a Prefect server"),
        (["--accept", "no-such-run"], "There is no run 'no-such-run'"),
    ],
)
def test_wrong_options_are_told_by_their_names(arguments, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for shown in (call(*arguments, "--json"), call(*arguments, "--json", "--plain")):
        assert shown.exit_code == 2
        assert told in json.loads(shown.stdout)["error"]["message"]
