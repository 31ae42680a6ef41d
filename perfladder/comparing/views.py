"""A comparison as Markdown, as files, and as the lines that fit a terminal."""

from __future__ import annotations

import secrets
from pathlib import Path

from perfladder.comparing.model import Change, RunComparison
from perfladder.errors import NotPossibleHereError
from perfladder.files import write_atomically
from perfladder.markdown import templates

_SHOWN = 8
_LENGTH = 34


def render_comparison(comparison: RunComparison) -> str:
    """The comparison as Markdown, in tables of few columns; the same one always gives the same text."""
    template = templates("perfladder.comparing", _amount, _signed, _speedup, _verdict, _short, _value)
    return template.get_template("comparison.md.j2").render(c=comparison, shown=_SHOWN)


def check_folder(folder: Path) -> None:
    """Find out before measuring whether a folder can be written.

    Raises:
        NotPossibleHereError: It cannot.
    """
    probe = folder / f".{secrets.token_hex(4)}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise NotPossibleHereError(
            f"The folder {folder} cannot be written: {error.strerror}. Choose another with --to."
        ) from error


def write_comparison(comparison: RunComparison, folder: Path) -> list[Path]:
    """Write `comparison.json`, `comparison.md` and `comparison.html`, and return their paths."""
    from perfladder.comparing.page import render_comparison_page

    check_folder(folder)
    texts = {
        "comparison.json": comparison.model_dump_json(indent=1),
        "comparison.md": render_comparison(comparison),
        "comparison.html": render_comparison_page(comparison),
    }
    for name, text in texts.items():
        write_atomically(folder / name, text)
    return [folder / name for name in texts]


def _amount(value: float, unit: str) -> str:
    """A number with its unit, in few characters."""
    if unit == "bytes":
        return f"{value / 2**20:.1f} MiB"
    return f"{value:.0f} {unit}" if abs(value) >= 1000 else f"{value:.3g} {unit}"


def _signed(value: float, unit: str) -> str:
    return ("+" if value > 0 else "") + _amount(value, unit)


def _speedup(change: Change) -> str:
    if change.speedup is None:
        return "-"
    ends = f" ({change.interval.low:.3f} to {change.interval.high:.3f})" if change.interval else ""
    return f"{change.speedup:.3f}{ends}"


def _verdict(change: Change) -> str:
    if change.same_within is not None:
        return f"same within {change.same_within:.1%}"
    return f"**{change.verdict}**" if change.verdict in ("faster", "slower") else change.verdict


def _short(text: str) -> str:
    """Both ends of a long name: they tell it from others."""
    return text if len(text) <= _LENGTH else f"{text[: _LENGTH // 2 - 2]}...{text[-(_LENGTH // 2 - 1) :]}"


def _value(value: object) -> str:
    return "none" if value is None else str(value)
