"""`time_stages`: rung 1 in place, on an object that is already there, as in a notebook."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from perfladder.errors import InputError
from perfladder.instrument import named_modules_of
from perfladder.rungs.stages import StagesRequest, measure
from perfladder.target import LoadedTarget
from perfladder.timing.results import StagesResult
from perfladder.timing.timer import Clock
from perfladder.workload import Media, Metric, parse_workload


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
    if inputs is not None and not isinstance(inputs, Mapping):
        raise InputError(f"inputs: expected a mapping of keyword arguments, got a {type(inputs).__name__}.")
    workload = parse_workload(
        {
            "name": re.sub(r"[^A-Za-z0-9._-]", "-", type(obj).__name__).lstrip("._-") or "object",
            "target": "in_place:object",
            "call": call,
            "stages": stages if stages == "auto" else list(stages),
            "metric": metric,
            "items_per_call": items_per_call,
            "media": media.model_dump() if media else None,
            "warmup_runs": warmup_runs,
            "measured_runs": measured_runs,
            "seed": seed,
            "device": _device_of(obj),
        }
    )
    loaded = LoadedTarget.of(obj, workload, inputs=inputs or {})
    result = measure(loaded, StagesRequest(), clock=clock)
    return result.model_copy(update={"device": str(loaded.device)})


def _device_of(obj: Any) -> str:
    """Where the object's weights are; an object without any runs where torch would by default."""
    for _, module in named_modules_of(obj):
        for parameter in module.parameters():
            if parameter.device.type != "meta":
                return str(parameter.device)
    return "auto"
