import copy
import re

import pytest

SECTIONS = ["Overview", "Runs", "Regions", "Per-Run Attribution", "Profiler Key Averages", "Warnings"]


def test_markdown_has_six_sections(pipe, x, profile):
    text = profile(pipe, x).markdown()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS


def test_markdown_is_a_pure_view(pipe, x, profile):
    result = profile(pipe, x)
    before = copy.deepcopy(result.data)
    assert result.markdown() == result.markdown()
    assert result.data == before


def test_markdown_takes_no_options(pipe, x, profile):
    with pytest.raises(ValueError, match="no options"):
        profile(pipe, x).markdown(verbose=True)


def section(text, name):
    return re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[1]


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def test_a_residual_row_ends_each_run_and_the_shares_add_up(pipe, x, profile):
    body = section(profile(pipe, x, measured_runs=3).markdown(), "Per-Run Attribution")
    shares_table, *others = body.strip().split("\n\n")
    rows = shares_table.splitlines()[2:]
    assert others[0].startswith("What the residual's host time was spent on")
    assert len(others[1].splitlines()) == 2 + 3
    assert [line.count("_(residual)_") for line in rows] == [0, 0, 1] * 3
    for run in range(3):
        shares = [float(line.split("|")[5].strip(" %")) for line in rows[3 * run : 3 * run + 3]]
        assert sum(shares) == pytest.approx(100, abs=0.1)


def test_the_state_of_a_wrapper_is_shown_and_of_others_a_dash(pipe, x, wrap, profile):
    pipe.unet = wrap(pipe.unet)
    body = section(profile(pipe, x).markdown(), "Regions")
    states = {line.split("|")[1].strip(): line.split("|")[3].strip() for line in body.splitlines() if "`" in line}
    assert states == {"`unet`": "tuned", "`vae.decode`": "-"}


def test_overview_and_warnings_say_what_was_run(pipe, x, profile):
    text = profile(pipe, {"x": x}, warmup_runs=0).markdown()
    overview = section(text, "Overview")
    assert "| Measured runs | 2 |" in overview
    assert "| Keyword arguments | x |" in overview
    assert "**NO_UNPROFILED_RUNS**" in section(text, "Warnings")


def test_names_cannot_break_a_table(x, profile):
    holder = type("Holder", (), {})()
    from torch import nn

    holder.parts = {'odd | "name"\n`': nn.Linear(8, 8)}
    result = profile(holder, x, inference_function=lambda value: next(iter(holder.parts.values()))(value))
    assert result.data["regions"][0]["name"] == 'parts.odd | "name"\n`'
    line = next(line for line in section(result.markdown(), "Regions").splitlines() if "odd" in line)
    assert line.count(" | ") == 6
