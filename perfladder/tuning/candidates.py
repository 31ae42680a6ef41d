"""One backend on one graph: is it applicable, does it build, is it right, how fast is it?"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from perfladder.backend.base import Backend, BuildRequest, Built
from perfladder.models import digest
from perfladder.tuning.build_log import LOG_FILE, logged_here
from perfladder.tuning.cache import library_versions, source_of
from perfladder.tuning.correctness import TOLERANCES, Case, Expected, check, expectations
from perfladder.tuning.isolation import TrialLimits, try_in_child
from perfladder.tuning.measure import Arguments, MeasuringStop, Meter, ProfilingStop, Timing, measure_pairs
from perfladder.tuning.observe import nvtx_range
from perfladder.tuning.quality import QualityGate
from perfladder.tuning.records import CandidateRecord, CorrectnessRecord, Measurement, Status
from perfladder.tuning.samples import Sample
from perfladder.tuning.state import ModuleState

if TYPE_CHECKING:
    import torch

    from perfladder.tuning.cache import BuildCache
    from perfladder.tuning.control import ModuleControl
    from perfladder.tuning.graphs import GraphSpec

_logger = logging.getLogger("perfladder.tuning")

DEFAULT_GATE: Final = QualityGate("cosine", 0.99)
"""For a candidate that is lossy by design, where the user gives no gate for the whole pipeline."""


@dataclass(frozen=True)
class Protocol:
    """How candidates are checked and timed.

    Attributes:
        batch_sizes: In increasing order; empty: not timed.
        measuring: How often each size.
        profiling: When to try no larger one.
        min_effect: Relative change below which a candidate is not faster.
        checks_correctness: Whether outputs are compared at all.
        budget_ms: A median above it ends the sizes.
    """

    batch_sizes: tuple[int, ...]
    measuring: MeasuringStop
    profiling: ProfilingStop
    min_effect: float
    checks_correctness: bool
    budget_ms: float | None = None


@dataclass(eq=False)
class Candidate:
    """A backend, what is known of it (from an earlier tuning by `key`), and what it built, if it was built now."""

    backend: Backend
    record: CandidateRecord
    built: Built | None = None
    key: str | None = None

    @property
    def is_usable(self) -> bool:
        """Whether it is right, as far as that was checked."""
        return self.record.status == "kept"


@dataclass(eq=False)
class GraphWork:
    """One graph while it is tuned.

    Attributes:
        control: Of the module.
        graph: The form of call.
        samples: Recorded calls of it.
        device: Where it runs.
        folder: For builds.
        cache: Records of earlier tunings.
        key: What identifies module, graph, versions and device.
        meter: Times calls.
        state: What the module kept between its calls before any candidate was tried.
        limits: For first builds in a process of their own.
        gate: For lossy candidates, on the module's outputs.
        pipeline_gate: The same on the whole pipeline's output: takes what runs the candidate, tells the value and why
            it is not good enough.
    """

    control: ModuleControl
    graph: GraphSpec
    samples: Sequence[Sample]
    device: torch.device
    folder: Path
    cache: BuildCache
    key: str
    meter: Meter
    limits: TrialLimits
    gate: QualityGate = DEFAULT_GATE
    pipeline_gate: Callable[[Callable[..., Any]], tuple[float, str | None]] | None = None
    pipeline_gate_name: str = ""
    pipeline_gate_key: str = ""
    tell: Callable[[str], None] = _logger.info
    nvtx: bool = False
    num_builds: int = 0
    state: ModuleState = field(init=False)
    _expected: list[Expected] | None = field(default=None, init=False)
    _checks_correctness: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self.state = ModuleState(self.control.inner)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Sizes at which the graph was recorded; one of unknown size counts as 1."""
        return tuple(sorted({sample.batch_size or 1 for sample in self.samples} | set(self.graph.batch_sizes)))

    def evaluate(self, backend: Backend, protocol: Protocol) -> Candidate:
        """What an earlier tuning of the same thing found, or else a trial now."""
        key, failed_key = self._key(backend, protocol), self._failed_key(backend, protocol)
        self._checks_correctness = protocol.checks_correctness
        for known in (key, failed_key):
            if (record := self.cache.read(known)) is not None:
                return Candidate(backend, record.model_copy(update={"is_reused": True}), key=known)
        self.tell(f"{self.control.name}, graph {self.graph.name}: trying {backend!r}")
        try:
            with nvtx_range("try", module=self.control.name, backend=backend.name, enabled=self.nvtx):
                candidate = self._try(backend, protocol)
        finally:
            self.state.restore()
        # What others took of a device's memory may be free the next time.
        is_passing = "OutOfMemoryError" in (candidate.record.reason or "")
        if candidate.record.status != "not_applicable" and not is_passing:
            self.cache.write(failed_key if candidate.record.status == "failed" else key, candidate.record)
        return candidate

    def build(self, candidate: Candidate) -> tuple[Built | None, str | None]:
        """What the candidate built, or a build now for one that is known from before; or why that is no good."""
        key = self._build_key(candidate.backend)
        live = candidate.built or self.control.builds.get(key)
        if not candidate.record.is_reused:
            assert live is not None, "it was built to be tried"
        else:
            try:
                live = live or self._build(candidate.backend)
                if self._checks_correctness:
                    reason, _ = self._compared(candidate.backend, live)
                    if reason is not None:
                        return None, reason
            except (Exception, SystemExit) as error:
                return None, f"{type(error).__name__}: {error}"
            finally:
                self.state.restore()
        self.control.builds[key] = live
        return live, None

    def forget(self, candidate: Candidate) -> None:
        """Drop what is known of a candidate from an earlier tuning."""
        assert candidate.key is not None, "it is known from an earlier tuning"
        self.cache.forget(candidate.key)
        self.control.builds.pop(self._build_key(candidate.backend), None)

    def build_folder(self, backend: Backend) -> Path:
        """Where a backend's build writes."""
        return self.folder / f"{backend.name}-{self._build_key(backend)}"

    def _try(self, backend: Backend, protocol: Protocol) -> Candidate:
        record = CandidateRecord(
            backend=backend.name,
            description=repr(backend),
            config=backend.config.model_dump(mode="json"),
            status="kept",
        )

        def ended(status: Status, reason: str, **facts: Any) -> Candidate:
            _logger.info("%s: %s (%s)", backend, status, reason)
            return Candidate(backend, record.model_copy(update={"status": status, "reason": reason, **facts}))

        reason = backend.why_not(self.device) or backend.why_not_for(self.control.inner)
        if reason := reason or backend.why_not_for_graph(self.graph):
            return ended("not_applicable", reason)
        trial = None
        if backend.is_isolated:
            trial = try_in_child(backend, self._request(backend), self.limits)
            record = record.model_copy(
                update={"trial_s": trial.duration_s, "peak_host_rss_bytes": trial.peak_host_rss_bytes}
            )
            record = self._with_log(record, backend)
            if trial.error is not None:
                return ended("failed", trial.error)
        start = time.monotonic()
        try:
            if protocol.checks_correctness:
                _ = self.expected  # of the module before a build in this process, which may change it
                start = time.monotonic()
            built = self._build(backend)
        except (Exception, SystemExit) as error:  # some compilers exit where they should raise
            record = self._with_log(record, backend)
            return ended("failed", f"{type(error).__name__}: {error}")
        record = self._with_log(record, backend).model_copy(
            update={"build_s": round(time.monotonic() - start, 3), "details": dict(built.details)}
        )
        try:
            reason, facts = self._judge(backend, built, protocol)
        except (Exception, SystemExit) as error:
            return ended("failed", f"{type(error).__name__}: {error}")
        record = record.model_copy(update=facts)
        if reason is not None:
            return ended("rejected", reason)
        return Candidate(backend, record, built)

    def _judge(self, backend: Backend, built: Built, protocol: Protocol) -> tuple[str | None, dict[str, Any]]:
        """Correctness first, then speed."""
        facts: dict[str, Any] = {}
        if protocol.checks_correctness:
            reason, facts["correctness"] = self._compared(backend, built)
            if reason is not None:
                return reason, facts
        facts["measurements"] = [Measurement.of(timing) for timing in self._time(built, protocol)]
        return None, facts

    def _compared(self, backend: Backend, built: Built) -> tuple[str | None, CorrectnessRecord]:
        """Why a candidate is wrong, if it is, by its own output and, of a lossy one, by that of the pipeline."""
        gate = self.gate if backend.is_lossy else None
        found = check(built.call, self.expected, self.device, gate)
        record = CorrectnessRecord.of(found, gate.demand if gate else None, dict(TOLERANCES))
        if found.reason is not None or not backend.is_lossy or self.pipeline_gate is None:
            reason = found.reason and (self._other_reason(self.expected[found.num_cases - 1]) or found.reason)
            return reason, record
        value, why = self.pipeline_gate(built.call)
        return why, record.model_copy(update={"quality": value, "gate": self.pipeline_gate_name})

    def _other_reason(self, case: Expected) -> str | None:
        """Why an output that is wrong in a case is not the candidate's fault; None where it is."""
        if case.opaque:
            return None
        found = check(self.control.plain, [case], self.device, None)
        if found.reason is None:
            return None
        return (
            f"the plain module itself gives another output than before ({found.reason}), so that no candidate can be "
            "held against it: it draws random numbers that torch's seed does not set, keeps state that cannot be set "
            "back, or this backend changed it"
        )

    def _case(self, label: str, make: Callable[[], Arguments]) -> Case:
        """A case that begins from the module's own state, which calls may change."""

        def prepared() -> Arguments:
            self.state.restore()
            return make()

        return Case(label, prepared)

    @property
    def expected(self) -> list[Expected]:
        """What the plain module does with the samples, and at the ends of the graph's sizes."""
        if self._expected is None:
            cases = [self._case(f"sample {number}", sample.fresh) for number, sample in enumerate(self.samples)]
            if self.graph.has_dynamic_axis:
                first = self.samples[0]
                for which, label in (("min", "least"), ("opt", "preferred"), ("max", "largest")):
                    cases.append(
                        self._case(f"{label} sizes", lambda w=which: self.graph.at_shapes(*first.fresh(), w))  # type: ignore[misc]
                    )
            self._expected = expectations(self.control.plain, cases, self.device)
        return self._expected

    def sample_of(self, batch_size: int) -> Sample:
        """Arguments of that batch size: recorded ones, or those of another size cut or repeated."""
        for sample in self.samples:
            if (sample.batch_size or 1) == batch_size:
                return sample
        args, kwargs = self.graph.make_batch(*self.samples[0].fresh(), batch_size)
        return Sample(args, kwargs, batch_size)

    def _time(self, built: Built, protocol: Protocol) -> list[Timing]:
        timings: list[Timing] = []
        for batch_size in protocol.batch_sizes:
            timings.append(
                measure_pairs(
                    self.meter,
                    self.control.plain,
                    built.call,
                    self.sample_of(batch_size),
                    batch_size=batch_size,
                    stop=protocol.measuring,
                    min_effect=protocol.min_effect,
                    changes_inputs=any(one.changes_inputs for one in self.expected),
                )
            )
            is_over = protocol.budget_ms is not None and timings[-1].candidate_p50_ms > protocol.budget_ms
            if is_over or protocol.profiling.is_enough([timing.throughput for timing in timings]):
                break
        return timings

    def _build(self, backend: Backend) -> Built:
        self.num_builds += 1
        request = self._request(backend)
        with self.cache.inductor(), logged_here(backend, request):
            return backend.build(request)

    def _with_log(self, record: CandidateRecord, backend: Backend) -> CandidateRecord:
        path = self.build_folder(backend) / LOG_FILE
        return record.model_copy(update={"log_file": str(path)}) if path.is_file() else record

    def _request(self, backend: Backend) -> BuildRequest:
        folder = self.build_folder(backend)
        folder.mkdir(parents=True, exist_ok=True)
        return BuildRequest(
            self.control.inner,
            self.control.plain,
            self.graph,
            self.samples,
            self.device,
            folder,
            self.cache.shared_folder,
        )

    def _build_key(self, backend: Backend) -> str:
        sizes = [spec.max_shape for spec in self.graph.inputs]  # a search for larger batches may have changed them
        code = [[source_of(kind) for kind in backend.classes], library_versions(backend.libraries)]
        return digest([self.key, sizes, backend.name, code, backend.config.model_dump(mode="json")])

    def _key(self, backend: Backend, protocol: Protocol) -> str:
        gate = [repr(self.gate), self.pipeline_gate_key] if backend.is_lossy else None
        return digest([self._build_key(backend), repr(protocol), gate])

    def _failed_key(self, backend: Backend, protocol: Protocol) -> str:
        """What failed may have done so for a lack of time or memory, and gets another try under other limits."""
        limits = self.limits
        return digest([self._key(backend, protocol), limits.timeout_s, limits.max_memory_bytes, limits.is_wanted])
