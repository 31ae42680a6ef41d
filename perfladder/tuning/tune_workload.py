"""`perfladder tune`: a workload's modules tuned through its own call, and what that does to the whole call."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from perfladder.errors import InputError, NotPossibleHereError
from perfladder.progress import Progress
from perfladder.target import LoadedTarget
from perfladder.tuning.tune_request import TuneRequest
from perfladder.tuning.tune_result import (
    Evidence,
    TriedCandidate,
    TunedGraph,
    TunedModule,
    TuneWorkloadResult,
)

if TYPE_CHECKING:
    from perfladder.tuning.progress import TuneProgress
    from perfladder.tuning.quality import QualityGate
    from perfladder.tuning.report import TuningReport
    from perfladder.tuning.strategies import TuneStrategy
    from perfladder.tuning.tune_evidence import Sides

_PACKAGE: Final = str(Path(__file__).parents[1])


def measure(loaded: LoadedTarget, request: TuneRequest) -> TuneWorkloadResult:
    """Tune modules of the workload's target, and keep that if the whole call shows what `request.keep` asks for.

    What is kept stays in the target; otherwise its modules are as they were.

    Raises:
        InputError: No module is worth it, a path leads to none, or a backend or an option is wrong.
        WorkloadError: The workload raised.
    """
    # These bring torch, which the command line does without.
    from perfladder.tuning.config import config
    from perfladder.tuning.timesteps import host_timesteps_in
    from perfladder.tuning.tune import tune
    from perfladder.tuning.tune_evidence import Sides, try_schedulers
    from perfladder.tuning.wrap import wrap, wrapped_in

    _check(loaded)
    strategy, gate = _strategy_of(request), _gate_of(request)
    with _settings(request), _caught_warnings() as caught:
        if gate is not None and not request.dry_run:
            _check_gate(loaded, gate)
        schedulers, before = _chosen_schedulers(loaded, request), host_timesteps_in(loaded.obj)
        shares = _chosen_modules(loaded, request, but=schedulers)
        _put(loaded, wrap(loaded.obj, list(shares), strategy))
        is_kept = False
        try:
            controls = wrapped_in(loaded.obj)
            loaded.prepare_run()
            report = tune(
                _call_of(loaded),
                [((), {})],
                batch_sizes=[loaded.workload.items_per_call],
                dry_run=request.dry_run,
                clear_cache=request.clear_cache,
                quality_gate=gate,
                on_progress=lambda progress: _tell(loaded, progress),
            )
            sides = Sides(loaded, [control for control in controls if control.state == "tuned"])
            tried = [] if request.dry_run else try_schedulers(sides, schedulers, request.pairs)
            evidence, is_kept, reason = _judged(sides, request, report, gate)
            saved_to = _saved(loaded, request) if is_kept else None
        finally:
            if not is_kept:
                _put_back(loaded)
                for path, host in host_timesteps_in(loaded.obj).items():
                    if path not in before:
                        host.deactivate()
        return TuneWorkloadResult(
            workload=loaded.workload.name,
            device=str(loaded.device),
            request=request,
            status="dry_run" if request.dry_run else "kept" if is_kept else "rejected",
            reason=reason,
            modules=[_module_of(module, shares) for module in report.modules],
            schedulers=tried,
            evidence=evidence,
            num_unseen_calls=sum(sum(control.num_unseen_calls.values()) for control in controls),
            saved_to=saved_to,
            report_path=str(config.snapshot().report_path),
            duration_s=report.duration_s,
            notes=_notes(caught),
        )


def _check(loaded: LoadedTarget) -> None:
    if loaded.workload.nproc > 1:
        raise NotPossibleHereError("nproc: tuning runs in one process; set it to 1, as with --set nproc=1.")
    if loaded.workload.tuned is not None:
        raise InputError(
            "tuned: the workload loads modules that are tuned already, and candidates are compared with plain ones. "
            "Leave it out, as with --set tuned=null."
        )
    if loaded.compiled_modules:
        raise InputError(
            "compile: the workload compiles its modules already, and candidates are compared with plain ones. Leave it "
            "out, as with --set compile=null; the backend inductor_jit does the same, and is checked."
        )


def _strategy_of(request: TuneRequest) -> TuneStrategy:
    from perfladder.backend.registry import find_backend
    from perfladder.tuning import strategies

    backends = []
    for choice in request.backends:
        options: dict[str, Any] = dict(choice.options)
        backends.append(find_backend(choice.name)(**options))
    if request.strategy == "one-backend":
        return strategies.OneBackendStrategy(backends[0])
    if request.latency_budget_ms is not None:
        return strategies.LatencyBudgetStrategy(request.latency_budget_ms, backends or None)
    kinds: dict[str, type[TuneStrategy]] = {
        "first-wins": strategies.FirstWinsStrategy,
        "max-throughput": strategies.MaxThroughputStrategy,
        "min-latency": strategies.MinLatencyStrategy,
    }
    return kinds[request.strategy](backends or None)


def _gate_of(request: TuneRequest) -> QualityGate | None:
    from perfladder.tuning.quality import QualityGate

    return QualityGate(request.quality.metric, request.quality.minimum) if request.quality else None


@contextmanager
def _settings(request: TuneRequest) -> Iterator[None]:
    """The process's settings as this tuning needs them; plain modules are timed again, so their weights stay."""
    from perfladder.tuning.config import config

    wanted: dict[str, Any] = {"isolate_builds": request.isolate_builds, "device_after_tuning": "keep"}
    if request.cache_dir is not None:
        wanted["cache_dir"] = request.cache_dir
    before = {name: getattr(config, name) for name in wanted}
    try:
        for name, value in wanted.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


@contextmanager
def _caught_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Collect warnings inside the block; those that are not perfladder's are given at its end."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
    for one in caught:
        if not _is_own(one):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def _is_own(warning: warnings.WarningMessage) -> bool:
    return warning.filename.startswith(_PACKAGE)


def _notes(caught: list[warnings.WarningMessage]) -> list[str]:
    """Perfladder's warnings; that there is one batch size is so for every workload, and has a field of its own."""
    told = dict.fromkeys(str(one.message) for one in caught if _is_own(one))
    return [text for text in told if not text.startswith("batch_sizes has one size")]


def _chosen_schedulers(loaded: LoadedTarget, request: TuneRequest) -> dict[str, Any]:
    """Schedulers to try by path: those among the paths that were asked for, or all."""
    from perfladder.tuning.timesteps import find_schedulers

    found = find_schedulers(loaded.obj)
    return {path: one for path, one in found.items() if request.modules is None or path in request.modules}


def _chosen_modules(loaded: LoadedTarget, request: TuneRequest, *, but: dict[str, Any]) -> dict[str, float | None]:
    """Paths of the modules to tune, with their shares of the time where those were measured."""
    if request.modules is not None:
        paths = [path for path in request.modules if path not in but]
        if not paths:
            raise InputError(
                f"--module: {', '.join(but)} is no module; name at least one, or use pl.HostTimesteps, which needs no "
                "tuning."
            )
        return dict.fromkeys(paths)
    from perfladder.tuning.inspect import Runner, inspect_runs

    loaded.tell(Progress(label="looking for modules that are worth tuning"))
    runner = Runner(loaded.device, lambda: loaded.run().value, prepare=loaded.prepare_run)
    found = inspect_runs(loaded.obj, runner, [((), {})], range(6), measured=5, warmup=loaded.workload.warmup_runs)
    worth = found.get_modules(min_execution_ratio=request.min_share, limit=request.limit)
    if not worth:
        first = found.get_modules()[0]
        raise InputError(
            f"--min-share {request.min_share:g}: no module has such a part of the time; the largest is "
            f"{first.name} with {found.ratio(first):.3f}. Name it with --module to tune it nevertheless."
        )
    return {info.object_path: found.ratio(info) for info in worth}


def _put(loaded: LoadedTarget, obj: Any) -> None:
    if obj is not loaded.obj:
        loaded.replace_object(obj)


def _put_back(loaded: LoadedTarget) -> None:
    from perfladder.tuning.wrap import unwrap

    _put(loaded, unwrap(loaded.obj))


def _call_of(loaded: LoadedTarget) -> Any:
    def call() -> Any:
        loaded.prepare_run()
        return loaded.run().value

    return call


def _check_gate(loaded: LoadedTarget, gate: QualityGate) -> None:
    """Measure a plain output against itself: what cannot be measured is told before anything is built."""
    from perfladder.tuning.whole_output import encode_output

    loaded.tell(Progress(label="measuring the quality of a plain output"))
    output = encode_output(_call_of(loaded)())
    gate.value_of(output, output)


def _tell(loaded: LoadedTarget, now: TuneProgress) -> None:
    """Pass progress on. A candidate may be silent for a first build, a second one here, and its runs."""
    from perfladder.tuning.config import config

    limit_s = loaded.workload.timeout_s + 2 * config.build_timeout_s if now.num_total else None
    loaded.tell(
        Progress(
            label=now.label,
            num_done=now.num_done,
            num_total=now.num_total,
            remaining_s=now.remaining_s,
            limit_s=limit_s,
        )
    )


def _judged(
    sides: Sides, request: TuneRequest, report: TuningReport, gate: QualityGate | None
) -> tuple[Evidence | None, bool, str]:
    """The evidence for what was chosen, whether it is kept, and why."""
    from perfladder.tuning.tune_evidence import break_even, compare_outputs, decide, time_sides

    if request.dry_run:
        return None, False, "Nothing was built."
    if not sides.has_choice:
        is_any = any(module.error is None for module in report.modules)
        what = "No candidate is better than the plain modules" if is_any else "No module could be tuned"
        return None, False, f"{what}: all stay as they are."
    output = compare_outputs(sides, gate)
    plain_ms, tuned_ms, comparison = time_sides(sides, request.pairs)
    evidence = Evidence(
        plain_ms=plain_ms,
        tuned_ms=tuned_ms,
        comparison=comparison,
        output=output,
        break_even=break_even(report, plain_ms, comparison),
    )
    return evidence, *decide(request.keep, comparison, output)


def _saved(loaded: LoadedTarget, request: TuneRequest) -> str | None:
    if request.save is None:
        return None
    from perfladder.tuning.checkpoint import save

    return str(save(loaded.obj, Path(request.save)))


def _module_of(module: Any, shares: dict[str, float | None]) -> TunedModule:
    return TunedModule(
        path=module.path or "",
        name=module.name,
        module_type=module.module_type,
        share=shares.get(module.path or ""),
        error=module.error.message if module.error else None,
        graphs=[_graph_of(graph) for graph in module.graphs],
    )


def _graph_of(graph: Any) -> TunedGraph:
    decision = graph.decision
    return TunedGraph(
        name=graph.name,
        inputs=[f"{spec.access_path} {spec.dtype} {list(spec.shape)}" for spec in graph.inputs],
        strategy=graph.strategy_description,
        backends=graph.backends,
        selected=decision.selected if decision else None,
        reason=decision.reason if decision else None,
        candidates=[_candidate_of(record) for record in (decision.candidates if decision else graph.candidates)],
    )


def _candidate_of(record: Any) -> TriedCandidate:
    timed = record.measurements[-1] if record.measurements else None
    right = record.correctness
    return TriedCandidate(
        description=record.description,
        status=record.status,
        reason=record.reason,
        is_reused=record.is_reused,
        plain_p50_ms=timed.baseline_p50_ms if timed else None,
        tuned_p50_ms=timed.candidate_p50_ms if timed else None,
        comparison=timed.comparison if timed else None,
        max_rel_error=right.max_rel_error if right else None,
        quality=right.quality if right else None,
        build_s=record.build_s,
        trial_s=record.trial_s,
        log_file=record.log_file,
    )
