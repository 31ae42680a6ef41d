"""A plan: which provider serves which calls of a module, with the evidence, as JSON and as something that runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from pydantic import Field, JsonValue, PrivateAttr, ValidationError
from torch import nn

from perfladder.errors import InputError, NotPossibleHereError
from perfladder.kernels.base import KernelProvider
from perfladder.kernels.records import ProviderRecord, StagePlanReplay, SwapModel
from perfladder.kernels.runtime import Activation, KernelMode, LiveSwap, under_mode
from perfladder.models import SCHEMA_VERSION, Model, input_error
from perfladder.text import clause, plural
from perfladder.tuning.records import CorrectnessRecord, Measurement

_SHOWN: Final = 100


class KernelOptimizationPlan(Model):
    """What `KernelOptimizer.make_plan` found: swaps, and every provider that was tried, with the reason.

    Applied to a module, it swaps calls of these forms inside that module's calls: without gradients and autocast, on
    the thread that calls. All other calls stay as they are.
    """

    schema_version: int = SCHEMA_VERSION
    device_type: str
    environment: dict[str, str] = Field(default={}, description="Versions and device of the measurements.")
    swaps: list[SwapModel] = []
    records: list[ProviderRecord] = []
    reason: str | None = Field(default=None, description="Why there is no swap, or why all were given up.")
    whole: Measurement | None = Field(default=None, description="The whole function, with the swaps and without.")
    whole_correctness: CorrectnessRecord | None = None
    stage: StagePlanReplay | None = Field(default=None, description="The captured stage, where a capture was given.")
    _live: list[LiveSwap] | None = PrivateAttr(default=None)
    _mode: KernelMode | None = PrivateAttr(default=None)

    def to_dict(self) -> dict[str, JsonValue]:
        """All of it as JSON."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, data: dict[str, JsonValue]) -> KernelOptimizationPlan:
        """A plan again; its providers are looked up and prepared when it is first applied.

        Raises:
            InputError: It is no plan, or a newer one.
        """
        version = data.get("schema_version", SCHEMA_VERSION) if isinstance(data, dict) else None
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise InputError(f"plan: expected what to_dict() returns, of schema version {SCHEMA_VERSION} at most.")
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise input_error(error, cls, "The kernel plan") from None

    def apply(self, module: nn.Module) -> Activation:
        """Swap calls inside that module's calls, until the returned handle's `remove()` or the end of its `with` block.

        Raises:
            InputError: A provider is not known here, or the module's calls do not run its forward.
            NotPossibleHereError: A provider cannot be used here.
        """
        return Activation(module, self.mode())

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A function that swaps calls inside another one, which `torch.compile` may trace.

        Raises:
            InputError: A provider is not known here.
            NotPossibleHereError: A provider cannot be used here.
        """
        return under_mode(forward, self.mode()) if self.swaps else forward

    def mode(self) -> KernelMode:
        """What swaps the calls; made once."""
        if self._mode is None:
            self._mode = KernelMode(self.live())
        return self._mode

    def live(self) -> list[LiveSwap]:
        """The prepared providers; prepared now where they came from a file."""
        if self._live is None:
            self._live = self._loaded()
        return self._live

    def with_live(self, live: Sequence[LiveSwap]) -> KernelOptimizationPlan:
        """The same with providers that are prepared already."""
        made = self.model_copy()
        made._live, made._mode = list(live), None
        return made

    def without_swaps(self, reason: str, **facts: Any) -> KernelOptimizationPlan:
        """The same evidence, and nothing that is swapped."""
        return self.model_copy(update={"swaps": [], "reason": reason, **facts}).with_live(())

    def loaded_with(self, kinds: Sequence[type[KernelProvider]]) -> KernelOptimizationPlan:
        """The same with its providers prepared; those of these classes need not be registered."""
        return self.with_live(self._loaded({kind.name: kind for kind in kinds}))

    def _loaded(self, kinds: dict[str, type[KernelProvider]] | None = None) -> list[LiveSwap]:
        live = []
        for swap in self.swaps:
            kind = (kinds or {}).get(swap.provider)
            if kind is not None:
                provider = kind(kind.config_class.model_validate(swap.config)).of_file(swap.function)
            else:
                data: dict[str, JsonValue] = swap.model_dump(mode="json", exclude={"signature"})
                provider = KernelProvider.from_dict(data)
            live.append(LiveSwap(swap.function, swap.signature, _prepared(provider, swap)))
        return live

    def describe(self) -> str:
        """A line for each provider that was tried, and what became of all together."""
        lines = [_line(record) for record in self.records]
        if self.whole is not None:
            lines.append(f"whole: {_times(self.whole)}")
        if self.stage is not None:
            name = self.stage.stage
            lines += [f"stage {name}, call {call.index}: {_times(call.measurement)}" for call in self.stage.calls]
        kept = f"{plural(len(self.swaps), 'form')} of call kept"
        lines.append(kept if self.swaps else f"nothing is swapped: {self.reason}")
        return "\n".join(lines)


def _prepared(provider: KernelProvider, swap: SwapModel) -> KernelProvider:
    """Prepare with random numbers, since a file holds none of the module's."""
    device = torch.device(swap.signature.device_type)
    why = provider.why_not(device)
    if why is None:
        try:
            with torch.no_grad():
                provider.prepare([swap.signature.example(device)])
        except (Exception, SystemExit) as error:  # whatever a library raises
            why = f"{type(error).__name__}: {error}"
    if why is not None:
        raise NotPossibleHereError(
            f"The kernel plan has {provider!r} for {swap.function}, which is not possible here: {clause(why)}. Make a "
            "new plan."
        )
    return provider


def _line(record: ProviderRecord) -> str:
    form = f"({record.signature.describe()})" if record.signature else ""
    what = f"{record.function}{form if len(form) <= _SHOWN else form[: _SHOWN - 4] + '...)'}"
    why = f": {record.reason}" if record.reason else ""
    speed = f", {_times(record.measurement)}" if record.measurement else ""
    return f"{what}: {record.description}: {record.status.replace('_', ' ')}{why}{speed}"


def _times(measurement: Measurement) -> str:
    comparison, interval = measurement.comparison, measurement.comparison.interval
    times = f"{measurement.baseline_p50_ms:.3g} -> {measurement.candidate_p50_ms:.3g} ms"
    if comparison.speedup is None or interval is None:
        return f"{times}, {comparison.verdict.replace('_', ' ')}"
    return (
        f"{times}, speedup {comparison.speedup:.2f} ({interval.low:.2f} to {interval.high:.2f}, "
        f"{comparison.verdict.replace('_', ' ')})"
    )
