"""One row a kernel: from which operator, function and region it came, when it was launched, and when it ran.

On a trace without device work the "kernels" are the operators that call no others; the self time of those that do is
reported beside them, so that both add up to the time in operators. What the runtime of `torch.compile` takes for itself
is among them under one name (`trace.dynamo`), so that the sum is whole.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfladder.trace.attribution import Attribution, attribute
from perfladder.trace.dynamo import find_wrappers, with_runtime_as_one
from perfladder.trace.families import FAMILIES, families_of
from perfladder.trace.labels import FUNCTION_KIND, LAUNCH_KIND, Label
from perfladder.trace.model import BoolArray, Category, IntArray, Trace
from perfladder.trace.rows import Row
from perfladder.trace.sums import FloatArray, count_by, longest_by, number_combinations, sum_by

_US: Final = 1e-3
_NONE: Final = -1


@dataclass(frozen=True, eq=False)
class KernelTable:
    """One entry for each kernel, copy and fill, or for each operator, with its self time, on a host-only trace.

    Attributes:
        trace: The trace that the indices below point into.
        labels: For each name of the trace, the region's label, as in `Attribution`.
        is_host: Whether these are operators of the host.
        event: Index into the trace.
        duration_ns: Duration of the kernel, or self time of the operator: so the entries never overlap. Where
            `trace.repeats` has taken the typical ones of several repeats, these.
        operator: Position (in `trace.forest`) of the innermost operator, or -1.
        outer_operator: Position of the outermost operator inside the innermost region, or -1; what the runtime of
            `torch.compile` puts around operators is none.
        function: Position of the innermost span of a functional call, or -1.
        launch_site: Position of the span that names the line which launched it, or -1.
        region: Position of the innermost region: the nearest module, or -1.
        run: Number of the run, or -1.
        launch: Position of the launching call, or -1.
        launch_ns: Start of the launching call; -1 if unknown, and for operators.
        latency_ns: From there to the start on the device; -1 if unknown, and for operators.
        measured_ns: Duration as it was measured, where `duration_ns` is the typical one.
        num_repeats: Of how many repeats it is that, which `run` numbers; 0 if it is none.
    """

    trace: Trace
    labels: tuple[Label | None, ...]
    is_host: bool
    event: IntArray
    duration_ns: IntArray
    operator: IntArray
    outer_operator: IntArray
    function: IntArray
    launch_site: IntArray
    region: IntArray
    run: IntArray
    launch: IntArray
    launch_ns: IntArray
    latency_ns: IntArray
    measured_ns: IntArray | None = None
    num_repeats: int = 0

    @property
    def num_kernels(self) -> int:
        """Number of entries."""
        return len(self.event)

    @property
    def total_us(self) -> float:
        """Sum of the durations."""
        return int(self.duration_ns.sum()) * _US

    def repeat_us(self, group: IntArray, size: int) -> list[list[float]]:
        """Return what each group took in each repeat, as measured; empty lists where repeats are not told apart."""
        if self.measured_ns is None:
            return [[] for _ in range(size)]
        place = group.astype(np.int64) * self.num_repeats + self.run
        totals = sum_by(place, self.measured_ns, size * self.num_repeats) * _US
        found: list[list[float]] = totals.reshape(size, self.num_repeats).tolist()
        return found

    def _label(self, position: int) -> str | None:
        label = self.labels[self.trace.forest.name_id[position]] if position >= 0 else None
        if label is None:
            return None
        return label.name if label.kind in (FUNCTION_KIND, LAUNCH_KIND) else label.region_id

    def row(self, index: int) -> KernelRow:
        """Return one entry as a row of names and microseconds."""
        trace, event = self.trace, int(self.event[index])
        launch_ns, latency_ns = int(self.launch_ns[index]), int(self.latency_ns[index])
        return KernelRow(
            kernel=trace.names[trace.name_id[event]],
            category=Category(int(trace.category[event])).name.lower(),
            operator=_name(trace, int(self.operator[index])),
            outer_operator=_name(trace, int(self.outer_operator[index])),
            function=self._label(int(self.function[index])),
            launch_site=self._label(int(self.launch_site[index])),
            region=self._label(int(self.region[index])),
            run=None if self.run[index] < 0 else int(self.run[index]),
            device=None if self.is_host or trace.device[event] < 0 else int(trace.device[event]),
            stream=None if self.is_host or trace.stream[event] < 0 else int(trace.stream[event]),
            start_us=int(trace.start_ns[event]) * _US,
            duration_us=int(self.duration_ns[index]) * _US,
            launch_start_us=None if launch_ns < 0 else launch_ns * _US,
            launch_latency_us=None if self.launch[index] < 0 else latency_ns * _US,
        )


class KernelRow(Row):
    """One kernel, copy or fill (or operator) with where it came from; times count from the trace's zero.

    Attributes:
        kernel: Name of the kernel.
        category: `kernel`, `gpu_memcpy`, `gpu_memset`, or `cpu_op` for an operator.
        operator: Innermost operator that launched it.
        outer_operator: Outermost operator inside the region: what the module's code called.
        function: `torch.nn.functional` call around it, if these were marked.
        launch_site: Line of the program that launched it, if it is a Triton kernel and launches were marked.
        region: Region id of the nearest module or method.
        run: Number of the run.
        device: Index of the device.
        stream: Stream.
        start_us: Start.
        duration_us: Duration.
        launch_start_us: Start of the launching call on the host.
        launch_latency_us: From there to `start_us`: overhead plus queueing.
    """

    kernel: str
    category: str
    operator: str | None
    outer_operator: str | None
    function: str | None
    launch_site: str | None = None
    region: str | None
    run: int | None
    device: int | None
    stream: int | None
    start_us: float
    duration_us: float
    launch_start_us: float | None
    launch_latency_us: float | None


class KernelSummary(Row):
    """All launches of one kernel from one operator in one region.

    Attributes:
        kernel: Name of the kernel.
        category: As in `KernelRow`.
        operator: Innermost operator.
        outer_operator: Outermost operator inside the region.
        function: Functional call.
        launch_site: Line of the program that launched it, e.g. `models/net.py:42 (Net.forward)`, if it is a Triton
            kernel of the program's own; None otherwise, and where launches were not marked.
        region: Region id.
        count: Number of launches.
        total_us: Sum of durations.
        mean_us: Mean duration.
        share: Fraction of all kernel time of the table.
        family: What it does, e.g. `gemm`.
        possible_win_us: What it could win end to end, by `trace.ranking`; None if that was not asked for.
        example_event: Index into the trace of the longest one, to look up its arguments.
        is_from_graph: Whether a CUDA graph's replay launched it; `trace.graphs` and a pass without graphs then tell
            where it comes from.
        confidence: How surely, as `GraphReplay.confidence`; 0 if it is not found there, None without such a pass.
        repeat_us: Sum of durations in each repeat; empty where repeats are not told apart.
        num_modules: How many modules the region stands for, where repeated ones are taken together; else None.
    """

    kernel: str
    category: str
    operator: str | None
    outer_operator: str | None
    function: str | None
    launch_site: str | None = None
    region: str | None
    count: int
    total_us: float
    mean_us: float
    share: float
    family: str = "other"
    possible_win_us: float | None = None
    example_event: int
    is_from_graph: bool = False
    confidence: float | None = None
    repeat_us: list[float] = []
    num_modules: int | None = None


def list_kernels(trace: Trace, attribution: Attribution | None = None, *, only_runs: bool = False) -> KernelTable:
    """Return one entry for each kernel, copy and fill, or for each operator if no device worked in the window.

    Args:
        trace: The trace.
        attribution: From `attribute`; made with its defaults if None.
        only_runs: Leave out what belongs to no profiled run.
    """
    attribution = attribution or attribute(trace)
    if not trace.has_device_work:
        trace = with_runtime_as_one(trace)
    forest = trace.forest
    is_label = np.array([label is not None for label in trace.labels], bool)[forest.name_id]
    is_operator = (trace.category[forest.event] == Category.CPU_OP) & ~is_label
    is_called = is_operator & ~find_wrappers(trace)[forest.name_id]
    outer = forest.outermost(is_called, barrier=attribution.is_region)
    function = _innermost_of_kind(trace, FUNCTION_KIND)
    if trace.has_device_work:
        return _device_table(trace, attribution, forest.innermost(is_called), outer, function, only_runs)
    return _operator_entries(trace, attribution, outer, function, is_operator, only_runs)


def _innermost_of_kind(trace: Trace, kind: str) -> IntArray | None:
    """Return the innermost span of ours of that kind around each host span, or -1; None if there is none at all."""
    is_wanted = np.array([label is not None and label.kind == kind for label in trace.labels], bool)
    return trace.forest.innermost(is_wanted[trace.forest.name_id]) if is_wanted.any() else None


def _device_table(
    trace: Trace,
    attribution: Attribution,
    inner: IntArray,
    outer: IntArray,
    function: IntArray | None,
    only_runs: bool,
) -> KernelTable:
    forest, join = trace.forest, trace.device_join
    chosen = np.flatnonzero(attribution.device_run >= 0) if only_runs else np.arange(len(join.event))
    event, host, launch = join.event[chosen], join.host[chosen], join.launch[chosen]
    has_launch = launch >= 0
    launch_ns = np.where(has_launch, _at(forest.start_ns, launch), _NONE)
    return KernelTable(
        trace=trace,
        labels=attribution.labels,
        is_host=False,
        event=event,
        duration_ns=trace.duration_ns[event],
        operator=_at(inner, host),
        outer_operator=_at(outer, host),
        function=_at(function, host),
        launch_site=_at(_innermost_of_kind(trace, LAUNCH_KIND), host),
        region=attribution.device_region[chosen],
        run=attribution.device_run[chosen],
        launch=launch,
        launch_ns=launch_ns,
        latency_ns=np.where(has_launch, trace.start_ns[event] - launch_ns, _NONE),
    )


def _operator_entries(
    trace: Trace,
    attribution: Attribution,
    outer: IntArray,
    function: IntArray | None,
    is_operator: BoolArray,
    only_runs: bool,
) -> KernelTable:
    """Return every operator with its self time: one that calls others, as `aten::addmm`, may do the work itself."""
    forest = trace.forest
    chosen = np.flatnonzero(is_operator & (attribution.run >= 0) if only_runs else is_operator).astype(np.int32)
    absent = _absent(len(chosen))
    return KernelTable(
        trace=trace,
        labels=attribution.labels,
        is_host=True,
        event=forest.event[chosen],
        duration_ns=forest.self_ns[chosen],
        operator=chosen,
        outer_operator=outer[chosen],
        function=_at(function, chosen),
        launch_site=absent,
        region=attribution.region[chosen],
        run=attribution.run[chosen],
        launch=absent,
        launch_ns=absent,
        latency_ns=absent,
    )


def summarize_kernels(
    table: KernelTable, limit: int | None = None, *, win_ns: FloatArray | None = None
) -> list[KernelSummary]:
    """Aggregate a table by kernel, operator, function, launch site and region, the largest total first.

    Args:
        table: The table.
        limit: Rows to return at most.
        win_ns: What each entry could win, from `trace.ranking.rank_groups`.
    """
    if not table.num_kernels:
        return []
    code, size = number_rows(table)
    count, total = count_by(code, size), sum_by(code, table.duration_ns, size)
    longest = longest_by(code, table.duration_ns, size)
    wins = None if win_ns is None else sum_by(code, win_ns, size)
    family, repeat_us = families_of(table), table.repeat_us(code, size)
    whole = max(float(total.sum()), 1e-9)
    order = np.argsort(-total, kind="stable")[:limit].tolist()
    return [
        KernelSummary(
            **table.row(int(longest[index])).model_dump(
                include={"kernel", "category", "operator", "outer_operator", "function", "launch_site", "region"}
            ),
            count=int(count[index]),
            total_us=float(total[index]) * _US,
            mean_us=float(total[index] / count[index]) * _US,
            share=float(total[index]) / whole,
            family=FAMILIES[family[longest[index]]],
            possible_win_us=None if wins is None else float(wins[index]) * _US,
            example_event=int(table.event[longest[index]]),
            repeat_us=repeat_us[index],
        )
        for index in order
    ]


def number_rows(table: KernelTable) -> tuple[IntArray, int]:
    """Return each entry's row, by kernel, operator, function, launch site and region, and how many there are."""
    trace, forest = table.trace, table.trace.forest
    positions = (table.operator, table.outer_operator, table.function, table.launch_site, table.region)
    columns = (_at(forest.name_id, position) for position in positions)
    own = (trace.name_id[table.event], trace.category[table.event])
    return number_combinations(itertools.chain(own, columns), table.num_kernels)


def _absent(count: int) -> IntArray:
    return np.broadcast_to(np.int64(_NONE), count)


def _at(values: IntArray | None, positions: IntArray) -> IntArray:
    if values is None or not len(values):
        return _absent(len(positions))
    return np.where(positions >= 0, values[np.maximum(positions, 0)], _NONE)


def _name(trace: Trace, position: int) -> str | None:
    return trace.names[trace.forest.name_id[position]] if position >= 0 else None
