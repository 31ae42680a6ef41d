"""Plots as plain data: colours that colour-blind readers tell apart, labels that are only text, common forms."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from perfladder.report.html.blocks import View
from perfladder.trace.families import FAMILIES

# Okabe and Ito, "Color Universal Design" (2008), without its yellow and black, which vanish on white or on black.
PALETTE: Final = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7")
GREY: Final = "#8A8F98"
SYMBOLS: Final = (
    *("circle", "square", "diamond", "triangle-up", "x", "star", "cross", "hexagon", "triangle-down", "pentagon"),
)
PATTERNS: Final = ("", "/", ".", "x", "\\", "-", "|", "+")
MAX_POINTS: Final = 1000
"""Samples of one group that a plot draws, evenly chosen; tables speak of all."""
_LABEL = 160

Trace = dict[str, Any]


def pattern(place: int) -> dict[str, Any]:
    """A hatching over a bar's colour, so that colour alone tells nothing apart."""
    shape = PATTERNS[place % len(PATTERNS)]
    return {"shape": shape, "size": 7, "solidity": 0.2, "fillmode": "overlay", "fgopacity": 0.3}


def label(text: str, length: int = _LABEL) -> str:
    """Text for a plot, where plotly reads a little HTML: `<` and `&` are escaped.

    A row of a plot is known by its label: of a very long name both ends stay, with a digest between them, so that no
    two names become one row. The page shortens what stands at an axis.
    """
    if len(text) > length:
        middle = hashlib.sha256(text.encode()).hexdigest()[:4]
        text = f"{text[: length // 2 - 4]}…{middle}…{text[-(length // 2 - 4) :]}"
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """One colour a name, by its place: the first six get those of the palette, the others grey."""
    return {name: PALETTE[place] if place < len(PALETTE) else GREY for place, name in enumerate(dict.fromkeys(names))}


def thinned(values: Sequence[float], limit: int = MAX_POINTS) -> list[float]:
    """At most so many of the values, evenly chosen."""
    if len(values) <= limit:
        return list(values)
    return [values[index * len(values) // limit] for index in range(limit)]


def box(name: str, values: Sequence[float], colour: str, *, unit: str = "ms") -> Trace:
    """Distribution of samples along x: each of them, and a box of their quartiles."""
    shown = thinned(values)
    return {
        "type": "box",
        "orientation": "h",
        "name": label(name),
        "x": shown,
        "y": [label(name)] * len(shown),
        "boxpoints": "all",
        "jitter": 0.6,
        "pointpos": 0,
        "whiskerwidth": 0.5,
        "line": {"color": colour, "width": 1.5},
        "fillcolor": "rgba(0,0,0,0)",
        "marker": {"color": colour, "size": 5, "opacity": 0.55},
        "hovertemplate": "%{x:.4g} " + unit + "<extra>" + label(name) + "</extra>",
        "showlegend": False,
    }


def family_colour(family: str) -> str:
    """One colour for a kernel family wherever it is drawn; the rarer ones share grey and differ in their marks."""
    names = [str(known) for known in FAMILIES]
    place = names.index(family) if family in names else len(PALETTE)
    return PALETTE[place] if place < len(PALETTE) else GREY


def stacked(row: str, parts: Mapping[str, float], unit: str, order: Sequence[str]) -> list[Trace]:
    """One bar of parts, each with its colour, its pattern and its place in `order`."""
    return [
        {
            "type": "bar",
            "orientation": "h",
            "name": label(part),
            "legendgroup": part,
            "y": [label(row)],
            "x": [value],
            "marker": {
                "color": PALETTE[place % len(PALETTE)],
                "pattern": pattern(place),
            },
            "text": [label(part)],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "hovertemplate": f"{label(part)}: %{{x:.4g}} {unit}<extra>{label(row)}</extra>",
        }
        for place, part in enumerate(order)
        if (value := parts.get(part, 0.0)) > 0
    ]


def with_one_legend(traces: list[Trace]) -> list[Trace]:
    """Each name once in the legend, however many bars have it."""
    seen: set[str] = set()
    shown = []
    for trace in traces:
        shown.append(trace | {"showlegend": trace["name"] not in seen})
        seen.add(trace["name"])
    return shown


def rows_layout(names: Sequence[str], title: str, **more: Any) -> dict[str, Any]:
    """Layout for plots with one row a name, the first on top."""
    shown = [label(name) for name in names]
    return {
        "xaxis": {"title": {"text": title}, "rangemode": "tozero"},
        "yaxis": {"categoryorder": "array", "categoryarray": shown, "autorange": "reversed", "type": "category"},
    } | more


def rows_height(num_rows: int, each: int = 34) -> int:
    """Height in pixels of a plot with so many rows."""
    return 110 + each * max(num_rows, 1)


def layout_of(view: View) -> dict[str, Any]:
    """The view's layout with the names of its traces in a legend only where several are named."""
    num_named = len({trace.get("name") for trace in view.traces if trace.get("showlegend", True) and "name" in trace})
    return {"showlegend": num_named > 1} | dict(view.layout)
