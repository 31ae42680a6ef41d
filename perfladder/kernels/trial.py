"""One provider on one form of call: is it applicable, is it right, is it faster?"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from perfladder.capturing.context import ProcessSettings
from perfladder.functional.samples import tensors_in
from perfladder.kernels.base import KernelProvider
from perfladder.kernels.functions import function_named
from perfladder.kernels.records import ProviderRecord
from perfladder.kernels.reference import CallSample, Reference, reference_of
from perfladder.kernels.signatures import CallSignature
from perfladder.tuning.correctness import Case, Expected, check, expectations
from perfladder.tuning.measure import MeasuringStop, Meter, Timing, measure_pairs
from perfladder.tuning.records import CorrectnessRecord, Measurement, Status

if TYPE_CHECKING:
    from perfladder.functional.samples import Arguments

_logger = logging.getLogger("perfladder.kernels")

_SHORT_MS: Final = 0.2
"""Shorter calls are made several times in one timing: a clock and an event cost some microseconds themselves."""
_MAX_REPEATS: Final = 100
_PROBES: Final = 3


@dataclass(frozen=True)
class TrialSettings:
    """How providers are checked and timed.

    Attributes:
        device: Where.
        measuring: How many pairs.
        min_effect: Relative change below which a provider is not faster.
        tolerances: Largest accepted error by dtype, relative to the largest magnitude of the tensor.
        meter: Times calls.
        needs_trace: Providers have to be part of a compiled graph.
    """

    device: torch.device
    measuring: MeasuringStop
    min_effect: float
    tolerances: Mapping[str, float]
    meter: Meter
    needs_trace: bool = False


@dataclass(eq=False)
class CallForm:
    """Calls of one form: how many there are, samples of them, and what is right for these."""

    function: str
    signature: CallSignature
    num_calls: int
    samples: list[CallSample]
    settings: TrialSettings
    reference_dtype: str | None = None
    time_ms: float = 0.0
    _expected: list[Expected] = field(default_factory=list)

    @property
    def original(self) -> Callable[..., Any]:
        """The function itself."""
        return function_named(self.function)

    @property
    def expected(self) -> list[Expected]:
        """What is right for all samples, and for the same with other numbers.

        These come first: a kernel that writes to the weights then writes to copies.
        """
        if not self._expected:
            for sample in self.samples:
                reference = reference_of(self.original, sample, self.settings.device)
                cases = [Case("the sample", sample.fresh)]
                if not reference.changes_inputs and _is_defined(reference, sample):
                    cases.insert(0, Case("other numbers", sample.with_other_numbers))
                found = expectations(reference.call, cases, self.settings.device)
                self._expected += [replace(one, changes_inputs=reference.changes_inputs) for one in found]
                self.reference_dtype = reference.dtype
        return self._expected

    def probe(self) -> float:
        """Time the function itself; returns milliseconds of all its calls of this form in one iteration."""
        sample, original = self.samples[0], self.original
        with torch.no_grad():
            times = [self.settings.meter.time_ms(original, sample.fresh()) for _ in range(_PROBES + 1)]
        self.time_ms = sorted(times[1:])[_PROBES // 2]
        return self.time_ms * self.num_calls

    def try_provider(self, provider: KernelProvider) -> tuple[ProviderRecord, KernelProvider]:
        """Prepare, check and time a provider; returns what was found, and the prepared one.

        One that leaves a setting of the process otherwise than it was is rejected, and the setting put back: calls that
        are not its own would be other ones with it.
        """
        before = ProcessSettings()
        record, live = self._tried(provider)
        if changed := before.put_back():
            reason = f"it leaves settings of torch changed: {', '.join(changed)}"
            record = record.model_copy(update={"status": "rejected", "reason": reason})
        return record, live

    def _tried(self, provider: KernelProvider) -> tuple[ProviderRecord, KernelProvider]:
        record = ProviderRecord(
            function=self.function,
            signature=self.signature,
            num_calls=self.num_calls,
            provider=provider.name,
            description=repr(provider),
            config=provider.config.model_dump(mode="json"),
            status="kept",
        )
        live = provider.of(self.function)

        def ended(status: Status, reason: str, **facts: Any) -> tuple[ProviderRecord, KernelProvider]:
            _logger.info("%s for %s: %s (%s)", provider, self.function, status, reason)
            return record.model_copy(update={"status": status, "reason": reason, **facts}), live

        try:
            if reason := self._why_not(live):
                return ended("not_applicable", reason)
            with torch.no_grad():
                live.prepare([sample.fresh() for sample in self.samples])
            found = check(live, self.expected, self.settings.device, None, self.settings.tolerances)
            correctness = CorrectnessRecord.of(found, None, dict(self.settings.tolerances))
            facts: dict[str, Any] = {"correctness": correctness, "reference_dtype": self.reference_dtype}
            if found.reason is not None:
                return ended("rejected", found.reason, **facts)
            timing = self._time(live)
        except (Exception, SystemExit) as error:  # whatever a library or a user's kernel raises
            return ended("failed", f"{type(error).__name__}: {error}")
        facts["measurement"] = Measurement.of(timing)
        if timing.comparison.verdict != "faster":
            return ended("rejected", f"not faster: {timing.comparison.reason}", **facts)
        return record.model_copy(update=facts), live

    def _why_not(self, provider: KernelProvider) -> str | None:
        for sample in self.samples:
            if reason := provider.why_not_for(*sample.args, **sample.kwargs):
                return reason
        return None

    def _time(self, provider: KernelProvider) -> Timing:
        changes_inputs = any(one.changes_inputs for one in self.expected)
        repeats = 1 if changes_inputs else max(1, min(_MAX_REPEATS, math.ceil(_SHORT_MS / max(self.time_ms, 1e-3))))
        timing = measure_pairs(
            self.settings.meter,
            _repeated(self.original, repeats),
            _repeated(provider, repeats),
            self.samples[0],
            batch_size=1,
            stop=self.settings.measuring,
            min_effect=self.settings.min_effect,
            changes_inputs=changes_inputs,
        )
        baseline, candidate = ([ms / repeats for ms in side] for side in (timing.baseline_ms, timing.candidate_ms))
        return Timing(1, baseline, candidate, timing.comparison)


def _is_defined(reference: Reference, sample: CallSample) -> bool:
    """Whether the function gives numbers for the sample's other numbers; those of a mask may leave nothing to weigh."""
    args, kwargs = sample.with_other_numbers()
    with torch.no_grad():
        found = tensors_in(reference.call(*args, **kwargs))
    return all(bool(tensor.isfinite().all()) for tensor in found if tensor.is_floating_point())


def _repeated(call: Callable[..., Any], times: int) -> Callable[..., Any]:
    def repeated(*args: Any, **kwargs: Any) -> None:
        for _ in range(times):
            call(*args, **kwargs)

    return repeated


def forms_of(
    data: Mapping[str, Sequence[tuple[int, Arguments]]], settings: TrialSettings
) -> tuple[list[CallForm], dict[str, int]]:
    """Sort samples of calls by their form.

    Returns:
        The forms, and by function the number of calls of forms that cannot be told.
    """
    forms: dict[tuple[str, str], CallForm] = {}
    left_out: dict[str, int] = {}
    for function, samples in data.items():
        for count, arguments in samples:
            signature = CallSignature.of(arguments)
            if signature is None:
                left_out[function] = left_out.get(function, 0) + count
                continue
            key = (function, signature.model_dump_json())
            form = forms.setdefault(key, CallForm(function, signature, 0, [], settings))
            form.num_calls += count
            form.samples.append(CallSample.of_call(arguments))
    return list(forms.values()), left_out
