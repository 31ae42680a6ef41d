"""`KernelOptimizer`: for the calls inside a module, which other kernels are right and faster, and what that gains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from perfladder.errors import InputError
from perfladder.functional.mode import CallTable, FunctionMode
from perfladder.functional.profiler import call_pairs, callable_of, module_of
from perfladder.functional.samples import Arguments, FunctionData, SampleStore, tensors_in
from perfladder.kernels.base import KernelProvider
from perfladder.kernels.functions import function_named
from perfladder.kernels.plan import KernelOptimizationPlan
from perfladder.kernels.records import ProviderRecord, SwapModel
from perfladder.kernels.registry import default_providers
from perfladder.kernels.runtime import Activation, LiveSwap
from perfladder.kernels.trial import TrialSettings, forms_of
from perfladder.kernels.whole import prove
from perfladder.timing.timer import Clock
from perfladder.tuning.cache import device_name, versions
from perfladder.tuning.correctness import TOLERANCES
from perfladder.tuning.measure import MeasuringStop, Meter, NumStepsMeasuringStopStrategy, check_strategy
from perfladder.tuning.state import ModuleState
from perfladder.user_code import consume

if TYPE_CHECKING:
    from perfladder.workload import Workload, WorkloadFile

_logger = logging.getLogger("perfladder.kernels")

_MIN_SHARE: Final = 0.01


class KernelOptimizer:
    """Finds kernels for single calls inside a module.

    Each provider is tried on each form of call of its functions: prepared, compared with the function itself in higher
    precision, and timed against it in turns. What wins is put into a plan, which is compared and timed on the whole.

    Args:
        providers: What to try; None for `pl.kernels.default_providers()`.
        min_time_share: Forms of call that take less of the whole time than this are left alone.
        min_speedup_percent: A call's speedup has to be above it for certain.
        measuring: How many pairs of runs.
        tolerances: Largest accepted error by dtype, relative to the largest magnitude of the tensor; what is not given
            is as in tuning.
        sample_budget_bytes: How much the kept inputs of calls may hold together.
        clock: What times calls on a CPU, in ns.

    Raises:
        InputError: An argument is wrong.
    """

    def __init__(
        self,
        providers: Sequence[KernelProvider] | None = None,
        *,
        min_time_share: float = _MIN_SHARE,
        min_speedup_percent: float = 1.0,
        measuring: MeasuringStop | None = None,
        tolerances: Mapping[str, float] | None = None,
        sample_budget_bytes: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.providers = _checked_providers(default_providers() if providers is None else providers)
        for name, value, most in (
            ("min_time_share", min_time_share, 1),
            ("min_speedup_percent", min_speedup_percent, 1e6),
        ):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
                raise InputError(f"{name}: expected a number from 0 to {most:g}, got {value!r}.")
        if measuring is not None:
            check_strategy("measuring", measuring, MeasuringStop)
        _check_tolerances({} if tolerances is None else tolerances)
        if sample_budget_bytes is not None and (type(sample_budget_bytes) is not int or sample_budget_bytes < 0):
            raise InputError(f"sample_budget_bytes: expected a number from 0 or None, got {sample_budget_bytes!r}.")
        self.min_time_share = min_time_share
        self._min_effect = min_speedup_percent / 100
        self._measuring = measuring or NumStepsMeasuringStopStrategy()
        self._tolerances = {**TOLERANCES, **(tolerances or {})}
        self._sample_budget_bytes = sample_budget_bytes
        self._clock = clock

    def make_plan(
        self,
        function: Callable[..., Any],
        data: Iterable[Arguments] | None = None,
        *,
        module: nn.Module | None = None,
        capture: str | Path | None = None,
        workload: str | Path | Workload | WorkloadFile | None = None,
        factory: str | None = None,
    ) -> KernelOptimizationPlan:
        """Run a function, look for faster kernels for calls inside a module, and prove what they gain; no gradients.

        What the module keeps between its calls is as before when it ends.

        Args:
            function: What to run: a module, or anything that calls `module`, as in `ModuleFunctionKernelProfiler`.
            data: Arguments as (args, kwargs) pairs, all of which make one iteration. None is one call without any.
            module: Whose inside is looked at; by default the function itself, or the module it is a method of.
            capture: Folder of a capture of the module: the plan is kept only if it is right and faster there as well,
                in a fresh process.
            workload: What the capture was made of; see `StageBenchHarness`.
            factory: Instead of it what builds the stage.

        Raises:
            InputError: An argument is wrong.
            CaptureError: The capture is none, or damaged.
            ValueError: No module is given or found, or the data are no such pairs.
        """
        root, run, calls = module_of(function, module), callable_of(function), call_pairs(data)
        if capture is None and (workload is not None or factory is not None):
            raise InputError("capture: give the folder of a capture, of which this is the workload or factory.")
        harness = None
        if capture is not None:
            from perfladder.capturing.api import StageBenchHarness

            harness = StageBenchHarness(capture, workload=workload, factory=factory)  # refused before the trials

        def plain(*args: Any, **kwargs: Any) -> Any:
            return consume(run(*args, **kwargs), lambda: 0).value

        def sampled(mode: FunctionMode) -> None:
            with Activation(root, mode):
                for args, kwargs in calls:
                    plain(*args, **kwargs)

        settings = self.settings(device_of(root, calls))
        state = ModuleState(root)
        try:
            with torch.no_grad():
                plan = self.find(sampled, plain, calls, settings)
                if plan.swaps:
                    state.restore()
                    with Activation(root, plan.mode()) as activation:
                        activation.is_paused = True
                        plan = prove(plan, plain, activation.resumed(plain), calls, settings, root)
        finally:
            state.restore()
        if plan.swaps and harness is not None:
            stage = harness.run_with_plan(plan, tolerances=self._tolerances)
            facts = {"stage": stage}
            if stage.reason is not None:
                return plan.without_swaps(stage.reason, **facts)
            plan = plan.model_copy(update=facts).with_live(plan.live())
        return plan

    def settings(self, device: torch.device, *, needs_trace: bool = False) -> TrialSettings:
        """How providers are judged on a device."""
        meter = Meter(device) if self._clock is None else Meter(device, self._clock)
        return TrialSettings(device, self._measuring, self._min_effect, self._tolerances, meter, needs_trace)

    def find(
        self,
        sampled: Callable[[FunctionMode], None],
        plain: Callable[..., Any],
        calls: Sequence[Arguments],
        settings: TrialSettings,
    ) -> KernelOptimizationPlan:
        """What wins on single calls; nothing is proved for the whole.

        Args:
            sampled: Makes all calls once, with a mode active inside the module.
            plain: Makes one call without.
            calls: Their arguments.
            settings: How providers are judged.
        """
        refused, possible = self._possible(settings)
        names = frozenset(name for provider in possible for name in provider.functions)
        store = SampleStore(names, budget_bytes=self._sample_budget_bytes)
        sampled(FunctionMode(CallTable(), store.take))
        records, live = self._try_all(possible, store, _whole_ms(plain, calls, settings), settings)
        reason = None if live else "no provider is right and faster for any form of call"
        plan = KernelOptimizationPlan(
            device_type=settings.device.type,
            environment={**versions(), "device": device_name(settings.device)},
            swaps=[_model_of(swap) for swap in live],
            records=[*refused, *records],
            reason=reason,
        )
        return plan.with_live(live)

    def _possible(self, settings: TrialSettings) -> tuple[list[ProviderRecord], list[KernelProvider]]:
        """Providers that may be tried here, and a record of each other one."""
        refused, possible = [], []
        for provider in self.providers:
            try:
                reason = provider.why_not(settings.device)
            except Exception as error:  # whatever a library raises that is only half there
                reason = f"it cannot tell whether it works here: {type(error).__name__}: {error}"
            if reason is None and settings.needs_trace and not provider.is_traceable:
                reason = "torch.compile cannot trace it as part of the module's graph (is_traceable is False)"
            if reason is None:
                possible.append(provider)
            else:
                refused.append(_untried(provider, ", ".join(provider.functions), reason))
        return refused, possible

    def _try_all(
        self, providers: Sequence[KernelProvider], store: SampleStore, whole_ms: float, settings: TrialSettings
    ) -> tuple[list[ProviderRecord], list[LiveSwap]]:
        data: FunctionData = store.function_data()
        forms, untold = forms_of(data, settings)
        records = [*_not_called(providers, data), *_left_out(providers, store, untold)]
        live: list[LiveSwap] = []
        for form in forms:
            share = form.probe() / whole_ms
            if share < self.min_time_share:
                reason = f"these calls take {share:.1%} of the time; `min_time_share` is {self.min_time_share:.1%}"
                records += [
                    _untried(provider, form.function, reason, form.signature, form.num_calls)
                    for provider in _of(providers, form.function)
                ]
                continue
            tried = [form.try_provider(provider) for provider in _of(providers, form.function)]
            won = [found for found in tried if found[0].status == "kept"]
            best = max(won, key=lambda found: found[0].speedup or 0.0, default=None)
            records += [_beaten(record, best) for record, _ in tried]
            if best is not None:
                live.append(LiveSwap(form.function, form.signature, best[1]))
        return records, live


def _checked_providers(providers: Any) -> list[KernelProvider]:
    if not isinstance(providers, Sequence) or isinstance(providers, str):
        raise InputError(f"providers: expected a list of providers, not a {type(providers).__name__}.")
    for provider in providers:
        if not isinstance(provider, KernelProvider):
            raise InputError(f"providers: expected instances of pl.kernels.KernelProvider, not {provider!r}.")
        kind = type(provider).__name__
        if not isinstance(getattr(provider, "name", None), str):
            raise InputError(f"providers: {kind} has no name; set the class attribute `name`.")
        if isinstance(provider.functions, str):
            raise InputError(f"providers: `functions` of {kind} is a text; expected names, as in ('linear',).")
        for name in provider.functions:
            function_named(name)
    return list(providers)


def _check_tolerances(tolerances: Any) -> None:
    if not isinstance(tolerances, Mapping):
        raise InputError(f"tolerances: expected a mapping by dtype, not a {type(tolerances).__name__}.")
    for name, value in tolerances.items():
        if name not in TOLERANCES:
            raise InputError(f"tolerances: {name!r} is no dtype that has one; there are {', '.join(TOLERANCES)}.")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            raise InputError(f"tolerances: {name}: expected a number from 0, got {value!r}.")


def _of(providers: Sequence[KernelProvider], function: str) -> list[KernelProvider]:
    return [provider for provider in providers if function in provider.functions]


def _not_called(providers: Sequence[KernelProvider], data: FunctionData) -> list[ProviderRecord]:
    return [
        _untried(provider, name, f"the module makes no call of {name}")
        for provider in providers
        for name in provider.functions
        if name not in data
    ]


def _left_out(
    providers: Sequence[KernelProvider], store: SampleStore, untold: Mapping[str, int]
) -> list[ProviderRecord]:
    left = store.left_out()
    why = {name: f"inputs of {one.num_calls} calls were not kept: {one.reason}" for name, one in left.items()}
    why |= {name: f"the form of {count} calls cannot be told" for name, count in untold.items()}
    return [_untried(provider, name, reason) for name, reason in why.items() for provider in _of(providers, name)]


def _untried(
    provider: KernelProvider, function: str, reason: str, signature: Any = None, num_calls: int = 0
) -> ProviderRecord:
    return ProviderRecord(
        function=function,
        signature=signature,
        num_calls=num_calls,
        provider=provider.name,
        description=repr(provider),
        config=provider.config.model_dump(mode="json"),
        status="not_applicable",
        reason=reason,
    )


def _beaten(record: ProviderRecord, best: tuple[ProviderRecord, KernelProvider] | None) -> ProviderRecord:
    """The same, rejected where another provider of the same calls is faster still."""
    if best is None or record.status != "kept" or record is best[0]:
        return record
    return record.model_copy(update={"status": "rejected", "reason": f"{best[0].description} is faster still"})


def _model_of(swap: LiveSwap) -> SwapModel:
    return SwapModel(
        function=swap.function,
        signature=swap.signature,
        provider=swap.provider.name,
        config=swap.provider.config.model_dump(mode="json"),
    )


def _whole_ms(plain: Callable[..., Any], calls: Sequence[Arguments], settings: TrialSettings) -> float:
    """Time of one iteration; the first one does not count."""

    def iterate() -> None:
        for args, kwargs in calls:
            plain(*args, **kwargs)

    times = [settings.meter.time_ms(iterate, ((), {})) for _ in range(3)]
    return max(min(times[1:]), 1e-6)


def device_of(module: nn.Module, calls: Sequence[Arguments]) -> torch.device:
    """Where a module's parameters and buffers are, or its arguments if it has none."""
    tensors = [*module.parameters(), *module.buffers(), *tensors_in(list(calls))]
    devices = list(dict.fromkeys(tensor.device for tensor in tensors))
    if len(devices) > 1:
        accelerators = [device for device in devices if device.type != "cpu"]
        if len(accelerators) > 1:
            raise InputError(f"module: it is on {' and '.join(map(str, devices))}; expected one device.")
        return accelerators[0]
    return devices[0] if devices else torch.device("cpu")
