"""Findings of rung 3: whether the replay stands for the stage in the pipeline."""

from __future__ import annotations

from perfladder.capturing.rounds import TIMING_TOLERANCE
from perfladder.findings.background import Background, interval_text, where
from perfladder.findings.finding import Evidence, Finding, Kind
from perfladder.rungs.capture import CaptureResult
from perfladder.rungs.harness import HarnessResult


def capture_findings(result: CaptureResult) -> list[Finding]:
    """Why the dominating stage cannot be replayed alone, where it cannot."""
    return [
        Finding(
            kind="not_replayable",
            rung="capture",
            stage=result.stage,
            claim=result.reason or "The dominating stage cannot be replayed alone.",
            evidence=[],
            uncertainty="none: the stage's inputs were looked at",
            refuted_by="a call site inside the stage that takes and returns plain tensors",
            next_experiment="Name a narrower call site under 'stages', such as the module that the stage calls.",
        )
    ]


def harness_findings(result: HarnessResult, background: Background) -> list[Finding]:
    """Whether the replay computes the same, and takes as long."""
    assert result.timing_ratio is not None
    assert result.timing_ratio_interval is not None
    ratio = Evidence(
        metric="timing_ratio",
        value=result.timing_ratio,
        unit="replayed / in pipeline",
        source=where("harness", "timing_ratio"),
    )
    error = Evidence(
        metric="max_rel_error",
        value=result.max_rel_error or 0.0,
        unit="of the largest value",
        source=where("harness", "parity"),
    )
    kind: Kind
    if result.has_other_output:
        kind, claim = (
            "replay_output_differs",
            f"The replay of {result.stage} is not faithful. {' '.join(result.unfaithful_because)}",
        )
        next_experiment = (
            "Name a call site that holds its own state under 'stages', or remove the hidden state, and run again."
        )
    elif result.is_timing_faithful is False:
        kind, claim = (
            "replay_timing_differs",
            f"The replay of {result.stage} gives the same output. {result.unfaithful_because[0]}",
        )
        next_experiment = "Use the replay for shares and kernels only; time changes in the whole pipeline."
    elif result.is_timing_faithful is None:
        kind = "replay_timing_undecided"
        told = (
            ("REPLAY_SPEED_CHANGED", "REPLAY_CALLS_TOO_SHORT", "REPLAY_NOT_IN_TURNS") if result.in_turns is None else ()
        )
        why = " ".join(warning.message for warning in result.warnings if warning.code in told)
        warm, emptied = result.warm_timing_ratio, result.evicted_timing_ratio
        if not why and warm is not None and emptied is not None and warm < 1 < emptied:
            why = f"The caches decide: {warm:.2f} times with warm ones, {emptied:.2f} with emptied ones."
        why = why or "The samples are too noisy to tell whether it takes as long as there."
        claim = (
            f"The replay of {result.stage} gives the same output, in {result.timing_ratio:.2f} times its duration in "
            f"the pipeline. {why}"
        )
        next_experiment = (
            "Run again on an idle machine with more repeats; until then trust its shares, not its durations."
        )
    else:
        kind = "replay_faithful"
        parity = "bit for bit" if result.parity == "exact" else "within tolerance"
        claim = (
            f"{result.stage} alone behaves as in the pipeline: the same output {parity}, {result.timing_ratio:.2f} "
            f"times its duration{_in_turns(result)}."
        )
        next_experiment = "Try a change on the replay first: it takes seconds, and stands for the pipeline."
    return [
        Finding(
            kind=kind,
            rung="harness",
            stage=result.stage,
            claim=claim,
            evidence=[ratio, error],
            uncertainty="timing ratio " + interval_text(result.timing_ratio_interval, percent=False),
            refuted_by="a replay on an idle machine that says otherwise",
            next_experiment=next_experiment,
        )
    ]


def _in_turns(result: HarnessResult) -> str:
    if result.in_turns is None or result.alone_timing_ratio is None:
        return ""
    is_near = abs(result.alone_timing_ratio - 1) <= TIMING_TOLERANCE
    why = "" if is_near else ", by that process or by the machine"
    return f", in turns with runs of the pipeline ({result.alone_timing_ratio:.2f} times in a process of its own{why})"
