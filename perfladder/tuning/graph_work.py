"""What tunings of every kind do with one graph: set the work up, decide, and tell."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from perfladder.tuning.cache import BuildCache, content_key
from perfladder.tuning.candidates import GraphWork
from perfladder.tuning.control import Chosen, ModuleControl
from perfladder.tuning.inspect import num_layers, precisions
from perfladder.tuning.isolation import TrialLimits
from perfladder.tuning.measure import Meter

if TYPE_CHECKING:
    from perfladder.timing.timer import Clock
    from perfladder.tuning.config import TuningSettings
    from perfladder.tuning.graphs import GraphSpec
    from perfladder.tuning.samples import Sample
    from perfladder.tuning.strategies import Decision, TuneStrategy

_logger = logging.getLogger("perfladder.tuning")


def make_graph_work(
    control: ModuleControl,
    graph: GraphSpec,
    samples: Sequence[Sample],
    settings: TuningSettings,
    cache: BuildCache,
    clock: Clock,
    *,
    is_dry_run: bool = False,
    tell: Callable[[str], None] = _logger.info,
) -> GraphWork:
    """One graph of a module, ready to be tuned where the module is; a dry run reads no weights."""
    device = control.device
    return GraphWork(
        control=control,
        graph=graph,
        samples=samples,
        device=device,
        folder=cache.build_folder(control.name, graph.name),
        cache=cache,
        key="" if is_dry_run else content_key(control.inner, graph, device),
        meter=Meter(device, clock),
        limits=TrialLimits(
            settings.build_timeout_s,
            settings.build_max_memory_bytes,
            is_wanted=settings.isolate_builds,
            cache_dir=cache.inductor_folder,
        ),
        tell=tell,
        nvtx=settings.nvtx,
    )


def decided(work: GraphWork, strategy: TuneStrategy) -> tuple[Decision, Chosen]:
    """The decision, with what serves the graph.

    A winner that is known from an earlier tuning is built, and held against the samples of this one. Where it fails,
    what was known of it is forgotten, and the decision is made again.
    """
    while True:
        decision = strategy.tune(work)
        winner = decision.winner
        if winner is None:
            return decision, Chosen(work.graph, None, "eager", record=decision.record)
        built, why_not = work.build(winner)
        if built is not None:
            served = Chosen(
                work.graph,
                built.call,
                decision.record.selected,
                winner.backend,
                folder=work.build_folder(winner.backend),
                record=decision.record,
                owns_weights=built.owns_weights,
            )
            return decision, served
        _logger.info("%r, known from an earlier tuning, is tried anew: %s", winner.backend, why_not)
        work.forget(winner)


def describe_work(work: GraphWork, strategy: TuneStrategy) -> str:
    """What the log says of a graph."""
    inner, graph = work.control.inner, work.graph
    backends = strategy.backends_for(inner, work.device.type)
    lines = [
        f"Graph {graph.name} of module {work.control.name}",
        f"  number of parameters: {sum(weight.numel() for weight in inner.parameters())}",
        f"  number of layers: {num_layers(inner)}",
        f"  precisions: {', '.join(precisions(inner)) or 'none'}",
        graph.describe(),
        f"  number of samples: {graph.num_samples}, of which {len(work.samples)} are kept",
        f"  device: {work.device}",
        f"  cache folder: {work.folder}",
        f"  strategy: {strategy.title} ({strategy.describe()})",
        "  backends:",
        *(f"    {backend!r}" for backend in backends),
    ]
    return "\n".join(lines)
