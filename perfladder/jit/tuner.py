"""Tune one form of call inside the program, and keep what was found for the next process."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from perfladder.backend.eager import TorchEagerBackend
from perfladder.errors import TuningError
from perfladder.files import private_folder, write_atomically
from perfladder.jit.config import JitSettings, jit_config
from perfladder.jit.report import JitGraph
from perfladder.timing.timer import Clock
from perfladder.tuning.cache import BuildCache, form_key
from perfladder.tuning.config import config
from perfladder.tuning.control import Chosen
from perfladder.tuning.correctness import seeded
from perfladder.tuning.graph import GraphModel
from perfladder.tuning.graph_work import decided, describe_work, make_graph_work
from perfladder.tuning.graphs import GraphSpec
from perfladder.tuning.records import CandidateRecord, DecisionRecord
from perfladder.tuning.strategies import MaxThroughputStrategy, TuneStrategy, default_backends

if TYPE_CHECKING:
    from perfladder.backend.base import Backend
    from perfladder.jit.control import JitControl
    from perfladder.tuning.candidates import GraphWork

_logger = logging.getLogger("perfladder.jit")


@dataclass(frozen=True, eq=False)
class Outcome:
    """How the tuning of one form of call ended.

    Attributes:
        verdict: `tuned`: `chosen` serves it; `eager`: the module cannot be tuned; `dry_run`: nothing was done.
        chosen: What serves it; None: the module itself.
        report: For people and files.
    """

    verdict: Literal["tuned", "eager", "dry_run"]
    chosen: Chosen | None
    report: JitGraph


class Tuner:
    """Tunes graphs of modules that are called.

    Args:
        clock: Nanoseconds.

    Attributes:
        is_armed: Whether modules may be tuned in deferred mode.
    """

    def __init__(self, clock: Clock = time.perf_counter_ns) -> None:
        self.clock = clock
        self.is_armed = False

    def settings(self) -> JitSettings:
        """Those of now."""
        return jit_config

    def may_tune(self) -> bool:
        """Whether calls lead to a tuning now."""
        mode = jit_config.mode
        return mode == "tune_eager" or (mode == "tune_deferred" and self.is_armed)

    def recall(self, control: JitControl, graph: GraphSpec) -> GraphSpec | None:
        """The graph, with the sizes that it had when an earlier process tuned it; None if there was none."""
        if jit_config.dry_run:
            return None
        try:
            cache = _cache(jit_config)
            model = GraphModel.model_validate_json(_file(cache, _form_key(control, graph)).read_bytes())
        except FileNotFoundError:
            return None
        except Exception as error:
            _logger.warning("%s: what is known of it cannot be used: %s", control.name, error)
            return None
        return GraphSpec.from_model(model.model_copy(update={"name": graph.name}))

    def tune(self, control: JitControl, graph: GraphSpec) -> Outcome:
        """Decide what serves a graph. Nothing is raised but what ends the process: a failure is an outcome."""
        settings = jit_config.snapshot()
        start_ns = self.clock()
        work: GraphWork | None = None
        record: DecisionRecord | None = None
        candidates: Sequence[CandidateRecord] = ()
        chosen: Chosen | None = None
        try:
            cache = _cache(settings)
            _check(control, settings)
            strategy = _strategy(settings, control)
            samples = control.recording.samples[graph.name]
            work = make_graph_work(
                control, graph, samples, config.snapshot(), cache, self.clock, is_dry_run=settings.dry_run
            )
            _logger.info("%s", describe_work(work, strategy))
            if settings.dry_run:
                backends = strategy.backends_for(control.inner, work.device.type)
                reason = f"dry run: would try {', '.join(map(repr, backends))}"
                return Outcome("dry_run", None, JitGraph.of(graph, selected=None, reason=reason))
            with _state_as_before(control.inner), seeded(work.device):
                decision, chosen = decided(work, strategy)
            record, candidates = decision.record, decision.record.candidates
            why = _why_not(record, settings)
            if why is None:
                _keep(cache, control, graph)
        except Exception as error:
            why = str(error) if isinstance(error, TuningError) else f"{type(error).__name__}: {error}"
            candidates = candidates or getattr(error, "candidates", ())
            _logger.debug("%s", control.name, exc_info=error)
        report = JitGraph.of(
            graph,
            selected=record.selected if record is not None and why is None else None,
            reason=why or (record.reason if record is not None else ""),
            speedup=record.speedup if record is not None and why is None else None,
            candidates=candidates,
            num_builds=work.num_builds if work is not None else 0,
            tuning_s=round((self.clock() - start_ns) / 1e9, 3),
        )
        _logger.info("%s, graph %s: %s. %s", control.name, graph.name, report.selected or "not tuned", report.reason)
        return Outcome("eager", None, report) if why is not None else Outcome("tuned", chosen, report)


def jit_backends(module: nn.Module, device_type: str) -> list[Backend]:
    """The default backends that build from live weights in the process.

    A program may load other weights into a module at any time, and a copy of them, as another memory format needs one,
    would go on with the old ones.
    """
    found = default_backends(module, device_type)
    return [backend for backend in found if not backend.writes_code and backend.config.memory_format is None]


def _strategy(settings: JitSettings, control: JitControl) -> TuneStrategy:
    """A search for a larger batch than the program uses would take its time and memory."""
    strategy: TuneStrategy = settings.strategy or MaxThroughputStrategy(
        jit_backends(control.inner, control.device.type)
    )
    return strategy.clone().enable_find_max_batch_size(False)


def _check(control: JitControl, settings: JitSettings) -> None:
    """What has to hold of a module.

    Raises:
        TuningError: It does not.
    """
    if any(hasattr(part, "_hf_hook") for part in control.inner.modules()):
        raise TuningError("it is moved between devices at each call (accelerate's offload)")
    if any(weight.device.type == "meta" for weight in control.inner.parameters()):
        raise TuningError("some of its weights are on the meta device")
    if settings.device is not None:
        wanted, found = torch.device(settings.device), control.device
        if found.type != wanted.type or wanted.index not in (None, found.index):
            raise TuningError(f"it is on {found}, and jit_config.device is {wanted}")


def _why_not(record: DecisionRecord, settings: JitSettings) -> str | None:
    """Why the decision means that the module cannot be tuned: no candidate could be judged, or the graph breaks."""
    plain = repr(TorchEagerBackend())
    tried = [candidate for candidate in record.candidates if candidate.description != plain]
    if settings.detect_graph_breaks:
        breaks = [c for c in tried if int(str(c.details.get("num_graph_breaks") or 0))]
        if breaks:
            return f"its graph breaks under {breaks[0].description} ({breaks[0].details['num_graph_breaks']} times)"
    is_judged = any(candidate.measurements or candidate.status == "kept" for candidate in tried)
    return record.reason if tried and not is_judged else None


@contextmanager
def _state_as_before(module: nn.Module) -> Iterator[None]:
    """Give buffers back what they held: trying a module out is not part of the program."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                if buffer.shape == value.shape and not torch.equal(buffer, value):
                    buffer.copy_(value)


def _cache(settings: JitSettings) -> BuildCache:
    return BuildCache(private_folder(settings.cache_dir))


def _form_key(control: JitControl, graph: GraphSpec) -> str:
    """Made once for each graph, since it reads all weights."""
    if graph.name not in control.form_keys:
        strict = control.recording.table.strict
        control.form_keys[graph.name] = form_key(control.inner, graph, control.device, strict=strict)
    return control.form_keys[graph.name]


def _file(cache: BuildCache, key: str) -> Path:
    return cache.root / "records" / f"{key}.graph.json"


def _keep(cache: BuildCache, control: JitControl, graph: GraphSpec) -> None:
    """Let the next process know the sizes at its first call; what was found is kept by candidate."""
    write_atomically(_file(cache, _form_key(control, graph)), graph.to_model().model_dump_json())
