"""A comparison as a page: verdict, every ratio with its interval, and what differs."""

import base64
import gzip
import json
import re

import pytest
from clocked_runs import clocked_run
from html_pages import parse
from typer.testing import CliRunner

from perfladder.cli import app
from perfladder.comparing.model import KernelMove, OneSided, RunComparison
from perfladder.comparing.page import render_comparison_page
from perfladder.comparing.runs import compare_read
from perfladder.comparing.sides import read_side

COMMITS = ("a" * 40, "b" * 40)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same work twice, in several launches: one part has become slower."""
    folder = tmp_path_factory.mktemp("runs")
    parts = ({"encoder": 10.0, "decoder": 30.0}, {"encoder": 10.0, "decoder": 40.0})
    return [
        clocked_run(folder, own, seed=seed, commit=commit, launches=5)
        for seed, (own, commit) in enumerate(zip(parts, COMMITS, strict=True))
    ]


@pytest.fixture(scope="module")
def comparison(runs) -> RunComparison:
    return compare_read(*(read_side([run], str(run)) for run in runs), min_effect=0.02)


def plots_of(text: str) -> list:
    packed = re.search(r'id="plot-data">([^<]*)<', text)[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_verdict_and_differences_are_on_the_page(comparison):
    text = render_comparison_page(comparison)
    found = parse(text)
    assert render_comparison_page(comparison) == text
    assert comparison.verdict == "slower"
    assert comparison.reason in found.text
    assert f"{comparison.metric.speedup:.3f}" in found.cells("span")
    assert "commit" in found.cells("code")
    assert {COMMITS[0], COMMITS[1]} <= set(found.cells("td"))
    assert "http" not in "".join(lead["href"] for lead in found.all("a"))


def test_every_ratio_is_drawn_with_its_interval_and_its_verdict(comparison):
    forest = plots_of(render_comparison_page(comparison))[0]["views"][0]
    drawn = {
        name: (trace["name"], speedup, speedup - minus, speedup + plus)
        for trace in forest["traces"]
        for name, speedup, minus, plus in zip(
            trace["y"], trace["x"], trace["error_x"]["arrayminus"], trace["error_x"]["array"], strict=True
        )
    }
    scenario = comparison.scenarios[0]
    for change in (scenario.end_to_end, *scenario.stages):
        expected = (change.speedup, change.interval.low, change.interval.high)
        assert drawn[change.name][0] == change.verdict
        assert drawn[change.name][1:] == pytest.approx(expected)
    low, high = forest["layout"]["xaxis"]["range"]
    assert low < min(row[2] for row in drawn.values())
    assert high > max(1, *(row[3] for row in drawn.values()))


def test_rows_without_a_ratio_or_an_interval_are_in_the_table_and_no_mark_is_made_up(comparison):
    scenario = comparison.scenarios[0]
    bare = scenario.stages[0].model_copy(update={"name": "bare", "interval": None})
    zero = scenario.stages[0].model_copy(update={"name": "zero", "interval": None, "speedup": None, "baseline": 0.0})
    lost = OneSided(name="lost<b>", only="baseline", value=1.5, unit="ms")
    changed = scenario.model_copy(update={"stages": [bare, zero], "only_one_side": [lost]})
    move = KernelMove(name="k<1>", family="gemm", baseline_us=10, candidate_us=0, baseline_count=2, candidate_count=0)
    text = render_comparison_page(comparison.model_copy(update={"scenarios": [changed], "kernels_moved": [move]}))
    forest, moved = plots_of(text)
    marks = {name: place for trace in forest["views"][0]["traces"] for place, name in enumerate(trace["y"])}
    assert "bare" in marks
    assert "zero" not in marks
    assert moved["views"][0]["traces"][0]["y"] == ["k&lt;1&gt;"]
    found = parse(text)
    assert {"zero", "lost<b>", "k<1>"} <= set(found.cells("th"))
    assert "not there" in found.cells("td")


def test_page_is_written_beside_the_comparison_and_to_a_file_of_ones_choice(runs, tmp_path):
    names = [str(run) for run in runs]
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["compare", *names, "--to", str(tmp_path / "to"), "--html", str(page)])
    assert done.exit_code == 0, done.output
    assert done.stdout.endswith(f"Report: {page}\n")
    assert {path.name for path in (tmp_path / "to").iterdir()} == {
        "comparison.json",
        "comparison.md",
        "comparison.html",
    }
    stamp = re.compile(r"[0-9-]{10} [0-9:]{8} UTC")
    assert stamp.sub("", page.read_text()) == stamp.sub("", (tmp_path / "to" / "comparison.html").read_text())
    refused = CliRunner().invoke(app, ["compare", *names, "--html", str(tmp_path)])
    assert refused.exit_code == 2
