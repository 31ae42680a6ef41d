"""Up to which batch size a graph is worth serving: powers of two, until throughput saturates or memory runs out."""

from __future__ import annotations

import gc
import logging
from typing import Final

import torch

from perfladder.models import digest
from perfladder.tuning.candidates import GraphWork
from perfladder.tuning.measure import ProfilingStop
from perfladder.tuning.samples import Sample

_logger = logging.getLogger("perfladder.tuning")

_MAX_POWER: Final = 16
_RUNS: Final = 3


def find_max_batch_size(work: GraphWork, stop: ProfilingStop) -> int | None:
    """Extend the graph to the batch size with the plain module's best throughput.

    Args:
        work: The graph; its largest sizes are changed.
        stop: When throughput counts as saturated.

    Returns:
        The largest batch size now, which is never above a stated one; None for a graph without a batch axis, which is
        not searched.
    """
    graph = work.graph
    if not graph.has_batch_axis:
        return None
    most, limit = graph.get_max_batch_size(), graph.get_batch_size_limit()
    if limit is not None and limit <= most:
        return most
    key = digest([work.key, "max batch size", most, repr(stop)])
    if (known := work.cache.read_number(key)) is not None:
        graph.extend_max_batch_size(known)
        return known
    throughputs: list[float] = []
    best, best_size = 0.0, most
    sizes = [size for size in (1 << power for power in range(_MAX_POWER + 1)) if size >= most]
    if limit is not None:
        sizes = [*(size for size in sizes if size < limit), limit]
    for size in sizes:
        throughput = _throughput(work, size)
        if throughput is None:
            break
        throughputs.append(throughput)
        if throughput > best:
            best, best_size = throughput, size
        if stop.is_enough(throughputs):
            break
    _logger.info("%s, graph %s: batch sizes up to %d", work.control.name, graph.name, best_size)
    graph.extend_max_batch_size(best_size)
    work.cache.write_number(key, best_size)
    return best_size


def _throughput(work: GraphWork, size: int) -> float | None:
    """Samples a second of the plain module; None where memory runs out or it takes no such size."""
    try:
        args, kwargs = work.graph.make_batch(*work.samples[0].fresh(), size)
        sample = Sample(args, kwargs, size)
        with torch.no_grad():
            times = [work.meter.time_ms(work.control.plain, sample.fresh()) for _ in range(_RUNS + 1)][1:]
    except Exception as error:
        _logger.info("%s: batch size %d cannot be had (%s)", work.control.name, size, type(error).__name__)
        times = []
    finally:
        work.state.restore()
        args, kwargs, sample = (), {}, None  # type: ignore[assignment]
    if not times:
        gc.collect()  # what failed may be held by frames that refer to one another
    if work.device.type != "cpu":
        torch.accelerator.memory.empty_cache()
    if not times:
        return None
    return size / max(min(times), 1e-6) * 1000
