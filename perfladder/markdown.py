"""Text from templates: what the templates of every package share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def templates(package: str, *filters: Callable[..., object], is_html: bool = False) -> Environment:
    """The templates of a package; each filter has its function's name without a leading underscore.

    A name that a template uses and its data lack is an error. `is_html` escapes all that is put into a template.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(package),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=is_html,
    )
    environment.filters.update({function.__name__.lstrip("_"): function for function in (cell, *filters)})
    return environment


def cell(value: Any) -> str:
    """Text that cannot break out of a Markdown table cell."""
    return str(value).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("`", "'")


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table, without an end of line after it."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell(value) for value in line)} |" for line in lines)
