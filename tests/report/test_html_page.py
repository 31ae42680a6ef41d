"""The page builder: what is put in stays text, nothing leads outside, and the same sections give the same page."""

import base64
import gzip
import json
import re

import pytest
from html_pages import parse

from perfladder.errors import InputError
from perfladder.report.html import (
    Card,
    Cell,
    Code,
    Column,
    Facts,
    Headline,
    Link,
    Plot,
    Section,
    Table,
    Text,
    View,
    assets,
    page,
    render_page,
    write_page,
)

HOSTILE = "<script>alert('x')</script> & \"quoted\" \u202e ünïcode {{ 7 * 7 }} </title></style>"


def table(rows, **options) -> Table:
    columns = [Column(title="name"), Column(title="time", is_number=True, unit="us")]
    return Table(caption="Times", columns=columns, rows=rows, **options)


def section(*blocks, name="times") -> Section:
    return Section(id=name, title="Times", blocks=list(blocks))


def plot(**trace) -> Plot:
    view = View(name="one", traces=[{"type": "bar", "x": [1.0], "y": ["a"], **trace}])
    return Plot(title="Bars", reading="Long is slow.", views=[view])


def plots_of(text: str) -> list:
    packed = re.search(r'id="plot-data">([^<]*)<', text)[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_text_of_every_block_is_shown_and_never_markup():
    blocks = [
        Text(line=[HOSTILE, Code(text=HOSTILE)]),
        Facts(rows=[(HOSTILE, [HOSTILE])]),
        table([[Cell(text=HOSTILE, is_code=True), Cell(text=HOSTILE)]]),
        Card(id="claim", label=HOSTILE, title=HOSTILE, rows=[(HOSTILE, [[HOSTILE]])], command=HOSTILE),
        plot(name=HOSTILE),
    ]
    headline = Headline(subtitle=HOSTILE, verdict=HOSTILE, command=HOSTILE, chips=[(HOSTILE, HOSTILE)])
    text = render_page(HOSTILE, [Section(id="all", title=HOSTILE, blocks=blocks)], headline=headline)
    found = parse(text)
    assert "alert('x')" not in "".join(found.scripts)
    assert found.text.count("alert('x')") >= 16
    assert "{{ 7 * 7 }}" in found.text
    assert found.unclosed == []


def test_same_sections_give_the_same_page_and_one_without_plots_carries_no_library():
    blocks = [table([[Cell(text="a"), Cell(value=1.5)]]), plot()]
    first, second = render_page("t", [section(*blocks)]), render_page("t", [section(*blocks)])
    assert first == second
    plain = render_page("t", [section(blocks[0])])
    assert 'id="plot-library"' not in plain
    assert len(plain) < 40_000


def test_numbers_of_a_column_have_the_same_decimals_and_sort_by_their_value():
    rows = [
        [Cell(text="a"), Cell(value=123.456)],
        [Cell(text="b"), Cell(value=0.001)],
        [Cell(text="c"), Cell(text="–")],
    ]
    found = parse(render_page("t", [section(table(rows))]))
    assert found.cells("td") == ["123.5", "<0.1", "–"]
    assert [attributes.get("data-value") for attributes in found.all("td")] == ["123.456", "0.001", None]


def test_counts_have_no_decimals_and_thousands_are_set_apart():
    rows = [[Cell(text="a"), Cell(value=1_234_567)], [Cell(text="b"), Cell(value=3)]]
    assert parse(render_page("t", [section(table(rows))])).cells("td") == ["1,234,567", "3"]


def test_very_long_name_is_there_in_full_and_shown_by_its_ends():
    name = "_ZN2at6native" + "x" * 1980 + "_end"
    text = render_page("t", [section(table([[Cell(text=name, is_code=True), Cell(value=1)]]))])
    found = parse(text)
    assert name in found.text
    assert [name[:10] in summary and "_end" in summary and "…" in summary for summary in found.cells("summary")] == [
        True
    ]


@pytest.mark.parametrize("href", ["https://example.org/x", "//example.org/x", "javascript:alert(1)", "/etc/passwd"])
def test_link_to_anywhere_else_is_refused(href):
    with pytest.raises(ValueError, match="its own sections and to files beside it"):
        render_page("t", [section(Text(line=[Link(text="x", href=href)]))])


def test_names_of_files_are_quoted_in_links():
    text = render_page("t", [section(Text(line=[Link(text="x", href='../a b/"c"#1.json')]))])
    assert [a["href"] for a in parse(text).all("a")][-1] == "../a%20b/%22c%22%231.json"


def test_two_sections_of_the_same_id_are_refused():
    with pytest.raises(ValueError, match="times"):
        render_page("t", [section(), section()])


def test_numbers_that_are_not_finite_become_gaps_in_a_plot():
    (drawn,) = plots_of(render_page("t", [section(plot(x=[1.0, float("nan"), float("inf")]))]))
    assert drawn["views"][0]["traces"][0]["x"] == [1.0, None, None]


def test_without_plotly_the_page_says_so_and_keeps_its_tables(monkeypatch):
    monkeypatch.setattr(assets, "_plotly_path", lambda: None)
    monkeypatch.setattr(page, "packed_plotly", assets.packed_plotly.__wrapped__)
    text = render_page("t", [section(table([[Cell(text="a"), Cell(value=1.5)]]), plot())])
    assert "pip install plotly" in text
    assert 'id="plot-library"' not in text
    assert parse(text).cells("td") == ["1.500"]


def test_a_folder_is_no_file_to_write_a_page_to(tmp_path):
    with pytest.raises(InputError, match=r"--html .*report\.html"):
        write_page("x", tmp_path)
    write_page("x", tmp_path / "new" / "page.html")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["page.html"]
