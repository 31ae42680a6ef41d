"""What of a long command's progress is shown where."""

import re

from perfladder.progress import Progress
from perfladder.progress_display import show_bar, show_lines

TRYING = Progress(label="net: trying Fast(sizes=[1, 2])", num_done=1, num_total=4, remaining_s=600)


def show_all(**options):
    with show_bar(**options) as (tell, show):
        tell("loading the target")
        show(Progress(label="recording"))
        show(TRYING)
        show(TRYING.model_copy(update={"num_done": 2, "remaining_s": 40}))


def test_lines_where_nobody_is_watching_one_for_each_label(capsys):
    show_all(is_silent=False)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [re.sub(r"^ +\d+\.\d s  ", "", line) for line in shown.err.splitlines()] == [
        "loading the target",
        "recording",
        "net: trying Fast(sizes=[1, 2]) (1 of 4, about 10 min left)",
    ]


def test_nothing_where_a_program_reads(capsys):
    show_all(is_silent=True)
    assert capsys.readouterr() == ("", "")


def test_a_bar_where_somebody_is_watching(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    show_all(is_silent=False)
    shown = capsys.readouterr()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.err)
    assert shown.out == ""
    assert "net: trying Fast(sizes=[1, 2])" in text
    assert "(2 of 4, about 40 s left)" in text


def test_lines_without_a_count(capsys):
    with show_lines() as (tell, _):
        tell("capturing")
    assert capsys.readouterr().err.endswith(" s  capturing\n")
