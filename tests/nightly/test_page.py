"""The page of all nights: every night, every change, and the verdict of the last one."""

import pytest
from html_pages import Page
from nights import commit_of, make_night, make_nights
from typer.testing import CliRunner

from perfladder.cli import app
from perfladder.nightly.page import render_trends_page
from perfladder.nightly.trend import Trends, trends_of

SLOW = {"slow": {"decoder": 1.3}}


@pytest.fixture
def slowed(tmp_path):
    nights = [*make_nights(40), *[make_night(place, **SLOW) for place in range(40, 46)]]
    nights[-1] = nights[-1].model_copy(update={"verdict": "regression"})
    return trends_of(tmp_path, {"pipe": nights, "other<b>": []})


def parsed(trends):
    page = Page()
    text = render_trends_page(trends)
    page.feed(text)
    return page, text


def test_the_page_shows_every_night_the_change_and_the_alarm(slowed):
    page, text = parsed(slowed)
    assert page.unclosed == []
    assert "Slower since the last good night: pipe." in page.text
    cells = page.cells("td")
    assert all(point.run_id in cells for point in slowed.trends[0].points)
    assert f"{commit_of(39)[:10]}..{commit_of(40)[:10]}" in cells
    assert any("+9." in cell for cell in cells)
    assert text == render_trends_page(slowed)
    assert not [link for link in page.all("link") if str(link.get("href")).startswith("http")]


def test_good_nights_and_none_are_told_apart(tmp_path):
    assert (
        "No regression on the last night, of 1 workload."
        in parsed(trends_of(tmp_path, {"pipe": make_nights(5)}))[0].text
    )
    assert "There are no nights yet." in parsed(Trends(runs_dir=str(tmp_path), trends=[]))[0].text


def test_the_noise_of_one_night_is_not_known(tmp_path):
    assert "not known" in parsed(trends_of(tmp_path, {"pipe": make_nights(1)}))[0].cells("td")


def test_the_command_writes_the_page_of_the_history(tmp_path):
    done = CliRunner().invoke(app, ["nightly", "--history", "--out", str(tmp_path), "--html", str(tmp_path / "n.html")])
    assert done.exit_code == 0, done.output
    assert "There are no nights yet." in (tmp_path / "n.html").read_text()
    assert CliRunner().invoke(app, ["nightly", "--html", "n.html", "--workloads", "."]).exit_code == 2
