"""Cold start: from an empty process to the first output, part by part, in several process launches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from perfladder.models import Model
from perfladder.stats import Samples
from perfladder.target import LoadedTarget
from perfladder.timing.timer import NS_PER_MS, Clock

CompileCache = Literal["not_used", "empty", "filled"]

FIRST_OUTPUT = "first_output"
"""The part of a cold start that is the first call, up to its first output."""


class ColdRequest(Model):
    """The first two calls in a process that has just loaded the target."""


class ColdCalls(Model):
    """The first call and the one after it; nothing is seeded or measured before them."""

    first_output_ms: float = Field(description="Until the first item of a stream, else the whole first call.")
    first_call_ms: float
    second_call_ms: float
    num_graphs: int = Field(description="Graphs that torch.compile made in the first call.")
    compile_ms: float = Field(description="What torch.compile took inside the first call.")

    @classmethod
    def of_ranks(cls, found: Sequence[ColdCalls]) -> ColdCalls:
        """For each number that of the slowest rank: all wait for it."""

        largest: dict[str, Any] = {name: max(getattr(calls, name) for calls in found) for name in cls.model_fields}
        return cls(**largest)


class ColdLaunch(Model):
    """One process."""

    load_ms: dict[str, float] = Field(description="Import, build, move to the device, and wrapping for compilation.")
    calls: ColdCalls
    compile_cache: CompileCache = Field(description="State of torch.compile's cache on disk when the process began.")

    @property
    def total_ms(self) -> float:
        """From the first import to the first output; the interpreter's own start is not in it."""
        return sum(self.load_ms.values()) + self.calls.first_output_ms


class ColdStart(Model):
    """Samples are process launches x 1; a launch that filled the compile cache is reported, but in no sample."""

    total_ms: Samples
    parts_ms: dict[str, Samples] = Field(description="`load_ms` of each launch by its keys, and `first_output`.")
    compile_ms: Samples = Field(description="Of the first output, what torch.compile took.")
    warm_call_ms: Samples = Field(description="The second call of each launch.")
    launches: list[ColdLaunch]
    disk_cache: str = Field(description="What the launches found on disk.")


def measure_cold(loaded: LoadedTarget, request: ColdRequest, *, clock: Clock = time.perf_counter_ns) -> ColdCalls:
    """Make the first two calls of a process.

    Raises:
        WorkloadError: The workload raised.
    """
    from perfladder._torch_private import compile_counters

    before = compile_counters()
    first_call_ms, first_output_ms = _call(loaded, clock)
    compiled = compile_counters().since(before)
    second_call_ms, _ = _call(loaded, clock)
    return ColdCalls(
        first_output_ms=first_output_ms,
        first_call_ms=first_call_ms,
        second_call_ms=second_call_ms,
        num_graphs=compiled.graphs,
        compile_ms=1000 * compiled.seconds,
    )


def cold_start_of(launches: list[ColdLaunch]) -> ColdStart:
    """Put launches together; those that began with an empty compile cache are not in the samples."""
    counted = [launch for launch in launches if launch.compile_cache != "empty"]
    parts = {name: [launch.load_ms[name] for launch in counted] for name in counted[0].load_ms}
    parts[FIRST_OUTPUT] = [launch.calls.first_output_ms for launch in counted]
    return ColdStart(
        total_ms=_one_a_launch([launch.total_ms for launch in counted]),
        parts_ms={name: _one_a_launch(values) for name, values in parts.items()},
        compile_ms=_one_a_launch([launch.calls.compile_ms for launch in counted]),
        warm_call_ms=_one_a_launch([launch.calls.second_call_ms for launch in counted]),
        launches=launches,
        disk_cache=_disk_cache(launches),
    )


def _call(loaded: LoadedTarget, clock: Clock) -> tuple[float, float]:
    """Duration of one call, and until its first output, in ms."""
    loaded.prepare_run()
    start = clock()
    output = loaded.run(clock=clock)
    loaded.synchronize()
    end = clock()
    first = output.item_end_ns[0] if output.item_end_ns else end
    return (end - start) / NS_PER_MS, (first - start) / NS_PER_MS


def _disk_cache(launches: list[ColdLaunch]) -> str:
    pages = "files were read by an earlier process, so they come from the page cache as far as memory holds them"
    if all(launch.compile_cache == "not_used" for launch in launches):
        return pages
    return f"{pages}; torch.compile's cache was empty for the first launch, and filled by it for the others"


def _one_a_launch(values: list[float]) -> Samples:
    return Samples(launches=[[value] for value in values])
