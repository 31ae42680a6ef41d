"""When each observed call begins and ends, on the host and on the device, and the arithmetic over one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from perfladder.instrument import Lane, Observer, Site, current_lane

if TYPE_CHECKING:
    import torch

Clock = Callable[[], int]
Span = tuple[float, float]

NS_PER_MS = 1e6


@dataclass(eq=False)
class Call:
    """One observed span on one thread or task; `parent` is the span it lies in.

    Attributes:
        device_start_ms: When the device reached the call, from the start of the run; known once the run has ended.
        device_end_ms: When the device had done what was in its stream by the end of the call.
    """

    site: Site
    start_ns: int
    is_item: bool
    parent: Call | None
    end_ns: int = 0
    events: tuple[Any, Any] | None = None
    children: list[Call] = field(default_factory=list)
    device_start_ms: float = 0.0
    device_end_ms: float = 0.0

    @property
    def duration_ns(self) -> int:
        """Host time of the span."""
        return self.end_ns - self.start_ns

    @property
    def device_ms(self) -> float:
        """Time on the device's stream from the call's first point to its last."""
        return self.device_end_ms - self.device_start_ms


@dataclass
class RunTiming:
    """One run: its wall time and the spans in it; `origin` is an event that the device reached as the run began."""

    start_ns: int
    end_ns: int
    calls: list[Call]
    item_end_ns: list[int] = field(default_factory=list)
    origin: Any = None

    @property
    def wall_ms(self) -> float:
        """End to end, device included."""
        return (self.end_ns - self.start_ns) / NS_PER_MS

    def span(self, call: Call, *, on_device: bool) -> Span:
        """Where a call lies in its run, in ms from the run's start, and not beyond the run's end."""
        if on_device:
            start, end = call.device_start_ms, call.device_end_ms
        else:
            start, end = ((ns - self.start_ns) / NS_PER_MS for ns in (call.start_ns, call.end_ns))
        # A thread may go on with a call after the run has ended.
        return min(max(start, 0.0), self.wall_ms), min(max(end, 0.0), self.wall_ms)

    def self_spans(self, call: Call, *, on_device: bool) -> list[Span]:
        """The parts of a call that lie in no call inside it."""
        start, end = self.span(call, on_device=on_device)
        parts: list[Span] = []
        for inner_start, inner_end in merge(self.span(child, on_device=on_device) for child in call.children):
            if inner_start > start:
                parts.append((start, min(inner_start, end)))
            start = max(start, inner_end)
        return [*parts, (start, end)] if end > start else parts


class StageTimer(Observer):
    """Notes when each call begins and ends, on the host and (by events) on the device; synchronizes nothing."""

    def __init__(self, clock: Clock, device: torch.device) -> None:
        self.clock = clock
        self.device = device
        self.calls: list[Call] = []
        self._open: dict[Lane, Call] = {}
        self._is_recorded = _recorded_check(device)

    def enter(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Begin a span."""
        return self._begin(site, is_item=False)

    def enter_item(self, site: Site) -> Call:
        """Begin the span of one resumption of a generator."""
        return self._begin(site, is_item=True)

    def leave(self, site: Site, token: Call, result: Any) -> None:
        """End the span."""
        if token.events and self._is_recorded():
            token.events = None
        elif token.events:
            token.events[1].record()
        token.end_ns = self.clock()
        lane = current_lane()
        if self._open.get(lane) is token:
            if token.parent is None:
                del self._open[lane]
            else:
                self._open[lane] = token.parent
        self.calls.append(token)

    def take(self) -> list[Call]:
        """Hand over the spans of the run that has just ended; a call left open in a thread is no parent in the next."""
        calls, self.calls = self.calls, []
        self._open = {}
        return calls

    def _begin(self, site: Site, *, is_item: bool) -> Call:
        lane = current_lane()
        parent = self._open.get(lane)
        call = self._open[lane] = Call(site, 0, is_item, parent)
        if parent is not None:
            parent.children.append(call)
        if self.device.type != "cpu" and not self._is_recorded():
            call.events = timing_event(self.device), timing_event(self.device)
            call.events[0].record()
        call.start_ns = self.clock()
        return call


def _recorded_check(device: torch.device) -> Callable[[], bool]:
    """What tells whether the current stream is recorded into a CUDA graph: events of that can never be asked."""
    if device.type != "cuda":
        return lambda: False
    import torch

    return torch.cuda.is_current_stream_capturing


def timing_event(device: torch.device) -> Any:
    """An event that knows its time once the device has reached it."""
    import torch

    return torch.Event(device, enable_timing=True)


def resolve_device_times(timing: RunTiming) -> None:
    """Read the events of a run that was synchronized; what the device has not reached yet ends with the run."""
    for call in timing.calls:
        if call.events and timing.origin is not None:
            times = [
                float(timing.origin.elapsed_time(event)) if event.query() else timing.wall_ms for event in call.events
            ]
            call.device_start_ms, call.device_end_ms = times


def merge(spans: Iterable[Span]) -> list[Span]:
    """The union of spans, in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif end > start:
            merged.append((start, end))
    return merged


def timed_spans(calls: list[Call]) -> list[Call]:
    """Calling a generator function does nothing yet: its resumptions are what takes time."""
    return [call for call in calls if call.is_item] or calls


def lies_in_own_site(call: Call) -> bool:
    """Whether the call is inside another one of the same site: a recursion."""
    parent = call.parent
    while parent is not None:
        if parent.site is call.site:
            return True
        parent = parent.parent
    return False


def self_ms(timing: RunTiming, calls: Iterable[Call], *, on_device: bool) -> float:
    """Time of these calls without the observed calls inside them; what ran at the same time counts for each."""
    spans = (span for call in calls for span in timing.self_spans(call, on_device=on_device))
    return sum(end - start for start, end in spans)


def outside_ms(timing: RunTiming, *, on_device: bool) -> float:
    """Wall time in no stage: what the union of the outermost spans leaves, so that parallel stages count once."""
    outermost = (timing.span(call, on_device=on_device) for call in timing.calls if call.parent is None)
    return timing.wall_ms - sum(end - start for start, end in merge(outermost))


@dataclass
class Overlap:
    """Time in which several calls ran at once, on different threads, tasks or streams.

    Attributes:
        counted_again_ms: By how much the stages' self times exceed the time that they cover together.
        by_stage_ms: Time of each stage in which another call ran too.
        by_pair_ms: The same for each pair of stages; a stage may overlap itself.
    """

    counted_again_ms: float = 0.0
    by_stage_ms: dict[str, float] = field(default_factory=dict)
    by_pair_ms: dict[tuple[str, str], float] = field(default_factory=dict)


def overlap_of(timing: RunTiming, *, on_device: bool) -> Overlap:
    """Sweep over the self spans of a run; those of one thread or stream follow each other."""
    borders: list[tuple[float, int, str]] = []
    for call in timing.calls:
        for start, end in timing.self_spans(call, on_device=on_device):
            borders += [(start, 1, call.site.path), (end, -1, call.site.path)]
    overlap = Overlap()
    active: dict[str, int] = {}
    previous = 0.0
    # At the same moment ends come before begins.
    for moment, step, path in sorted(borders):
        num_active = sum(active.values())
        if num_active > 1 and moment > previous:
            _note(overlap, active, num_active, moment - previous)
        active[path] = active.get(path, 0) + step
        if not active[path]:
            del active[path]
        previous = moment
    return overlap


def _note(overlap: Overlap, active: dict[str, int], num_active: int, passed_ms: float) -> None:
    overlap.counted_again_ms += (num_active - 1) * passed_ms
    names = sorted(active)
    pairs = [(a, b) for index, a in enumerate(names) for b in names[index + 1 :]]
    pairs += [(name, name) for name in names if active[name] > 1]
    for name in names:
        overlap.by_stage_ms[name] = overlap.by_stage_ms.get(name, 0.0) + passed_ms
    for pair in pairs:
        overlap.by_pair_ms[pair] = overlap.by_pair_ms.get(pair, 0.0) + passed_ms
