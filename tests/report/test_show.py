"""One table of a run, and the short answer: what a program or an agent reads in place of the whole report."""

import itertools
import json
from pathlib import Path

import pytest
from recorded_runs import make_run
from typer.testing import CliRunner

from perfladder.cli import app
from perfladder.errors import InputError
from perfladder.report import build_report
from perfladder.report.answer import answer_of
from perfladder.report.tables import TABLES, render_table, show_table

GOLDEN = Path(__file__).parents[1] / "data" / "golden_v1"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs"), "chain")


def test_every_table_is_read_from_its_result_or_says_why_not(run_dir):
    with pytest.raises(InputError, match="was not climbed"):
        show_table(run_dir, "launches")
    found = {name: show_table(run_dir, name) for name, place in TABLES.items() if place.rung != "ncu"}
    for name, table in found.items():
        assert len(table.rows) == table.num_rows
        assert render_table(table)
        if table.source is not None:
            assert (run_dir / table.source).is_file(), name
    assert {"stages", "regions", "kernels", "operators", "families"} <= {n for n, t in found.items() if t.rows}


def test_rows_are_sorted_filtered_and_cut():
    everything = show_table(GOLDEN, "kernels")
    top = show_table(GOLDEN, "kernels", top=2, sort="count")
    assert len(top.rows) == 2
    assert top.num_rows == everything.num_rows > 2
    assert top.rows[0]["count"] == max(row["count"] for row in everything.rows) >= top.rows[1]["count"]
    name = everything.rows[-1]["kernel"]
    only = show_table(GOLDEN, "kernels", contains=name.upper())
    assert only.rows
    assert all(name.lower() in " ".join(map(str, row.values())).lower() for row in only.rows)
    assert set(show_table(GOLDEN, "kernels", all_columns=True).rows[0]) > set(everything.rows[0])


def test_a_tree_is_listed_with_depths():
    depths = [row["depth"] for row in show_table(GOLDEN, "modules").rows]
    assert max(depths) > 0
    assert depths[0] == 0
    assert all(after <= before + 1 for before, after in itertools.pairwise(depths))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kernel"], "Did you mean 'kernels'"),
        (["kernels", "--sort", "counts"], "Did you mean 'count'"),
        (["launches"], "was not climbed"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(run_dir, words, message):
    done = CliRunner().invoke(app, ["show", str(run_dir), *words, "--json"])
    assert done.exit_code == 2
    assert message in json.loads(done.stdout)["error"]["message"]


def test_without_a_table_the_command_lists_them(run_dir):
    done = CliRunner().invoke(app, ["show", str(run_dir), "--json"])
    assert done.exit_code == 0
    rows = {row["table"]: row["status"] for row in json.loads(done.stdout)["rows"]}
    assert set(rows) == set(TABLES)
    assert (rows["kernels"], rows["launches"]) == ("done", "no rung")


def test_the_command_prints_rows_for_programs_and_for_people(run_dir):
    shown = CliRunner().invoke(app, ["show", str(run_dir), "stages", "--top", "1"])
    assert shown.exit_code == 0
    assert "more." in shown.stdout or "From 1-stages/stages.json" in shown.stdout
    document = json.loads(CliRunner().invoke(app, ["show", str(run_dir), "findings", "--json"]).stdout)
    assert document["num_rows"] == len(build_report(run_dir).findings)


def test_the_answer_is_short_and_leads_on(run_dir):
    report = build_report(run_dir)
    answer = answer_of(report)
    text = answer.model_dump_json()
    # About four characters a token: a few hundred tokens.
    assert len(text) < 2400
    assert answer.dominating_stage == report.dominating
    assert 0 < answer.dominating_share <= 1
    assert [line.kind for line in answer.findings] == [finding.kind for finding in report.findings[:3]]
    assert answer.num_findings == len(report.findings)
    assert (answer.next_experiment, answer.next_command) == (report.next_experiment, report.next_command)
    assert all((run_dir / path).is_file() for path in answer.files.values())
