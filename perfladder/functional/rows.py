"""Rows of kernels with the named call that they come from, told by a pass of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perfladder.functional.compiled import region_name
from perfladder.functional.launch_sites import name_launch
from perfladder.functional.names import NO_CALL
from perfladder.trace.kernels import KernelSummary


def split_by_function(rows: Iterable[KernelSummary], marked: Iterable[KernelSummary]) -> list[KernelSummary]:
    """The rows of the plain pass, each divided among the calls that its kernels came from in the marked pass.

    So that all tables add up to the plain pass; what the marked pass has not seen stays without a call.
    """
    parts: dict[tuple[str | None, ...], list[KernelSummary]] = {}
    for row in marked:
        parts.setdefault(_origin(row), []).append(row)
    found = []
    for row in rows:
        seen = (None if row.confidence else parts.get(_origin(row))) or [row]
        whole_us, whole_count = sum(part.total_us for part in seen), sum(part.count for part in seen)
        for part in seen:
            time_frac = part.total_us / whole_us if whole_us else 1 / len(seen)
            changes = {
                "function": part.function,
                "launch_site": part.launch_site,
                "count": max(1, round(row.count * part.count / whole_count)) if whole_count else row.count,
                "total_us": row.total_us * time_frac,
                "share": row.share * time_frac,
                "possible_win_us": None if row.possible_win_us is None else row.possible_win_us * time_frac,
                "repeat_us": [value * time_frac for value in row.repeat_us],
            }
            found.append(row.model_copy(update=changes))
    return sorted(found, key=lambda row: -row.total_us)


def _origin(row: KernelSummary) -> tuple[str | None, ...]:
    return row.kernel, row.operator, row.outer_operator, row.region


def name_functions(rows: Iterable[KernelSummary], modules: Iterable[str], opaque: set[str]) -> list[str]:
    """Return the named call, compiled region or launch of each row.

    Args:
        rows: The rows.
        modules: The module of each.
        opaque: Names of modules whose inside runs as one graph.
    """
    return [_name_function(row, module, opaque) for row, module in zip(rows, modules, strict=True)]


def _name_function(row: KernelSummary, module: str, opaque: set[str]) -> str:
    if row.function is not None:
        return row.function
    if row.region is not None and module in opaque:
        return region_name(module, row.kernel, row.operator or "")
    return NO_CALL if row.launch_site is None else name_launch(row.kernel, row.launch_site)


def share_by_function(rows: Sequence[KernelSummary], functions: Sequence[str]) -> float:
    """Return the part of the time that named calls of modules hold."""
    named = zip(rows, functions, strict=True)
    return sum(row.share for row, name in named if row.region is not None and name != NO_CALL)
