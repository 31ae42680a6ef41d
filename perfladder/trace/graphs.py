"""Kernels of replayed CUDA graphs, told apart by a window in which the same work ran without graphs.

A replay is one launch: of its kernels only the names and the times are known. Where the same kernels ran in the same
order without graphs, each has there an operator, a call and a module.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Final

import numpy as np

from perfladder.trace.kernels import KernelRow, KernelTable
from perfladder.trace.model import IntArray
from perfladder.trace.rows import Row

_GRAPH_LAUNCH: Final = ("cudaGraphLaunch", "cuGraphLaunch", "hipGraphLaunch")


class ReplayedKernel(Row):
    """One kernel of a replay, with where the same kernel came from without graphs.

    Attributes:
        kernel: Name of the kernel.
        duration_us: Its duration in the replay.
        operator: Innermost operator that launched the one without graphs; None if there is no such kernel.
        outer_operator: Outermost operator inside the region.
        function: Named call around it, if these were marked.
        region: Region id of the nearest module there.
        is_paired: Whether there is such a kernel.
    """

    kernel: str
    duration_us: float
    is_paired: bool = False
    operator: str | None = None
    outer_operator: str | None = None
    function: str | None = None
    region: str | None = None


class GraphReplay(Row):
    """One replay of a graph.

    Attributes:
        region: Region that replayed it.
        operator: Innermost operator around the replay.
        outer_operator: Outermost operator around it, inside the region.
        run: Number of the run.
        kernels: Its kernels, copies and fills in the order of their start.
        confidence: Share of them that the window without graphs has in the same order, from 0 to 1; below 1 the rest
            is not attributed, and repeated names may be paired with another one of the same name. None if there is no
            such window.
    """

    region: str | None
    operator: str | None = None
    outer_operator: str | None = None
    run: int | None
    kernels: list[ReplayedKernel]
    confidence: float | None


def attribute_replays(graphed: KernelTable, plain: KernelTable | None) -> list[GraphReplay]:
    """Pair the kernels of each graph replay with those of one run without graphs, by the sequence of their names.

    Args:
        graphed: The window with replays.
        plain: The same work without graphs, on the same device; its last run is taken, or all of it if it has no runs.
            What graphs launched there is left out. None pairs nothing.
    """
    pattern = [] if plain is None else [plain.row(index) for index in _plain_order(plain)]
    known: dict[tuple[str, ...], list[KernelRow | None]] = {}
    found = []
    for replay in _replays(graphed):
        rows = [graphed.row(index) for index in replay]
        names = tuple(row.kernel for row in rows)
        if names not in known:
            known[names] = _pair(names, pattern)
        replay_found = _describe(rows, known[names])
        found.append(replay_found if plain is not None else replay_found.model_copy(update={"confidence": None}))
    return found


def _plain_order(table: KernelTable) -> list[int]:
    """Return the entries of one run that no graph launched, in order."""
    if not table.num_kernels:
        return []
    replayed = [index for replay in _replays(table) for index in replay]
    return _in_order(table, np.setdiff1d(np.flatnonzero(table.run == table.run.max()), replayed))


def _in_order(table: KernelTable, entries: IntArray) -> list[int]:
    found: list[int] = entries[np.argsort(table.trace.start_ns[table.event[entries]], kind="stable")].tolist()
    return found


def _replays(table: KernelTable) -> Iterator[list[int]]:
    """Yield the entries of each replay, in the order of the launches."""
    names = table.trace.names
    is_graph = np.array([name.startswith(_GRAPH_LAUNCH) for name in names], bool)
    launched = np.flatnonzero(table.launch >= 0)
    by_graph = launched[is_graph[table.trace.forest.name_id[table.launch[launched]]]]
    for launch in np.unique(table.launch[by_graph]).tolist():
        yield _in_order(table, by_graph[table.launch[by_graph] == launch])


def _pair(names: tuple[str, ...], pattern: list[KernelRow]) -> list[KernelRow | None]:
    """Return the row of the pattern for each name, or None."""
    pattern_names = tuple(row.kernel for row in pattern)
    for start in range(len(pattern) - len(names) + 1):
        if pattern_names[start : start + len(names)] == names:
            return list(pattern[start : start + len(names)])
    source: list[KernelRow | None] = [None] * len(names)
    for block in SequenceMatcher(None, names, pattern_names, autojunk=False).get_matching_blocks():
        source[block.a : block.a + block.size] = pattern[block.b : block.b + block.size]
    return source


def _describe(replay: list[KernelRow], source: list[KernelRow | None]) -> GraphReplay:
    kernels = [
        ReplayedKernel(
            kernel=row.kernel,
            duration_us=row.duration_us,
            is_paired=found is not None,
            **({} if found is None else found.model_dump(include={"operator", "outer_operator", "function", "region"})),
        )
        for row, found in zip(replay, source, strict=True)
    ]
    return GraphReplay(
        region=replay[0].region,
        operator=replay[0].operator,
        outer_operator=replay[0].outer_operator,
        run=replay[0].run,
        kernels=kernels,
        confidence=sum(found is not None for found in source) / len(replay),
    )
