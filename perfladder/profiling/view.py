"""Markdown views of a profile and of an analysed trace: pure functions of their data."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from perfladder.markdown import cell, templates

if TYPE_CHECKING:
    from jinja2 import Environment


def render(data: dict[str, Any], template: str = "profile.md.j2") -> str:
    """Return the Markdown of `PerformanceProfile.data`, or of what another template shows."""
    return _templates().get_template(template).render(data=data)


def _templates() -> Environment:
    return templates("perfladder.profiling", _us, _percent, _ratio, _mib, _cell, _kernel)


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _mib(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**20:.1f}"


_NAMESPACES = re.compile(
    r"^void |at::native::|at::cuda::|\(anonymous namespace\)::"
    r"|autograd::engine::evaluate_function: (torch::autograd::)?"
)


def _kernel(value: object, length: int = 60) -> str:
    """A kernel's or operator's name without what most of them share, so that the rest tells them apart."""
    return _cell(_NAMESPACES.sub("", str(value)), length)


def _cell(value: object, length: int = 90) -> str:
    """A cell of bounded length."""
    text = cell(value)
    return text if len(text) <= length else text[: length - 3] + "..."
