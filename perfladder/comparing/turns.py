"""The child's part of an interleaved comparison: one version, loaded and warm, that makes a run when it is told to."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from pydantic import Field

from perfladder.environment import Snapshot, take_snapshot
from perfladder.errors import InputError
from perfladder.instrument import Site
from perfladder.models import Model, ResultWarning
from perfladder.rungs.stages import judged, observe_output
from perfladder.target import LoadedTarget
from perfladder.timing.choose import candidate_sites, choose_sites
from perfladder.timing.compilation import compilations_of, compile_warnings
from perfladder.timing.machine import end_warnings, require_idle, snapshot_warnings
from perfladder.timing.memory import peak_device_memory, reset_peak_memory
from perfladder.timing.results import StagesResult
from perfladder.timing.runs import Runs, bare_run, timed_runs
from perfladder.timing.scenario import scenario_timing
from perfladder.timing.timer import Clock
from perfladder.user_code import LIBRARY_FOLDERS

if TYPE_CHECKING:
    from perfladder._torch_private import CompileCounters


class PrepareRequest(Model):
    """Make the first run, and find the stages."""

    own_root: str | None = Field(default=None, description="The checked-out commit that is measured.")
    foreign_root: str | None = Field(
        default=None, description="A folder that no code may come from otherwise: the user's own work tree."
    )


class Prepared(Model):
    """What the side is like."""

    first_call_ms: float
    run_ms: float = Field(description="A run after the first.")


class TurnRequest(Model):
    """Make one measured run."""

    scenario: str | None = None
    num_settling: int = Field(default=0, description="Runs just before it that are not counted.")
    is_counted: bool = True


class Turn(Model):
    """How long it took."""

    wall_ms: float


class CollectRequest(Model):
    """Attribute all measured runs."""


@dataclass
class _Turns:
    """What a side has measured so far."""

    sites: list[Site]
    first_call_ms: float
    snapshot: Snapshot
    counters: list[CompileCounters]
    warnings: list[ResultWarning]
    runs: dict[str | None, Runs] = field(default_factory=dict)
    warmup_ms: list[float] = field(default_factory=list)


_SIDES: WeakKeyDictionary[LoadedTarget, _Turns] = WeakKeyDictionary()
"""A process of its own holds one loaded target; what it has measured goes with it."""


def prepare(loaded: LoadedTarget, request: PrepareRequest, *, clock: Clock = time.perf_counter_ns) -> Prepared:
    """Make the cold run, and one to find the stages in; then the side can take turns.

    Raises:
        InputError: A stage does not exist, or code comes from where it must not.
        NotPossibleHereError: The workload demands an idle device, and this one is not.
        WorkloadError: The workload raised.
    """
    from perfladder._torch_private import compile_counters

    snapshot = take_snapshot()
    if loaded.workload.require_idle_device:
        require_idle(snapshot, loaded.device)
    counters: list[CompileCounters] = [compile_counters()]
    candidates, unresolved = candidate_sites(loaded)
    first = bare_run(loaded, None, clock)[0]
    counters.append(compile_counters())
    sites, warnings = choose_sites(loaded, candidates, unresolved, clock)
    second = bare_run(loaded, None, clock)[0]
    if request.foreign_root is not None and request.own_root is not None:
        _refuse_code_from(Path(request.foreign_root), own=Path(request.own_root))
    reset_peak_memory(loaded)
    warnings = [*snapshot_warnings(snapshot, loaded.device), *warnings]
    _SIDES[loaded] = _Turns(sites, first.wall_ms, snapshot, counters, warnings)
    return Prepared(first_call_ms=first.wall_ms, run_ms=second.wall_ms)


def take_turn(loaded: LoadedTarget, request: TurnRequest, *, clock: Clock = time.perf_counter_ns) -> Turn:
    """Make one run with the stages observed, after some that are not counted.

    Raises:
        WorkloadError: The workload raised.
    """
    from perfladder._torch_private import compile_counters

    side = _SIDES[loaded]
    for _ in range(request.num_settling):
        bare_run(loaded, request.scenario, clock)
    found = timed_runs(loaded, side.sites, request.scenario, clock, 1, 0)
    wall_ms = found.timings[0].wall_ms
    if not request.is_counted:
        side.warmup_ms.append(wall_ms)
        return Turn(wall_ms=wall_ms)
    if len(side.counters) == 2:
        side.counters.append(compile_counters())
    runs = side.runs.setdefault(request.scenario, Runs())
    runs.timings += found.timings
    runs.states += found.states
    runs.output = found.output
    return Turn(wall_ms=wall_ms)


def collect(loaded: LoadedTarget, request: CollectRequest) -> StagesResult:
    """Attribute what was measured to its stages, as rung 1 does."""
    from perfladder._torch_private import compile_counters

    side, workload = _SIDES[loaded], loaded.workload
    side.counters.append(compile_counters())
    after = take_snapshot()
    allocated, reserved = peak_device_memory(loaded)
    scenarios = [
        scenario_timing(name or "default", runs.timings, runs.state, workload.media, loaded.device)
        for name, runs in side.runs.items()
    ]
    compilations = compilations_of(side.counters)
    result = StagesResult(
        first_call_ms=side.first_call_ms,
        warmup_ms=side.warmup_ms,
        scenarios=scenarios,
        compilations=compilations,
        peak_device_allocated_bytes=allocated,
        peak_device_reserved_bytes=reserved,
        peak_host_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        observed=observe_output(loaded, side.runs[None].output, scenarios[0]),
        snapshot_before=side.snapshot,
        snapshot_after=after,
        device=str(loaded.device),
        warnings=[*side.warnings, *end_warnings(after, loaded.device), *compile_warnings(compilations)],
    )
    return judged(workload, result)


def _refuse_code_from(root: Path, *, own: Path) -> None:
    """Code of another commit must not come from the work tree, as it does from a package installed as editable.

    Raises:
        InputError: A module does.
    """
    for name, module in sorted(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        if not isinstance(origin, str) or any(folder in origin for folder in LIBRARY_FOLDERS):
            continue
        path = Path(origin).resolve()
        is_foreign = path.is_relative_to(root) and not path.is_relative_to(own)
        if is_foreign and not path.is_relative_to(Path(__file__).parents[1]):
            raise InputError(
                f"The commit cannot be measured: module {name!r} was loaded from {path}, in your own work tree, and "
                "not from the commit. It is installed as editable, or on PYTHONPATH. Name the target by its file "
                "(file.py:factory), or start the command where the package is found first."
            )
