"""Small pieces of text that several messages share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near_names(asked: str, known: Iterable[str], what: str, *, limit: int = 12) -> str:
    """Suggest what a misspelt name may have meant, and list what there is."""
    names = list(known)
    if not names:
        return f"There are no {what}."
    by_folded = {name.lower(): name for name in names}
    close = [by_folded[match] for match in difflib.get_close_matches(asked.lower(), by_folded, n=3, cutoff=0.55)]
    hint = f"Did you mean {' or '.join(repr(name) for name in close)}? " if close else ""
    listed = ", ".join(names[:limit]) + (f", and {len(names) - limit} more" if len(names) > limit else "")
    return f"{hint}Known {what}: {listed}."


def clause(sentence: object) -> str:
    """Return a message without its full stop, to be put into another sentence that has one."""
    return str(sentence).rstrip().rstrip(".")


def plural(count: int, noun: str) -> str:
    """Return '1 run' or '3 runs'."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
