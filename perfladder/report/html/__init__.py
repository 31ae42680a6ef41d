"""HTML pages that open offline: of a run, of a comparison, and of any sections."""

from perfladder.report.html.blocks import (
    Card,
    Cell,
    Code,
    Column,
    Command,
    Facts,
    Figure,
    Headline,
    Link,
    Plot,
    Section,
    Strong,
    Table,
    Text,
    View,
)
from perfladder.report.html.page import check_page, render_page, write_page
from perfladder.report.html.run_page import render_run

__all__ = [
    "Card",
    "Cell",
    "Code",
    "Column",
    "Command",
    "Facts",
    "Figure",
    "Headline",
    "Link",
    "Plot",
    "Section",
    "Strong",
    "Table",
    "Text",
    "View",
    "check_page",
    "render_page",
    "render_run",
    "write_page",
]
