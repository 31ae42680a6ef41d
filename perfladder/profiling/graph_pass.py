"""The pass without CUDA graphs that tells where the kernels of graph replays come from."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch import nn

from perfladder import _torch_private
from perfladder.errors import RungError, WorkloadError
from perfladder.functional.sites import ModuleSites
from perfladder.instrument import instrument
from perfladder.models import ResultWarning
from perfladder.profiling.graph_off import without_graphs
from perfladder.profiling.observers import Annotator
from perfladder.profiling.warnings import ProfileWarningCode, warn
from perfladder.trace.graphs import GraphReplay, attribute_replays
from perfladder.trace.kernels import KernelTable, list_kernels
from perfladder.trace.record import record_window

_WARMUP_RUNS: Final = 2
_MAX_MISSING: Final = 0.1
"""The part of the replays' kernels that may be missing in the other pass without a word."""


@dataclass(frozen=True)
class GraphPass:
    """How to run the stage once more.

    Attributes:
        path: Where the trace goes.
        sites: The modules to mark.
        modules: Where compiled modules are looked for.
        warm_up: Runs the call once.
        run: Runs it once, marked as a run.
        activities: What to record.
        deadline: When the whole has to be done, by `time.monotonic`.
    """

    path: Path
    sites: ModuleSites
    modules: Sequence[nn.Module]
    warm_up: Callable[[], object]
    run: Callable[[], object]
    activities: Sequence[str] | None
    deadline: float


def pair_replays(table: KernelTable, plan: GraphPass) -> tuple[list[GraphReplay], list[ResultWarning]]:
    """Find the graph replays of a window, and pair their kernels with those of a pass without graphs.

    Where there is no such pass, the replays have no confidence, and a warning says why.
    """
    alone = attribute_replays(table, None)
    if not alone:
        return [], []
    compile_s = _torch_private.compile_counters().seconds
    if time.monotonic() + compile_s > plan.deadline:
        why = f"compiling took {compile_s:.0f} s, and no such time is left before timeout_s"
        return alone, [_not_paired(alone, f"there was no time to compile without graphs: {why}")]
    with without_graphs(plan.modules) as changed:
        if not changed:
            why = (
                "the code captures its graphs itself, or compiles a function that is no module, so none can be left out"
            )
            return alone, [_not_paired(alone, why)]
        try:
            plain = _record(plan)
        except (RungError, WorkloadError) as error:
            return alone, [_not_paired(alone, f"the pass without graphs failed: {error}")]
    return (found := attribute_replays(table, plain)), _missing(found)


def _record(plan: GraphPass) -> KernelTable:
    for _ in range(_WARMUP_RUNS):  # the first one compiles
        plan.warm_up()
    all_threads = _torch_private.can_record_all_threads()
    with (
        record_window(plan.path, activities=plan.activities, all_threads=all_threads) as window,
        instrument(plan.sites.sites, Annotator(plan.sites.labels)),
    ):
        plan.run()
    return list_kernels(window.read(), only_runs=True)


def _missing(replays: Sequence[GraphReplay]) -> list[ResultWarning]:
    paired = [kernel.is_paired for replay in replays for kernel in replay.kernels]
    missing = 1 - sum(paired) / len(paired)
    if missing <= _MAX_MISSING:
        return []
    why = f"the pass without graphs does not launch {missing:.0%} of them in the same order"
    return [_not_paired(replays, why)]


def _not_paired(replays: Sequence[GraphReplay], why: str) -> ResultWarning:
    count = sum(len(replay.kernels) for replay in replays)
    return warn(
        ProfileWarningCode.GRAPH_KERNELS_NOT_PAIRED,
        f"CUDA graphs replayed {count} kernels in the profiled calls, and {why}. Those without an operator stand under "
        "the graph's launch.",
    )
