"""Rows of kernels that CUDA graphs replayed, with the operator and module that a pass without graphs gives them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from perfladder.trace.graphs import GraphReplay, ReplayedKernel
from perfladder.trace.kernels import KernelSummary
from perfladder.trace.rows import Row

_ROUNDING: Final = 1e-6
Origin = tuple[str | None, ...]


class GraphRow(Row):
    """The CUDA graph replays of one region, per replayed call."""

    region: str | None
    count: int
    num_kernels: int
    total_us: float
    confidence: float | None


@dataclass
class _Part:
    """Kernels of one row that come from one place; times and counts are over all runs."""

    kernel: ReplayedKernel
    region: str | None
    confidence: float | None
    total_us: float = 0.0
    count: int = 0


def summarize_replays(replays: Iterable[GraphReplay], repeats: int) -> list[GraphRow]:
    """Return one row for each region that replays graphs; its confidence is that of its kernels together."""
    by_region: dict[str | None, list[GraphReplay]] = {}
    for replay in replays:
        by_region.setdefault(replay.region, []).append(replay)
    return [
        GraphRow(
            region=region,
            count=round(len(found) / repeats),
            num_kernels=round(sum(len(replay.kernels) for replay in found) / repeats),
            total_us=sum(kernel.duration_us for replay in found for kernel in replay.kernels) / repeats,
            confidence=_joint_confidence(found),
        )
        for region, found in by_region.items()
    ]


def _joint_confidence(replays: Sequence[GraphReplay]) -> float | None:
    if any(replay.confidence is None for replay in replays):
        return None
    paired = [kernel.is_paired for replay in replays for kernel in replay.kernels]
    return sum(paired) / len(paired)


def split_by_replay(rows: Sequence[KernelSummary], replays: Iterable[GraphReplay], repeats: int) -> list[KernelSummary]:
    """Divide each row among the places that its replayed kernels come from; the rows' sums stay what they are.

    Args:
        rows: Kernels of one call.
        replays: Graph replays of all profiled calls.
        repeats: How many calls that are.
    """
    parts = _collect_parts(replays)
    found = []
    for row in rows:
        here = parts.get((row.kernel, row.operator, row.outer_operator, row.region))
        if here is None:
            found.append(row)
            continue
        found += [_row_of(row, part, repeats) for part in here.values()]
        rest_us = row.total_us - sum(part.total_us for part in here.values()) / repeats
        if rest_us > _ROUNDING * row.total_us:  # launched from the same place without a graph too
            num_rest = max(1, row.count - round(sum(part.count for part in here.values()) / repeats))
            found.append(_scaled(row, rest_us, num_rest))
    return sorted(found, key=lambda row: -row.total_us)


def _collect_parts(replays: Iterable[GraphReplay]) -> dict[Origin, dict[Origin, _Part]]:
    """Group replayed kernels by the row they are counted in, and there by where they come from."""
    parts: dict[Origin, dict[Origin, _Part]] = {}
    for replay in replays:
        for kernel in replay.kernels:
            row_key: Origin = (kernel.kernel, replay.operator, replay.outer_operator, replay.region)
            place: Origin = (str(kernel.is_paired), kernel.operator, kernel.outer_operator, kernel.region)
            confidence = replay.confidence if kernel.is_paired or replay.confidence is None else 0.0
            part = parts.setdefault(row_key, {}).setdefault(place, _Part(kernel, replay.region, confidence))
            part.total_us += kernel.duration_us
            part.count += 1
            if confidence is not None and part.confidence is not None:
                part.confidence = min(part.confidence, confidence)
    return parts


def _row_of(row: KernelSummary, part: _Part, repeats: int) -> KernelSummary:
    count = max(1, round(part.count / repeats))
    changes: dict[str, object] = {"is_from_graph": True, "confidence": part.confidence}
    if part.kernel.is_paired:
        changes |= {
            "operator": part.kernel.operator,
            "outer_operator": part.kernel.outer_operator,
            "region": part.kernel.region or part.region,
        }
    return _scaled(row, part.total_us / repeats, count).model_copy(update=changes)


def _scaled(row: KernelSummary, total_us: float, count: int) -> KernelSummary:
    """Return a part of a row."""
    time_frac = total_us / row.total_us if row.total_us else 0.0
    changes = {
        "count": count,
        "total_us": total_us,
        "mean_us": total_us / count,
        "share": row.share * time_frac,
        "possible_win_us": None if row.possible_win_us is None else row.possible_win_us * time_frac,
        "repeat_us": [value * time_frac for value in row.repeat_us],
    }
    return row.model_copy(update=changes)
