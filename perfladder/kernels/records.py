"""What is known of each provider that was tried, as it is stored with a plan."""

from __future__ import annotations

from pydantic import Field, JsonValue

from perfladder.kernels.signatures import CallSignature
from perfladder.models import Model
from perfladder.tuning.records import CorrectnessRecord, Measurement, Status


class ProviderRecord(Model):
    """One provider on one form of call."""

    function: str
    signature: CallSignature | None = Field(description="None: nothing was tried, whatever the form of call.")
    num_calls: int = Field(default=0, description="Calls of that form in one iteration.")
    provider: str = Field(description="Its name, as plans know it.")
    description: str = Field(description="With the options that differ from their defaults.")
    config: dict[str, JsonValue] = {}
    status: Status
    reason: str | None = None
    reference_dtype: str | None = Field(default=None, description="In which the function itself gave what is right.")
    correctness: CorrectnessRecord | None = None
    measurement: Measurement | None = None

    @property
    def speedup(self) -> float | None:
        """Of the call; None where it was not timed."""
        return self.measurement.comparison.speedup if self.measurement else None


class SwapModel(Model):
    """A provider for the calls of one form."""

    function: str
    signature: CallSignature
    provider: str
    config: dict[str, JsonValue] = {}


class CallPlanReplay(Model):
    """One captured call of a stage, replayed with the plan and without."""

    index: int
    run: int = 0
    differing: dict[str, str] = Field(default={}, description="What differs from the pipeline beyond the tolerance.")
    max_rel_error: float = 0.0
    measurement: Measurement


class StagePlanReplay(Model):
    """What a plan does to a captured stage, alone in a fresh process."""

    stage: str
    calls: list[CallPlanReplay]

    @property
    def reason(self) -> str | None:
        """Why the plan is no good for the stage; None if it is right and no call is slower."""
        for call in self.calls:
            if call.differing:
                path, why = next(iter(call.differing.items()))
                return f"call {call.index} of the captured stage {self.stage}: {path}: {why}"
        if not any(call.measurement.comparison.verdict == "faster" for call in self.calls):
            return f"no call of the captured stage {self.stage} is faster for certain"
        slower = [call.index for call in self.calls if call.measurement.comparison.verdict == "slower"]
        return f"call {slower[0]} of the captured stage {self.stage} is slower" if slower else None
