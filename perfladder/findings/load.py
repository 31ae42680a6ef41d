"""Findings about throughput and requests at once: where more input stops paying, and where more requests do."""

from __future__ import annotations

from perfladder.findings.finding import Evidence, Finding
from perfladder.timing.concurrency import ConcurrencyLevel
from perfladder.timing.results import StagesResult
from perfladder.timing.throughput import Saturation

_LITTLE_GAIN = 1.1
_ONE_CORE = 1.2
_IDLE_CORES = 0.8


def load_findings(result: StagesResult) -> list[Finding]:
    """What the sweep and the levels of concurrency say."""
    found = [] if result.saturation is None else [_saturation(result.saturation)]
    return found + _serialization(result.concurrency) + _failures(result.concurrency)


def _saturation(saturation: Saturation) -> Finding:
    is_reached = saturation.scenario is not None
    gain, interval = saturation.gain_beyond, saturation.gain_beyond_interval
    assert gain is not None
    assert interval is not None
    return Finding(
        kind="throughput_saturated" if is_reached else "throughput_grows",
        rung="stages",
        claim=(
            f"Throughput is saturated at {saturation.scenario!r}: no later value of the sweep gives "
            f"{saturation.min_gain:.0%} more."
            if is_reached
            else f"The sweep of {saturation.input} ends before throughput is saturated: {saturation.reason}."
        ),
        evidence=[
            Evidence(metric="gain_beyond", value=gain, unit="relative", source="stages.json: saturation"),
        ],
        uncertainty=(
            f"95 % interval of the gain {interval.low:+.1%} to {interval.high:+.1%}; "
            "the values were measured one after another, not in turn"
        ),
        refuted_by="the same values in another order, with another saturation point",
        next_experiment=(
            f"Use {saturation.scenario!r} if its latency is allowed; a larger value costs latency and memory only."
            if is_reached
            else "Add larger values to the sweep, as far as latency and memory allow."
        ),
    )


def _serialization(levels: list[ConcurrencyLevel]) -> list[Finding]:
    """More requests at once that finish no more of them: they wait for one another."""
    sound = [level for level in levels if level.items_per_s and not level.num_errors]
    if len(sound) < 2 or sound[0].items_per_s is None:
        return []
    least = sound[0]
    most = max(sound[1:], key=lambda level: level.items_per_s or 0.0)
    ratio = (most.items_per_s or 0.0) / sound[0].items_per_s
    if ratio >= _LITTLE_GAIN:
        return []
    cores = least.cpu_cores_used or 0.0
    return [
        Finding(
            kind="concurrency_serialized",
            rung="stages",
            claim=(
                f"Requests at once do not raise throughput: {most.concurrency} give {ratio:.2f} times that of "
                f"{least.concurrency}. {_who_serializes(cores)}"
            ),
            evidence=[
                Evidence(metric="items_per_s ratio", value=ratio, unit="times", source="stages.json: concurrency"),
                Evidence(metric="cpu_cores_used", value=cores, unit="cores", source="stages.json: concurrency"),
            ],
            uncertainty=f"{least.num_requests} and {most.num_requests} requests, one level after the other",
            refuted_by="several processes, each with a copy of the model, that do not raise throughput either",
            next_experiment=(
                "Batch requests into one call (sweep the batch size); on a CPU, compare with several processes of "
                "fewer threads each."
            ),
        )
    ]


def _who_serializes(cores: float) -> str:
    """What the CPU time of the lowest level says; it names no culprit for sure."""
    if cores < _IDLE_CORES:
        return f"With {cores:.1f} cores busy the host mostly waits: for the device, or for a lock."
    if cores <= _ONE_CORE:
        return (
            "One core is busy: Python's interpreter lock or one of the target's lets one request run at a time, or the "
            "host spins while it waits for the device."
        )
    return f"{cores:.1f} cores are busy with one request already: its operators use the CPUs that others would need."


def _failures(levels: list[ConcurrencyLevel]) -> list[Finding]:
    failing = next((level for level in levels if level.num_errors and level.concurrency > 1), None)
    if failing is None:
        return []
    return [
        Finding(
            kind="concurrency_fails",
            rung="stages",
            claim=(
                f"The target does not stand {failing.concurrency} requests at once: {failing.num_errors} of "
                f"{failing.num_requests} raised. The commonest: {next(iter(failing.errors))}"
            ),
            evidence=[
                Evidence(
                    metric="num_errors", value=failing.num_errors, unit="requests", source="stages.json: concurrency"
                )
            ],
            uncertainty="a race may show in one run and not in the next",
            refuted_by="the same error with one request at a time",
            next_experiment="Put a lock or a queue before the object, or give each worker its own copy.",
        )
    ]
