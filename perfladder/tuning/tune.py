"""Record how modules are called, choose a backend for each form of call, and put it in place."""

from __future__ import annotations

import inspect
import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch

from perfladder.errors import InputError, PerfladderError, TuningError
from perfladder.timing.timer import Clock
from perfladder.tuning.cache import BuildCache, function_digest
from perfladder.tuning.candidates import GraphWork
from perfladder.tuning.config import TuningSettings, config
from perfladder.tuning.control import Chosen, ModuleControl, RecordingSession, recording_session
from perfladder.tuning.correctness import seeded
from perfladder.tuning.dataset import Arguments, calls_of
from perfladder.tuning.graph_work import decided, describe_work, make_graph_work
from perfladder.tuning.logs import only_own_messages
from perfladder.tuning.module import drop_own_forward
from perfladder.tuning.observe import HardwareMetrics, nvtx_range
from perfladder.tuning.progress import Progress, TuneProgress, shown_progress
from perfladder.tuning.quality import QualityGate
from perfladder.tuning.report import Failure, GraphReport, ModuleReport, TuningReport, publish
from perfladder.tuning.samples import copy_arguments
from perfladder.tuning.strategies import FirstWinsStrategy, TuneStrategy
from perfladder.tuning.wrap import wrapped_in
from perfladder.user_code import consume, user_code

if TYPE_CHECKING:
    from perfladder.tuning.graphs import GraphSpec

_logger = logging.getLogger("perfladder.tuning")

_DEFAULT_BATCH_SIZES = (1, 2)


@dataclass(eq=False)
class _Work:
    """One call of `tune`, from its start to its end."""

    func: Callable[..., Any]
    settings: TuningSettings
    cache: BuildCache
    clock: Clock
    dry_run: bool
    quality_gate: QualityGate | None
    progress: Progress
    device: torch.device | None
    first_call: Arguments | None = None
    expected_output: Any = None
    num_builds: int = 0
    errors: list[PerfladderError] = field(default_factory=list)
    reports: list[ModuleReport] = field(default_factory=list)
    hardware: HardwareMetrics | None = None
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    before: dict[ModuleControl, Callable[[], None]] = field(default_factory=dict)


def tune(
    func: Callable[..., Any],
    dataset: Any,
    batch_sizes: Sequence[int] | None = None,
    max_num_batches_per_batch_size: int | None = None,
    device: str | torch.device | None = None,
    dry_run: bool = False,
    disable_external_logging: bool = False,
    clear_cache: bool = False,
    ignore_failing_modules: bool = True,
    *,
    quality_gate: QualityGate | Callable[[Any, Any], float] | None = None,
    on_progress: Callable[[TuneProgress], None] | None = None,
    clock: Clock = time.perf_counter_ns,
) -> TuningReport:
    """Choose for each wrapped module, and each form of its calls, the backend that its strategy finds best.

    The function is called with the dataset's samples at each batch size while the modules record; then they are tuned
    one by one, and serve calls by what was chosen. A module that cannot be tuned runs as the plain one. What an earlier
    tuning of the same weights, code, calls, versions and device found is not measured again. Where the function or the
    dataset fails, modules that were tuned before stay so, as they do in a dry run, or if the function does not call
    them.

    Args:
        func: What uses the wrapped modules: one of them, a pipeline, or a function that calls one.
        dataset: Samples, as `perfladder.tuning.dataset.calls_of` takes them.
        batch_sizes: Samples in a call; by default 1 and 2.
        max_num_batches_per_batch_size: At most so many calls of each size; None or 0: all.
        device: Where modules are expected; by default where each of them is.
        dry_run: Record and describe, but build nothing and leave the modules as they are.
        disable_external_logging: Mute the log handlers for all but perfladder's own messages, during this call.
        clear_cache: Forget earlier tunings first; only perfladder's own folder is emptied.
        ignore_failing_modules: Leave a module as it is if it cannot be tuned, instead of raising.
        quality_gate: Least likeness of the function's output with a lossy candidate to that without, as a `QualityGate`
            or as a function of both outputs that returns at least 0 where it accepts; by default each module's own
            output has to have a cosine similarity of 0.99.
        on_progress: Is told what is done now, and about how long the rest takes; by default a bar is shown where
            stderr is a terminal.
        clock: Nanoseconds.

    Returns:
        The evidence behind each choice, as it is written to `config.report_path` too.

    Raises:
        InputError: An argument is wrong, or the function reaches no wrapped module.
        WorkloadError: The function raised.
        TuningError: A module cannot be tuned, and `ignore_failing_modules` is False.
    """
    settings = config.snapshot()
    sizes = _checked_sizes(batch_sizes)
    if max_num_batches_per_batch_size is not None and (
        isinstance(max_num_batches_per_batch_size, bool) or max_num_batches_per_batch_size < 0
    ):
        raise InputError(
            "max_num_batches_per_batch_size: expected a whole number from 0 up, got "
            f"{max_num_batches_per_batch_size!r}."
        )
    if not callable(func):
        raise InputError(
            f"func: a {type(func).__name__} cannot be called; give the pipeline or a function that runs it."
        )
    cache = BuildCache(settings.cache_dir)
    if clear_cache:
        cache.clear()
    gate = quality_gate if quality_gate is None or isinstance(quality_gate, QualityGate) else None
    if quality_gate is not None and gate is None:
        if not callable(quality_gate):
            raise InputError(f"quality_gate: expected a pl.QualityGate or a function, got {quality_gate!r}.")
        gate = QualityGate(quality_gate, 0.0)
    wanted = _device(device)
    with ExitStack() as stack:
        progress = Progress(on_progress or stack.enter_context(shown_progress()))
        work = _Work(func, settings, cache, clock, dry_run, gate, progress, wanted)
        if disable_external_logging:
            stack.enter_context(only_own_messages())
        if settings.hardware_metrics:
            work.hardware = stack.enter_context(HardwareMetrics())
        try:
            controls = _record(work, dataset, sizes, max_num_batches_per_batch_size)
            stack.callback(_settle, work, controls)
            _tune_all(work, controls)
        except BaseException as error:
            _publish(work, Failure.of(error))
            raise
        report = _publish(work, None)
    if work.errors and not ignore_failing_modules:
        raise work.errors[0]
    return report


def tune_module(
    control: ModuleControl,
    device: str | torch.device | None = None,
    strategy: TuneStrategy | None = None,
    dry_run: bool = False,
) -> TuningReport:
    """Tune one wrapped module from the calls that it has recorded so far, as `Module.tune` does.

    Args:
        control: Of the module.
        device: Where it is expected; by default where it is.
        strategy: Instead of the module's own.
        dry_run: Describe, build nothing, and go on recording.

    Raises:
        InputError: An argument is wrong.
        TuningError: It is tuned already, has recorded nothing, or cannot be tuned.
    """
    if control.state == "tuned":
        raise TuningError(f"{control.name} is tuned already; enable_recording(force=True) begins anew.")
    if control.state != "recording" or control.recording is None or not control.recording.table.graphs:
        raise TuningError(
            f"{control.name} has no samples: call enable_recording() and then the module, or use pl.tune."
        )
    if strategy is not None and not isinstance(strategy, TuneStrategy):
        raise InputError(f"strategy: {strategy!r} is no strategy; give objects such as MaxThroughputStrategy().")
    settings = config.snapshot()
    cache = BuildCache(settings.cache_dir)
    func = control.inspected or control.plain
    work = _Work(func, settings, cache, time.perf_counter_ns, dry_run, None, Progress(None), _device(device))
    before, own = control.saved(), (control.strategy, control.strategies)
    if strategy is not None:
        control.strategy, control.strategies = strategy, None
    control.enable_passthrough()
    try:
        _tune_all(work, [control])
    finally:
        control.strategy, control.strategies = own
        if control.state != "tuned":
            before()
    report = _publish(work, None)
    if work.errors:
        raise work.errors[0]
    return report


def _publish(work: _Work, error: Failure | None) -> TuningReport:
    """The report so far, so that a tuning that is interrupted leaves what it had found."""
    report = TuningReport(
        created_at=work.created_at.isoformat(timespec="milliseconds"),
        duration_s=round((datetime.now(UTC) - work.created_at).total_seconds(), 3),
        is_dry_run=work.dry_run,
        num_builds=work.num_builds,
        settings=work.settings.model_dump(mode="json"),
        modules=work.reports,
        error=error,
        hardware=work.hardware.summary() if work.hardware is not None else None,
    )
    publish(report, work.settings.report_path)
    return report


def _device(device: str | torch.device | None) -> torch.device | None:
    try:
        return torch.device(device) if device is not None else None
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device: {device!r} is none; expected cpu, cuda, cuda:1 and so on.") from error


def _checked_sizes(batch_sizes: Sequence[int] | None) -> list[int]:
    if batch_sizes is not None and not isinstance(batch_sizes, (list, tuple, range)):
        raise InputError(f"batch_sizes: expected a list such as [1, 2], got {batch_sizes!r}.")
    sizes = list(dict.fromkeys(batch_sizes or _DEFAULT_BATCH_SIZES))
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InputError(f"batch_sizes: expected whole numbers from 1 up, got {size!r}.")
    if len(sizes) == 1:
        warnings.warn(
            f"batch_sizes has one size, {sizes[0]}, so that no batch axis can be seen: shapes count as fixed.",
            UserWarning,
            stacklevel=3,
        )
    return sizes


def _record(work: _Work, dataset: Any, sizes: Sequence[int], most: int | None) -> list[ModuleControl]:
    """Make all calls; returns the wrapped modules that the function reaches."""
    controls = wrapped_in(work.func)
    session = RecordingSession()
    work.before = {control: control.saved() for control in controls if control.state == "tuned"}
    token = recording_session.set(session)
    try:
        for control in controls:
            control.record_anew()
            control.session = session
        for size in sizes:
            session.batch_size = size
            for args, kwargs in calls_of(dataset, size, max_batches=most):
                work.first_call = work.first_call or (args, kwargs)
                work.progress.tell(f"recording calls of batch size {size}")
                with user_code("The function"), torch.no_grad():
                    consume(work.func(*args, **kwargs), work.clock)
    except BaseException:
        _settle(work, [*controls, *session.called])
        raise
    finally:
        recording_session.reset(token)
        for control in controls:
            control.session = None
    controls += [control for control in session.called if control not in controls]
    if not controls:
        raise InputError(
            "func: it reaches no wrapped module. Wrap modules first (pl.wrap, pl.Module), and give what uses them: the "
            "wrapped module, the pipeline, or a function that calls it."
        )
    for control in controls:
        control.enable_passthrough()
    untouched = [control for control in controls if control in work.before and control not in session.called]
    for control in untouched:
        _logger.info("%s was not called by the function, and stays tuned as it is", control.name)
        work.before[control]()
    controls = [control for control in controls if control not in untouched]
    if not work.dry_run:
        work.before.clear()  # what was chosen before is given up from here on
    return controls


def _settle(work: _Work, controls: Sequence[ModuleControl]) -> None:
    """What is not tuned runs as it is."""
    for control in controls:
        if control in work.before:
            work.before[control]()
        elif control.state != "tuned":
            control.enable_passthrough()


def _tune_all(work: _Work, controls: Sequence[ModuleControl]) -> None:
    strategies = [(control, _plan(control)) for control in controls]
    work.progress.begin(
        sum(
            len(strategy.backends_for(control.inner, control.device.type))
            for control, plan in strategies
            for _, strategy in plan
        )
    )
    for control, plan in strategies:
        _logger.info("Tuning module %s (%d graphs)%s", control.name, len(plan), " (dry run)" if work.dry_run else "")
        scope = work.hardware.annotate(module=control.name) if work.hardware is not None else nullcontext()
        with scope, nvtx_range("tune", module=control.name, enabled=work.settings.nvtx):
            work.reports.append(_tune_module(work, control, plan))
        _publish(work, None)


def _plan(control: ModuleControl) -> list[tuple[GraphSpec, TuneStrategy]]:
    default = FirstWinsStrategy()
    recording = control.recording
    graphs = recording.table.graphs if recording is not None else []
    return [(graph, control.strategy_of(graph, default)) for graph in graphs]


def _tune_module(work: _Work, control: ModuleControl, plan: Sequence[tuple[GraphSpec, TuneStrategy]]) -> ModuleReport:
    graphs: list[GraphReport] = []
    error: PerfladderError | None = None
    try:
        _check_recording(work, control)
        chosen: list[Chosen] = []
        for graph, strategy in plan:
            graph_work = _graph_work(work, control, graph)
            _logger.info("%s", describe_work(graph_work, strategy))
            if work.dry_run:
                graphs.append(GraphReport.of(graph_work, strategy))
                continue
            try:
                decision, served = decided(graph_work, strategy)
            except TuningError as failure:
                graphs.append(GraphReport.of(graph_work, strategy, candidates=failure.candidates))
                raise
            finally:
                work.num_builds += graph_work.num_builds
                work.progress.advance(len(strategy.backends_for(control.inner, graph_work.device.type)))
            chosen.append(served)
            graphs.append(GraphReport.of(graph_work, strategy, decision=decision.record))
            _logger.info(
                "%s, graph %s: %s. %s", control.name, graph.name, decision.record.selected, decision.record.reason
            )
        if not work.dry_run:
            assert control.recording is not None, "it was recorded"
            control.set_tuned(control.recording.table, chosen, work.settings)
            _move_original(work, control, owns_weights=all(one.owns_weights for one in chosen))
    except Exception as failure:
        error = failure if isinstance(failure, PerfladderError) else _unexpected(control, failure)
        work.errors.append(error)
        _logger.warning("%s stays as it is: %s", control.name, error)
    return ModuleReport.of(control, graphs, error)


def _unexpected(control: ModuleControl, failure: Exception) -> TuningError:
    _logger.warning("%s", control.name, exc_info=failure)
    error = TuningError(f"{control.name}: {type(failure).__name__}: {failure}")
    error.__cause__ = failure
    return error


def _check_recording(work: _Work, control: ModuleControl) -> None:
    """What has to hold of a module and its recording before anything is built.

    Raises:
        InputError: It does not.
    """
    recording = control.recording
    if recording is not None and not recording.table.graphs and recording.error is not None:
        raise recording.error
    if recording is None or not recording.table.graphs:
        raise InputError(f"{control.name} was not called by the function, so that there is nothing to tune.")
    if recording.error is not None:
        raise recording.error
    recording.table.check_dynamic_paths()
    drop_own_forward(control)
    for graph in recording.table.graphs:
        if not recording.samples.get(graph.name):
            raise InputError(f"{control.name}, graph {graph.name}: every call of this form raised.")
    if isinstance(control.strategies, Mapping):
        names = [graph.name for graph in recording.table.graphs]
        for name in (name for name in control.strategies if name not in names):
            warnings.warn(
                f"{control.name}: strategies has {name!r}, which is no graph here; there are {', '.join(names)}.",
                UserWarning,
                stacklevel=2,
            )
    if control.inner.training:
        raise InputError(f"{control.name} is in training mode; call its eval() before it is tuned.")
    if any(hasattr(part, "_hf_hook") for part in control.inner.modules()):
        raise InputError(
            f"{control.name} is moved between devices at each call (accelerate's offload); take those hooks off first."
        )
    if work.device is not None and not _is_on(control.device, work.device):
        raise InputError(f"device: {control.name} is on {control.device}, not on {work.device}; move it there first.")
    inspected = control.inspected
    if inspected is not None and not _is_same_call(work.func, inspected, control):
        warnings.warn(
            f"{control.name} was inspected through {_name_of(inspected)}, and is tuned through {_name_of(work.func)}: "
            "other calls may be recorded than were inspected.",
            UserWarning,
            stacklevel=2,
        )
    for graph in recording.table.graphs:
        if graph.num_samples < work.settings.min_num_samples:
            warnings.warn(
                f"{control.name}, graph {graph.name}: {graph.num_samples} samples were recorded, fewer than "
                f"config.min_num_samples = {work.settings.min_num_samples}.",
                UserWarning,
                stacklevel=2,
            )


def _is_on(device: torch.device, wanted: torch.device) -> bool:
    return device.type == wanted.type and wanted.index in (None, device.index)


def _is_same_call(func: Any, inspected: Any, control: ModuleControl) -> bool:
    return bool(func == inspected) or inspected is control.inner


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", None) or f"a {type(function).__name__}"


def _graph_work(work: _Work, control: ModuleControl, graph: GraphSpec) -> GraphWork:
    assert control.recording is not None, "it was recorded"
    graph_work = make_graph_work(
        control,
        graph,
        control.recording.samples[graph.name],
        work.settings,
        work.cache,
        work.clock,
        is_dry_run=work.dry_run,
        tell=work.progress.tell,
    )
    if work.quality_gate is not None:
        gate = work.quality_gate
        graph_work.pipeline_gate_name = f"{gate.demand} of the whole output"
        metric = gate.metric if isinstance(gate.metric, str) else function_digest(gate.metric)
        graph_work.pipeline_gate_key = f"{metric} {gate.minimum!r}"
        graph_work.pipeline_gate = lambda call: _gated(work, gate, control, graph, call)
        # The whole output decides: of a module's own it is told, and any value is good enough.
        graph_work.gate = QualityGate("cosine", -1.0)
    return graph_work


def _gated(
    work: _Work, gate: QualityGate, control: ModuleControl, graph: GraphSpec, call: Callable[..., Any]
) -> tuple[float, str | None]:
    """How alike the function's output with a candidate is to that without, and why that is not good enough."""
    if work.expected_output is None:
        work.expected_output = (_output_of(work, control.device),)
    with control.trying(graph, call):
        output = _output_of(work, control.device)
    value = gate.value_of_objects(work.expected_output[0], output)
    return value, gate.why_not(value, where=" of the whole output")


def _output_of(work: _Work, device: torch.device) -> Any:
    assert work.first_call is not None, "calls were recorded"
    args, kwargs = copy_arguments(*work.first_call)
    with user_code("The function"), torch.no_grad(), seeded(device):
        output = work.func(*args, **kwargs)
        return list(output) if inspect.isgenerator(output) else output


def _move_original(work: _Work, control: ModuleControl, *, owns_weights: bool) -> None:
    """Give up or move the original's weights, where that is asked for and nothing needs them."""
    target = work.settings.device_after_tuning
    if target == "keep":
        return
    if not owns_weights:
        _logger.info("%s: the original stays where it is, since what was chosen uses its weights", control.name)
        return
    if target == "meta":
        _logger.warning(
            "%s: the original's weights are given up (config.device_after_tuning = 'meta'); a call of another form "
            "than those that were tuned will be an error.",
            control.name,
        )
    control.inner.to(target)
