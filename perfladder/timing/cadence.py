"""Arrival of streamed chunks: whether they come as fast as they play."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from perfladder.stats import Samples, summarize
from perfladder.timing.results import CadenceTiming
from perfladder.timing.timer import NS_PER_MS, RunTiming
from perfladder.workload import Media


def cadence_of(runs: list[RunTiming], media: Media | None) -> CadenceTiming | None:
    """Time the chunks of streamed runs; where nothing is streamed and `media` is given, each call is one chunk."""
    streamed = [timing for timing in runs if timing.item_end_ns]
    if not streamed and media is None:
        return None
    if not streamed:
        streamed = [replace(timing, item_end_ns=[timing.end_ns]) for timing in runs]
    arrivals = [(np.array([timing.start_ns, *timing.item_end_ns]) - timing.start_ns) / NS_PER_MS for timing in streamed]
    chunk_ms = [gap for times in arrivals for gap in np.diff(times).tolist()]
    summary = summarize(chunk_ms)
    limit_ms = media.chunk_ms - media.margin_ms if media else None
    return CadenceTiming(
        media_ms_per_chunk=media.chunk_ms if media else None,
        margin_ms=media.margin_ms if media else None,
        chunks_per_run=len(chunk_ms) / len(streamed),
        first_chunk_ms=Samples(launches=[[float(times[1]) for times in arrivals]]),
        chunk_ms=summary,
        chunk_samples_ms=chunk_ms,
        num_late_chunks=sum(gap > limit_ms for gap in chunk_ms) if limit_ms is not None else None,
        headroom_ms=limit_ms - summary.p95 if limit_ms is not None else None,
        num_stalls=sum(num_stalls(times[1:].tolist(), media.chunk_ms) for times in arrivals) if media else None,
    )


def num_stalls(arrival_ms: Sequence[float], chunk_ms: float) -> int:
    """Chunks that were not there when a viewer, who starts with the first chunk, had played all before them.

    Chunks that come early are kept, so a late one need not stall; after a stall playing goes on when the chunk arrives.
    """
    stalls, played_until = 0, arrival_ms[0] + chunk_ms
    for arrival in arrival_ms[1:]:
        stalls += arrival > played_until
        played_until = max(arrival, played_until) + chunk_ms
    return stalls
