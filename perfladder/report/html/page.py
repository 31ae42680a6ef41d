"""One self-contained HTML page from sections: it opens offline, asks no other machine, reads well without script."""

from __future__ import annotations

import contextlib
import math
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from perfladder.errors import InputError, NotPossibleHereError
from perfladder.files import write_atomically
from perfladder.markdown import templates
from perfladder.report.amounts import both_ends
from perfladder.report.html.assets import PLOTLY_MISSING, pack_json, packed_plotly
from perfladder.report.html.blocks import Headline, Plot, Section, Table
from perfladder.report.html.plots import layout_of

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_WHOLE = 16
"""Characters of a name up to which it stays in one line."""
_LONG = 64
"""Characters of a name above which a table cell shows both ends, and the whole when asked."""


def render_page(
    title: str, sections: Sequence[Section], *, headline: Headline | None = None, made_by: str = "perfladder"
) -> str:
    """Build a page: headline, navigation and sections.

    The same arguments always give the same text. Tables and texts are plain HTML. The plotting library and the plots'
    data are packed at its end; plots are drawn after the first paint, each when it comes near the window.

    Args:
        title: Of the page.
        sections: From top to bottom; each has an entry in the navigation.
        headline: What stands above them.
        made_by: For the foot of the page.

    Returns:
        HTML, about 2 MB, nearly all of it the plotting library; a page without plots carries none.

    Raises:
        ValueError: Two sections have the same id.
    """
    ids = [section.id for section in sections]
    if doubled := sorted({name for name in ids if ids.count(name) > 1}):
        raise ValueError(f"Sections need ids of their own; given more than once: {', '.join(doubled)}.")
    plots = [block for section in sections for block in section.blocks if isinstance(block, Plot)]
    library = packed_plotly() if plots else None
    return (
        _templates()
        .get_template("page.html.j2")
        .render(
            title=title,
            sections=sections,
            headline=headline,
            made_by=made_by,
            library=library,
            missing=PLOTLY_MISSING if plots and library is None else None,
            data=pack_json([_payload(plot) for plot in plots]) if library is not None else None,
        )
    )


def check_page(path: Path) -> None:
    """Find out before measuring whether a page can be written; its folder is made.

    Raises:
        InputError: The path is a folder.
        NotPossibleHereError: It cannot be written.
    """
    if path.is_dir():
        raise InputError(f"--html {path}: this is a folder, but a file is expected, such as {path / 'report.html'}.")
    probe = path.with_name(f".{secrets.token_hex(4)}.part")
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()


def write_page(page: str, path: Path) -> None:
    """Write a page to a file of the user's choice.

    Raises:
        InputError: The path is a folder.
        NotPossibleHereError: It cannot be written.
    """
    check_page(path)
    with _writing(path):
        write_atomically(path, page)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NotPossibleHereError(
            f"{path} cannot be written: {error.strerror}. Name a file elsewhere with --html."
        ) from error


def _payload(plot: Plot) -> dict[str, object]:
    return {
        "height": plot.height,
        "views": [{"traces": view.traces, "layout": layout_of(view)} for view in plot.views],
    }


def _templates() -> Environment:
    return templates(
        "perfladder.report.html", both_ends, breakable, decimals, fixed, is_long, link_target, is_html=True
    )


def decimals(table: Table) -> list[int]:
    """For each column how many decimals its numbers get: three digits of the largest one, none for counts."""
    found = []
    for place in range(len(table.columns)):
        values = [row[place].value for row in (*table.rows, *table.footer) if place < len(row) and not row[place].text]
        known = [abs(value) for value in values if value is not None]
        largest = max(known, default=0.0)
        is_count = all(value == int(value) for value in known if math.isfinite(value))
        found.append(0 if is_count or largest >= 1000 else 1 if largest >= 100 else 2 if largest >= 10 else 3)
    return found


def fixed(value: float, places: int) -> str:
    """A number with so many decimals; one that these would make 0 says that it is less."""
    least = 10.0**-places
    if value and abs(value) < least / 2:
        return f"<{least:.{places}f}" if value > 0 else f">-{least:.{places}f}"
    return f"{value:,.{places}f}"


def breakable(text: str) -> Markup:
    """A name, escaped; one that is not short may go on in the next line after a dot, a colon or an underscore."""
    from markupsafe import Markup, escape

    if len(text) <= _WHOLE:
        return escape(text)
    return Markup("<wbr>").join(escape(part) for part in re.findall(r"[^.:_/]*[.:_/]+|[^.:_/]+", text))


def is_long(text: str) -> bool:
    """Whether a cell shows a name by its ends."""
    return len(text) > _LONG


def link_target(href: str) -> str:
    """A link as it may stand on a page.

    Raises:
        ValueError: It leads to another machine, or runs a script.
    """
    from urllib.parse import quote, urlsplit

    if href.startswith("#"):
        return href
    if urlsplit(href).scheme or href.startswith(("/", "\\")):
        raise ValueError(f"A page links to its own sections and to files beside it only, not to {href!r}.")
    return quote(href, safe="/")
