"""What a page is made of: sections of text, facts, tables, plots and cards. All text is plain; the page escapes it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from perfladder.models import Model

Tone = Literal["good", "bad", "neutral", "unsure"]


class Code(Model):
    """A name, a command or a path."""

    kind: Literal["code"] = "code"
    text: str


class Link(Model):
    """A link: `#section`, or a path relative to the page's own folder. Nothing else: a page asks no other machine."""

    kind: Literal["link"] = "link"
    text: str
    href: str


class Strong(Model):
    """What the eye is to find first."""

    kind: Literal["strong"] = "strong"
    text: str


Inline = str | Code | Link | Strong
Line = list[Inline]
"""A line of text in parts; plain ones are strings."""


class Text(Model):
    """A paragraph. A note is set apart; `absent` says why something is not there."""

    kind: Literal["text"] = "text"
    line: Line
    role: Literal["plain", "note", "absent"] = "plain"


class Facts(Model):
    """Pairs of a name and what is known of it."""

    kind: Literal["facts"] = "facts"
    rows: list[tuple[str, Line]]


class Command(Model):
    """A command to copy."""

    kind: Literal["command"] = "command"
    text: str


class Cell(Model):
    """One cell of a table.

    A number is sorted by `value`, text by itself; a number without text is written with as many decimals as the others
    of its column. `bar` (0 to 1) is drawn behind it; a tone makes the text a chip.
    """

    text: str = ""
    value: float | None = None
    bar: float | None = None
    is_code: bool = False
    href: str | None = None
    tone: Tone | None = None


class Column(Model):
    """A column; numbers stand on the right. `unit` and `hint` (what it means) are part of the head."""

    title: str
    is_number: bool = False
    unit: str | None = None
    hint: str | None = None


class Table(Model):
    """A table that readers sort by each column; `num_shown` rows are shown until they ask for all."""

    kind: Literal["table"] = "table"
    caption: str
    columns: list[Column]
    rows: list[list[Cell]]
    num_shown: int = 25
    is_searchable: bool = False
    footer: list[list[Cell]] = Field(default=[], description="Rows that stay at the end, such as a sum.")
    has_total: bool = Field(default=False, description="The last row of the footer is the whole.")


class View(Model):
    """One way to show a plot: traces and layout as plotly takes them, axes without colours or fonts.

    Text of traces must be escaped by `plots.label`: plotly reads a little HTML in it.
    """

    name: str
    traces: list[dict[str, JsonValue]]
    layout: dict[str, JsonValue] = {}


class Plot(Model):
    """A plot, drawn when it comes near the window; several views are chosen by buttons above it.

    Its numbers must stand in a table or a text beside it too, for readers without script or sight.
    """

    kind: Literal["plot"] = "plot"
    title: str
    reading: str = Field(description="How it is to be read, in one or two sentences.")
    views: list[View]
    height: int = 360


class Card(Model):
    """A claim with what it rests on; `command` is what to do next."""

    kind: Literal["card"] = "card"
    id: str
    label: str
    title: str
    rows: list[tuple[str, list[Line]]]
    command: str | None = None


Block = Annotated[Text | Facts | Command | Table | Plot | Card, Field(discriminator="kind")]


class Section(Model):
    """A part of the page with an entry in its navigation; `id` is its anchor."""

    id: str = Field(pattern=r"^[a-z][a-z0-9-]*$")
    title: str
    blocks: list[Block]
    is_absent: bool = Field(default=False, description="It says only why it is not there.")


class Figure(Model):
    """The number of a headline."""

    name: str
    value: str
    unit: str
    range: str | None = None


class Headline(Model):
    """What a reader sees first: the number, what it means, and what to do next."""

    subtitle: str
    figure: Figure | None = None
    verdict: str
    tone: Tone = "neutral"
    verdict_href: str | None = None
    next_step: str | None = None
    command: str | None = None
    chips: list[tuple[str, str]] = Field(default=[], description="Short facts by name.")
    alert: str | None = Field(default=None, description="What makes the page's numbers incomplete.")


def absent(section_id: str, title: str, reason: str) -> Section:
    """A section that says why it is not there."""
    return Section(id=section_id, title=title, blocks=[Text(line=[reason], role="absent")], is_absent=True)
