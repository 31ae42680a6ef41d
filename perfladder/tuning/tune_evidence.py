"""The whole workload with what was chosen, against the plain one: its output, its time, and when that pays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from perfladder.errors import InputError, WorkloadError
from perfladder.progress import Progress
from perfladder.stats import Comparison, Samples, compare_samples, summarize
from perfladder.target import LoadedTarget
from perfladder.tuning.candidates import DEFAULT_GATE
from perfladder.tuning.inspect import Runner
from perfladder.tuning.timesteps import HostTimesteps, has_host_timesteps, waits_for_device
from perfladder.tuning.tune_result import BreakEven, OutputComparison, TunedScheduler
from perfladder.tuning.whole_output import compare_output, encode_output, not_compared

if TYPE_CHECKING:
    from typing import Any

    from perfladder.tuning.control import ModuleControl
    from perfladder.tuning.quality import QualityGate
    from perfladder.tuning.report import TuningReport

_EMPTY_CALL: Final[tuple[tuple[Any, ...], dict[str, Any]]] = ((), {})


class Sides:
    """A loaded workload whose tuned modules and schedulers can be switched off and on.

    Args:
        loaded: The workload.
        controls: Of its tuned modules.
        hosts: Of its schedulers that take their timesteps from the host.
    """

    def __init__(
        self, loaded: LoadedTarget, controls: list[ModuleControl], hosts: Iterable[HostTimesteps] = ()
    ) -> None:
        self.loaded = loaded
        self.controls = controls
        self.hosts = list(hosts)

    @property
    def has_choice(self) -> bool:
        """Whether anything else than the plain modules and schedulers serves a call."""
        return bool(self.hosts) or any(
            chosen.call is not None for control in self.controls for chosen in control.chosen
        )

    @property
    def is_lossy(self) -> bool:
        """Whether numbers differ by design."""
        backends = [chosen.backend for control in self.controls for chosen in control.chosen]
        return any(backend is not None and backend.is_lossy for backend in backends)

    @property
    def dtypes(self) -> set[str]:
        """Of the floating-point weights of tuned modules, and of their results."""
        found = {str(p.dtype).removeprefix("torch.") for one in self.controls for p in one.inner.parameters()}
        return found | {
            output.dtype for one in self.controls for chosen in one.chosen for output in chosen.graph.outputs
        }

    def show(self, tuned: bool) -> None:
        """Call what was chosen from now on, or the plain modules and schedulers."""
        switched: list[ModuleControl | HostTimesteps] = [*self.controls, *self.hosts]
        for one in switched:
            if tuned:
                one.activate()
            else:
                one.deactivate()

    def call(self) -> Any:
        """Make the workload's call, with the same random numbers each time."""
        self.loaded.prepare_run()
        return self.loaded.run().value


def try_schedulers(sides: Sides, schedulers: Mapping[str, Any], pairs: int) -> list[TunedScheduler]:
    """Let schedulers take their timesteps from the host, and keep that in `sides` where it is right and faster.

    Args:
        sides: The workload; its tuned modules serve both sides.
        schedulers: By path.
        pairs: Timed runs of each side.
    """
    if schedulers:
        sides.call()  # sets their timesteps
    return [_tried(sides, path, scheduler, pairs) for path, scheduler in schedulers.items()]


def _tried(sides: Sides, path: str, scheduler: Any, pairs: int) -> TunedScheduler:
    found = TunedScheduler(
        path=path,
        scheduler_type=f"{type(scheduler).__module__}.{type(scheduler).__qualname__}",
        status="not_applicable",
        reason="its timesteps are not on an accelerator, so that its steps wait for none",
    )
    if has_host_timesteps(scheduler):
        return found.model_copy(update={"reason": "it takes its timesteps from the host already"})
    if not waits_for_device(scheduler.timesteps):
        return found
    try:
        host = HostTimesteps(scheduler)
    except InputError as error:
        return found.model_copy(update={"reason": str(error)})
    found = found.model_copy(update=_judged(Sides(sides.loaded, [], [host]), host, pairs))
    if found.status == "kept":
        sides.hosts.append(host)
    else:
        host.deactivate()
    return found


def _judged(alone: Sides, host: HostTimesteps, pairs: int) -> dict[str, Any]:
    """What to say of a scheduler with timesteps from the host, whose sides differ in nothing else."""
    try:
        output = compare_outputs(alone, None)
    except WorkloadError as error:  # its steps may want all on one device
        return {"status": "rejected", "reason": f"with timesteps from the host: {error}"}
    num_served = host.num_served
    if not num_served:
        return {"reason": "no step was called with one of the timesteps that were set"}
    if not output.is_right:
        return {
            "status": "rejected",
            "reason": f"the output is not right: {output.reason}",
            "num_served": num_served,
        }
    _, _, comparison = time_sides(alone, pairs)
    is_kept, reason = decide("faster", comparison, output)
    return {
        "status": "kept" if is_kept else "rejected",
        "reason": reason,
        "num_served": num_served,
        "comparison": comparison,
    }


def compare_outputs(sides: Sides, gate: QualityGate | None) -> OutputComparison:
    """Compare the whole output; two plain calls first, since one that differs from itself proves nothing.

    Args:
        sides: The workload.
        gate: Least likeness; None: tolerances by the dtypes that tuned modules compute in, or for backends that are
            lossy by design the default gate.
    """
    if gate is None and sides.is_lossy:
        gate = DEFAULT_GATE
    sides.loaded.tell(Progress(label="comparing the whole output"))
    sides.show(tuned=False)
    expected = encode_output(sides.call())
    itself = compare_output(expected, encode_output(sides.call()), gate)
    sides.show(tuned=True)
    found = itself
    if itself.reason is None:
        found = compare_output(expected, encode_output(sides.call()), gate, computed_in=sides.dtypes)
    return OutputComparison(
        is_right=None if itself.reason is not None else found.reason is None,
        reason=f"two plain calls differ: {itself.reason}" if itself.reason is not None else found.reason,
        max_abs_error=found.max_abs_error,
        max_rel_error=found.max_rel_error,
        quality=found.quality,
        gate=gate.demand if gate else None,
        not_compared=not_compared(expected),
    )


def time_sides(sides: Sides, pairs: int) -> tuple[Samples, Samples, Comparison]:
    """Time plain and tuned calls in turns, and leave the tuned ones in place."""
    loaded = sides.loaded
    runner = Runner(loaded.device, lambda: loaded.run().value, prepare=loaded.prepare_run)
    times: tuple[list[float], list[float]] = ([], [])

    def run(tuned: int) -> float:
        sides.show(tuned=bool(tuned))
        return runner(_EMPTY_CALL).wall_ms

    for _ in range(max(loaded.workload.warmup_runs, 1)):
        run(0), run(1)
    for number in range(pairs):
        loaded.tell(Progress(label="timing the whole workload", num_done=number, num_total=pairs))
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            times[side].append(run(side))
    sides.show(tuned=True)
    plain, tuned = (Samples(launches=[side]) for side in times)
    return plain, tuned, compare_samples(plain, tuned, interleaved=True)


def break_even(report: TuningReport, plain_ms: Samples, comparison: Comparison) -> BreakEven:
    """How many calls pay for the tuning, at the time that a call saves."""
    seconds = build_seconds(report)
    reason, saved = None, None
    if comparison.verdict != "faster" or comparison.speedup is None:
        reason = f"nothing is saved for certain: {comparison.reason}"
    else:
        saved = summarize(plain_ms.values).p50 * (1 - 1 / comparison.speedup)
    return BreakEven(
        saved_ms_per_call=saved,
        build_s=seconds,
        calls_for_build=math.ceil(seconds * 1000 / saved) if saved else None,
        tuning_s=report.duration_s,
        calls_for_tuning=math.ceil(report.duration_s * 1000 / saved) if saved else None,
        reason=reason,
    )


def build_seconds(report: TuningReport) -> float:
    """Seconds of builds and trials of what was chosen, those of earlier tunings that were reused too."""
    chosen = [
        record
        for module in report.modules
        for graph in module.graphs
        if graph.decision is not None
        for record in graph.decision.candidates
        if record.description == graph.decision.selected
    ]
    return round(sum((record.build_s or 0.0) + (record.trial_s or 0.0) for record in chosen), 3)


def decide(keep: str | float, comparison: Comparison, output: OutputComparison) -> tuple[bool, str]:
    """Whether what was chosen is kept, and why.

    Args:
        keep: `faster`, `right`, or the least speedup.
        comparison: Of the whole workload.
        output: The same.
    """
    if output.is_right is False:
        return False, f"The whole output is not right: {output.reason}."
    if keep == "right":
        return True, f"Outputs are right, and any speed was accepted. {comparison.reason}"
    low = comparison.interval.low if comparison.interval is not None else 0.0
    if isinstance(keep, str):
        return low > 1, comparison.reason
    if low >= keep:
        return True, comparison.reason
    return False, f"A speedup of {keep:g} or more was asked for. {comparison.reason}"
