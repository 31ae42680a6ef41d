"""How one of several backends is chosen for a graph, and what has to be shown before it is."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, ClassVar, Final, Literal, Self

from perfladder.backend.base import Backend
from perfladder.backend.eager import TorchEagerBackend
from perfladder.errors import InputError, TuningError
from perfladder.tuning.candidates import Candidate, GraphWork, Protocol
from perfladder.tuning.max_batch import find_max_batch_size
from perfladder.tuning.measure import (
    AllSamplesProfilingStopStrategy,
    ProfilingConfig,
)
from perfladder.tuning.records import CandidateRecord, DecisionRecord, Measurement

MIN_SPEEDUP_PERCENT: Final = 1.0
"""Least gain over the plain module; the interval of the speedup has to lie above it."""

Validation = bool | Literal["diagnostic"]
Milliseconds = Callable[[Measurement], float]
"""The duration of a call that a measurement stands for."""


@dataclass(frozen=True, eq=False)
class Decision:
    """What serves a graph from now on.

    Attributes:
        winner: None: the plain module.
        record: The evidence.
    """

    winner: Candidate | None
    record: DecisionRecord


class TuneStrategy(ABC):
    """Base of the strategies. Setters change the strategy and return it.

    Args:
        backends: In the order in which they are tried; None: the strategy's defaults.
        profiling_config: How candidates are timed.
        min_speedup_threshold_percent: Least gain over the plain module, which the interval of the speedup must clear.

    Raises:
        InputError: A backend is none, or a number is out of its range.
    """

    title: ClassVar[str]
    summary: ClassVar[str]

    def __init__(
        self,
        backends: Sequence[Backend] | None = None,
        profiling_config: ProfilingConfig | None = None,
        *,
        min_speedup_threshold_percent: float = MIN_SPEEDUP_PERCENT,
    ) -> None:
        for backend in backends or ():
            if not isinstance(backend, Backend):
                raise InputError(f"backends: {backend!r} is no backend; give objects such as TorchEagerBackend().")
        if backends is not None and not backends:
            raise InputError("backends: give at least one, or None for the defaults.")
        is_number = isinstance(min_speedup_threshold_percent, (int, float))
        if not is_number or not 0 <= min_speedup_threshold_percent < 1000:
            raise InputError(
                "min_speedup_threshold_percent: expected a percentage from 0 up, got "
                f"{min_speedup_threshold_percent!r}."
            )
        self.backends = list(backends) if backends is not None else None
        self.profiling_config = profiling_config or ProfilingConfig()
        self.min_speedup = min_speedup_threshold_percent / 100
        self._checks_correctness = True
        self._validation: Validation = True
        self._finds_max_batch_size = False

    def enable_correctness_check(self, enable: bool = True) -> Self:
        """Compare outputs with the plain module's before anything else (on by default)."""
        self._checks_correctness = enable
        return self

    def enable_performance_validation(self, mode: Validation = True) -> Self:
        """Demand a speedup (True, the default), measure and report without demanding it ("diagnostic"), or neither.

        Raises:
            InputError: It is another mode.
        """
        if mode not in (True, False, "diagnostic"):
            raise InputError(f"enable_performance_validation: expected True, False or 'diagnostic', got {mode!r}.")
        self._validation = mode
        return self

    def enable_find_max_batch_size(self, enable: bool = True) -> Self:
        """Extend the graph to the batch size at which the plain module's throughput saturates (off by default)."""
        self._finds_max_batch_size = enable
        return self

    def set_profiling_config(self, profiling_config: ProfilingConfig) -> Self:
        """How candidates are timed."""
        self.profiling_config = profiling_config
        return self

    def clone(self) -> Self:
        """A copy that can be changed."""
        return copy.copy(self)

    def describe(self) -> str:
        """What it does, in a line."""
        return self.summary

    def backends_for(self, module: Any, device_type: str) -> list[Backend]:
        """Those that were given, or the defaults for such a module."""
        return self.backends if self.backends is not None else default_backends(module, device_type)

    def tune(self, work: GraphWork) -> Decision:
        """Choose a backend for a graph.

        Raises:
            TuningError: None can be had, and the strategy does not fall back to the plain module by itself.
        """
        if self._finds_max_batch_size:
            find_max_batch_size(work, self.profiling_config.profiling_stop_strategy)
        return self._choose(work, self.backends_for(work.control.inner, work.device.type))

    @abstractmethod
    def _choose(self, work: GraphWork, backends: Sequence[Backend]) -> Decision:
        """Evaluate and decide."""

    def _protocol(self, batch_sizes: Sequence[int], **changes: Any) -> Protocol:
        protocol = Protocol(
            batch_sizes=tuple(sorted(batch_sizes)),
            measuring=self.profiling_config.measurement_stop_strategy,
            profiling=self.profiling_config.profiling_stop_strategy,
            min_effect=self.min_speedup,
            checks_correctness=self._checks_correctness,
        )
        return replace(protocol, **changes)

    def _batch_sizes(self, work: GraphWork) -> tuple[int, ...]:
        """Those asked for that the graph can have, else those of the recording and its largest one."""
        if not work.graph.has_batch_axis:
            return work.batch_sizes[:1]
        most = work.graph.get_max_batch_size()
        asked = self.profiling_config.batch_sizes
        if asked is None:
            return tuple(sorted({*work.batch_sizes, most}))
        return tuple(size for size in asked if size <= most) or (most,)

    def _decision(
        self,
        work: GraphWork,
        candidates: Sequence[Candidate],
        winner: Candidate | None,
        reason: str,
        measurement: Measurement | None = None,
    ) -> Decision:
        is_plain = winner is None or _is_baseline(winner.backend)
        return Decision(
            None if is_plain else winner,
            DecisionRecord(
                strategy=self.title,
                strategy_description=self.describe(),
                selected="eager" if winner is None or is_plain else winner.record.description,
                reason=reason,
                batch_size=measurement.batch_size if measurement else None,
                speedup=measurement.comparison.speedup if measurement else None,
                candidates=[candidate.record for candidate in candidates],
            ),
        )


class _Validated(TuneStrategy):
    """Strategies that look at one candidate at a time: it is right, and not slower than it claims."""

    def _evaluate(self, work: GraphWork, backend: Backend) -> Candidate:
        """A candidate that is right is kept if it is fast enough as well, at the largest batch size."""
        sizes = () if self._validation is False or _is_baseline(backend) else self._batch_sizes(work)[-1:]
        candidate = work.evaluate(backend, self._protocol(sizes))
        slow = _too_slow(candidate) if self._validation is True else None
        return _rejected(candidate, slow) if slow else candidate


class OneBackendStrategy(_Validated):
    """One backend: where it fails or is wrong the module fails; where it is no faster the plain module stays.

    Args:
        backend: Which.
    """

    title = "One Backend Strategy"
    summary = "use one backend, if it is right and faster"

    def __init__(
        self,
        backend: Backend,
        profiling_config: ProfilingConfig | None = None,
        *,
        min_speedup_threshold_percent: float = MIN_SPEEDUP_PERCENT,
    ) -> None:
        super().__init__([backend], profiling_config, min_speedup_threshold_percent=min_speedup_threshold_percent)

    def _choose(self, work: GraphWork, backends: Sequence[Backend]) -> Decision:
        candidate = self._evaluate(work, backends[0])
        record = candidate.record
        if candidate.is_usable:
            return self._decision(work, [candidate], candidate, _won(candidate), _last(candidate))
        if record.status == "rejected" and record.measurements:
            return self._decision(work, [candidate], None, f"{record.description}: {record.reason}", _last(candidate))
        raise TuningError(f"{record.description} {_status(record)}: {record.reason}", [record])


class FirstWinsStrategy(_Validated):
    """Backends in order; the first one that is right and faster than the plain module is taken."""

    title = "First Wins Strategy"
    summary = "try backends in order, take the first one that is right and faster"

    def _choose(self, work: GraphWork, backends: Sequence[Backend]) -> Decision:
        tried: list[Candidate] = []
        for backend in backends:
            tried.append(self._evaluate(work, backend))
            if tried[-1].is_usable:
                reason = _won(tried[-1]) if len(tried) == 1 else f"{_won(tried[-1])}; before it {_reasons(tried[:-1])}"
                return self._decision(work, tried, tried[-1], reason, _last(tried[-1]))
        raise TuningError(f"no backend can be taken: {_reasons(tried)}", [candidate.record for candidate in tried])


class _Profiled(TuneStrategy):
    """Strategies that time all candidates and take the best one."""

    def backends_for(self, module: Any, device_type: str) -> list[Backend]:
        """Those that were given, or all that build such a module exactly."""
        return self.backends if self.backends is not None else all_backends(module, device_type)

    def _choose(self, work: GraphWork, backends: Sequence[Backend]) -> Decision:
        protocol = self._profile(work)
        candidates = [
            work.evaluate(backend, replace(protocol, batch_sizes=()) if _is_baseline(backend) else protocol)
            for backend in backends
        ]
        judged: list[Candidate] = []
        best: tuple[float, Candidate, Measurement] | None = None
        typical_ms = _typical_ms(candidates)
        for candidate in candidates:
            found = self._best(candidate.record.measurements, typical_ms) if candidate.is_usable else None
            if candidate.is_usable and not _is_baseline(candidate.backend):
                why = self._why_not(candidate, found)
                candidate = _rejected(candidate, why) if why else candidate
                if found is not None and why is None and (best is None or self._score(found, typical_ms) > best[0]):
                    best = (self._score(found, typical_ms), candidate, found)
            judged.append(candidate)
        if best is None:
            return self._without_winner(work, judged)
        _, winner, measurement = best
        reason = f"{winner.record.description} is best: {self._praise(measurement)}"
        return self._decision(work, judged, winner, reason, measurement)

    def _profile(self, work: GraphWork) -> Protocol:
        return self._protocol(self._batch_sizes(work))

    def _best(self, measurements: Sequence[Measurement], typical_ms: Milliseconds) -> Measurement | None:
        """The measurement that stands for a candidate."""
        return max(measurements, key=lambda one: self._score(one, typical_ms), default=None)

    def _why_not(self, candidate: Candidate, found: Measurement | None) -> str | None:
        """Why a right candidate does not take part."""
        if found is None:
            return "it was not timed"
        is_demanded = self._validation is True and found.comparison.verdict != "faster"
        return f"no faster at batch size {found.batch_size}: {found.comparison.reason}" if is_demanded else None

    def _score(self, measurement: Measurement, typical_ms: Milliseconds) -> float:
        return measurement.batch_size / typical_ms(measurement)

    def _praise(self, found: Measurement) -> str:
        return (
            f"{found.throughput_items_per_s:.4g} samples a second at batch size {found.batch_size}, "
            f"{found.comparison.speedup or 0:.3g} times the plain module"
        )

    def _without_winner(self, work: GraphWork, judged: Sequence[Candidate]) -> Decision:
        return self._decision(work, judged, None, f"nothing is faster than the plain module: {_reasons(judged)}")


class MaxThroughputStrategy(_Profiled):
    """All backends at all batch sizes; the one with the highest throughput is taken, if it beats the plain module."""

    title = "Max Throughput Strategy"
    summary = "time all backends at all batch sizes, take the highest throughput"


class MinLatencyStrategy(_Profiled):
    """All backends at the least batch size; the one with the lowest median latency is taken."""

    title = "Min Latency Strategy"
    summary = "time all backends at the least batch size, take the lowest latency"

    def _profile(self, work: GraphWork) -> Protocol:
        least = work.graph.get_min_batch_size() if work.graph.has_batch_axis else work.batch_sizes[0]
        return self._protocol([least], profiling=AllSamplesProfilingStopStrategy())

    def _score(self, measurement: Measurement, typical_ms: Milliseconds) -> float:
        return -typical_ms(measurement)

    def _praise(self, found: Measurement) -> str:
        return f"{found.candidate_p50_ms:.4g} ms a call, {found.comparison.speedup or 0:.3g} times as fast as before"


class LatencyBudgetStrategy(_Profiled):
    """The highest throughput among the batch sizes whose median latency keeps to a budget.

    Where no candidate does, the plain module stays if it does itself.

    Args:
        latency_budget_ms: The largest accepted median, above 0.
    """

    title = "Latency Budget Strategy"
    summary = "time all backends, take the highest throughput within the latency budget"

    def __init__(
        self,
        latency_budget_ms: float,
        backends: Sequence[Backend] | None = None,
        profiling_config: ProfilingConfig | None = None,
        *,
        min_speedup_threshold_percent: float = MIN_SPEEDUP_PERCENT,
    ) -> None:
        super().__init__(backends, profiling_config, min_speedup_threshold_percent=min_speedup_threshold_percent)
        is_number = isinstance(latency_budget_ms, (int, float)) and not isinstance(latency_budget_ms, bool)
        if not is_number or not latency_budget_ms > 0:
            raise InputError(f"latency_budget_ms: expected milliseconds above 0, got {latency_budget_ms!r}.")
        self.latency_budget_ms = float(latency_budget_ms)

    def describe(self) -> str:
        """What it does, with the budget."""
        return f"{self.summary} of {self.latency_budget_ms:g} ms"

    def _profile(self, work: GraphWork) -> Protocol:
        return self._protocol(self._batch_sizes(work), budget_ms=self.latency_budget_ms)

    def _best(self, measurements: Sequence[Measurement], typical_ms: Milliseconds) -> Measurement | None:
        return super()._best([m for m in measurements if m.candidate_p50_ms <= self.latency_budget_ms], typical_ms)

    def _why_not(self, candidate: Candidate, found: Measurement | None) -> str | None:
        if found is None and candidate.record.measurements:
            least = min(m.candidate_p50_ms for m in candidate.record.measurements)
            return f"at best {least:.4g} ms, above the budget of {self.latency_budget_ms:g} ms"
        return super()._why_not(candidate, found)

    def _without_winner(self, work: GraphWork, judged: Sequence[Candidate]) -> Decision:
        plain = [m.baseline_p50_ms for candidate in judged for m in candidate.record.measurements]
        if plain and min(plain) > self.latency_budget_ms:
            raise TuningError(
                f"nothing keeps to {self.latency_budget_ms:g} ms, the plain module neither ({min(plain):.4g} ms at "
                f"best): {_reasons(judged)}",
                [candidate.record for candidate in judged],
            )
        return super()._without_winner(work, judged)


def _typical_ms(candidates: Sequence[Candidate]) -> Milliseconds:
    """Durations that can be compared between candidates, which were timed one after the other.

    Meanwhile a machine becomes faster or slower. What each was timed in turns with is the same plain module, so its
    median over all candidates, divided by a candidate's own speedup, is free of that.
    """
    plain: dict[int, list[float]] = {}
    for measurement in (one for candidate in candidates for one in candidate.record.measurements):
        plain.setdefault(measurement.batch_size, []).append(measurement.baseline_p50_ms)

    def typical_ms(measurement: Measurement) -> float:
        speedup = measurement.comparison.speedup
        return median(plain[measurement.batch_size]) / speedup if speedup else measurement.candidate_p50_ms

    return typical_ms


def default_backends(module: Any, device_type: str) -> list[Backend]:
    """What is tried where none are given: on CUDA TensorRT by both exporters, then Inductor, then the plain module.

    On CUDA Inductor and the plain module are tried as CUDA graphs first, and for convolutions in channels-last. What is
    not installed, or does not run on the device, is not applicable and costs nothing.
    """
    from torch import nn

    from perfladder.backend.inductor_jit import TorchInductorJitBackend
    from perfladder.backend.tensorrt import TensorRTBackend

    convolutions = (nn.Conv2d, nn.ConvTranspose2d)
    layouts: list[dict[str, Any]] = [{}]
    if any(isinstance(part, convolutions) for part in module.modules()):
        layouts.insert(0, {"memory_format": "channels_last"})
    found: list[Backend] = []
    if device_type == "cuda":
        found += [TensorRTBackend(), TensorRTBackend(use_dynamo=False)]
    for kind in (TorchInductorJitBackend, TorchEagerBackend):
        if device_type == "cuda":
            found += [kind(**layout, cuda_graphs=True) for layout in layouts]
        found += [kind(**layout) for layout in layouts]
    return found


def all_backends(module: Any, device_type: str) -> list[Backend]:
    """What is timed where none are given: the defaults, with those before the plain module that build ahead of time."""
    from perfladder.backend.inductor_aot import TorchInductorAotBackend
    from perfladder.backend.onnxruntime import ONNXRuntimeBackend
    from perfladder.backend.torch_tensorrt_aot import TorchTensorRTAotBackend
    from perfladder.backend.torch_tensorrt_jit import TorchTensorRTJitBackend

    found = default_backends(module, device_type)
    plain = [backend for backend in found if isinstance(backend, TorchEagerBackend)]
    ahead: list[Backend] = [TorchInductorAotBackend(), ONNXRuntimeBackend()]
    if device_type == "cuda":
        ahead += [TorchTensorRTAotBackend(), TorchTensorRTJitBackend()]
    return [*(backend for backend in found if backend not in plain), *ahead, *plain]


def _is_baseline(backend: Backend) -> bool:
    return isinstance(backend, TorchEagerBackend) and backend.is_baseline


def _rejected(candidate: Candidate, reason: str) -> Candidate:
    record = candidate.record.model_copy(update={"status": "rejected", "reason": reason})
    return Candidate(candidate.backend, record, None, candidate.key)


def _too_slow(candidate: Candidate) -> str | None:
    found = _last(candidate)
    if not candidate.is_usable or _is_baseline(candidate.backend):
        return None
    if found is None:
        return "it was not timed"
    verdict = found.comparison.verdict
    return None if verdict == "faster" else f"no faster at batch size {found.batch_size}: {found.comparison.reason}"


def _last(candidate: Candidate) -> Measurement | None:
    return candidate.record.measurements[-1] if candidate.record.measurements else None


def _won(candidate: Candidate) -> str:
    found = _last(candidate)
    if _is_baseline(candidate.backend):
        return "The plain module is next in order"
    if found is None:
        return f"{candidate.record.description} is right; its speed was not asked for"
    return f"{candidate.record.description} is right; {found.comparison.reason}"


def _status(record: CandidateRecord) -> str:
    status = record.status.replace("_", " ")
    return f"{status} in an earlier tuning, which clear_cache forgets" if record.is_reused else status


def _reasons(candidates: Sequence[Candidate]) -> str:
    told = [f"{c.record.description} ({_status(c.record)}: {c.record.reason})" for c in candidates if c.record.reason]
    return "; ".join(told) or "no other backend was tried"
