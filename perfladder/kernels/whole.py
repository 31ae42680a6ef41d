"""What a plan does to the whole function: is its output right, and is it faster?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from perfladder.functional.samples import Arguments
from perfladder.kernels.plan import KernelOptimizationPlan
from perfladder.kernels.trial import TrialSettings
from perfladder.tuning.correctness import Case, check, expectations
from perfladder.tuning.measure import measure_pairs
from perfladder.tuning.records import CorrectnessRecord, Measurement
from perfladder.tuning.samples import Sample, copy_arguments
from perfladder.tuning.state import ModuleState

Call = Callable[..., Any]


def prove(
    plan: KernelOptimizationPlan,
    plain: Call,
    swapped: Call,
    calls: Sequence[Arguments],
    settings: TrialSettings,
    module: nn.Module,
) -> KernelOptimizationPlan:
    """Compare both on all calls, then time them in turns; a plan that is no good comes back without swaps.

    Args:
        plan: What is proved.
        plain: The function without the plan.
        swapped: The same with it.
        calls: Arguments; they are copied for each run.
        settings: Tolerances and protocol.
        module: Its state is set back before each run that is compared, and afterwards.
    """
    state = ModuleState(module)
    tolerances = as_computed(settings.tolerances, module)

    def case(number: int, arguments: Arguments) -> Case:
        def make() -> Arguments:
            state.restore()
            return copy_arguments(*arguments)

        return Case(f"call {number}", make)

    try:
        cases = [case(number, arguments) for number, arguments in enumerate(calls)]
        expected = expectations(plain, cases, settings.device)
        found = check(swapped, expected, settings.device, None, tolerances)
        facts: dict[str, Any] = {"whole_correctness": CorrectnessRecord.of(found, None, dict(tolerances))}
        if found.reason is not None:
            again = check(plain, expected, settings.device, None, tolerances)
            why = "the whole output is wrong" if again.reason is None else "two plain runs differ, so nothing is proven"
            return plan.without_swaps(f"{why}: {found.reason}", **facts)
        timing = measure_pairs(
            settings.meter,
            _all(plain),
            _all(swapped),
            Sample((list(calls),), {}, None),
            batch_size=1,
            stop=settings.measuring,
            min_effect=0.0,
            changes_inputs=any(one.changes_inputs for one in expected),
        )
    except (Exception, SystemExit) as error:  # whatever the user's function or a kernel raises
        return plan.without_swaps(f"the whole function failed with the swaps: {type(error).__name__}: {error}")
    finally:
        state.restore()
    facts["whole"] = Measurement.of(timing)
    if timing.comparison.verdict != "faster":
        return plan.without_swaps(f"the whole is not faster: {timing.comparison.reason}", **facts)
    made = plan.model_copy(update=facts)
    return made.with_live(plan.live())


def as_computed(tolerances: Mapping[str, float], module: nn.Module) -> dict[str, float]:
    """Tolerances for what a module's results became further on: numbers in a wider type are no more exact for that."""
    narrow = {str(tensor.dtype).removeprefix("torch.") for tensor in module.parameters() if tensor.is_floating_point()}
    least = max((tolerances[dtype] for dtype in narrow if dtype in tolerances), default=0.0)
    return {dtype: max(tolerance, least) for dtype, tolerance in tolerances.items()}


def _all(function: Call) -> Call:
    def run(calls: list[Arguments]) -> None:
        for args, kwargs in calls:
            function(*args, **kwargs)

    return run
