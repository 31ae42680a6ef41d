"""`time_stages`: rung 1 in place, on an object that is already there, as in a notebook."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from perfladder.in_place import wrap_object
from perfladder.rungs.stages import StagesRequest, measure
from perfladder.timing.results import StagesResult
from perfladder.timing.timer import Clock
from perfladder.workload import Media, Metric


def time_stages(
    obj: Any,
    inputs: Mapping[str, Any] | None = None,
    *,
    call: str | None = None,
    stages: Literal["auto"] | Sequence[str] = "auto",
    metric: Metric = "latency_p50",
    items_per_call: int = 1,
    media: Media | None = None,
    warmup_runs: int = 3,
    measured_runs: int = 10,
    seed: int = 0,
    clock: Clock = time.perf_counter_ns,
) -> StagesResult:
    """Time the stages of an object in this process: end to end, stage by stage, and what lies outside.

    The first call is reported apart, then the runs are warmed up and measured as `perfladder run` does. Every run gets
    its own copy of the inputs and runs under `torch.no_grad()`.

    Args:
        obj: What to call: a pipeline, a module, any callable, or an object with a method.
        inputs: Keyword arguments of the call; tensors and other objects are taken as they are.
        call: The method to call, such as `generate`; by default the object itself.
        stages: Call sites and marks, or `auto`.
        metric: The number that matters.
        items_per_call: For `throughput`.
        media: For `cadence_p95`: what a streamed chunk stands for.
        warmup_runs: Runs before the measured ones.
        measured_runs: Runs that are measured.
        seed: Set before every run.
        clock: Nanoseconds.

    Raises:
        InputError: The inputs do not fit the call, or a stage does not exist.
        WorkloadError: The object raised.
    """
    loaded = wrap_object(
        obj,
        inputs,
        call=call,
        stages=stages if stages == "auto" else list(stages),
        metric=metric,
        items_per_call=items_per_call,
        media=media.model_dump() if media else None,
        warmup_runs=warmup_runs,
        measured_runs=measured_runs,
        seed=seed,
    )
    result = measure(loaded, StagesRequest(), clock=clock)
    return result.model_copy(update={"device": str(loaded.device)})
