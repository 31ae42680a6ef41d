"""The section of the replay: whether the stage alone behaves as in the pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from perfladder.capturing.in_turns import InTurns
from perfladder.report.html.blocks import Block, Cell, Code, Column, Plot, Section, Strong, Table, Text, Tone, View
from perfladder.report.html.plots import PALETTE, box, rows_height, rows_layout
from perfladder.report.html.run_data import RunData, number, numbers
from perfladder.rungs.harness import CallReplay, HarnessResult

_CALLS = 8


def harness_section(run: RunData) -> Section:
    """Whether the stage alone behaves as in the pipeline."""
    title = "Replay of the stage alone"
    result = run.harness
    if result is None:
        # Without a capture there is no replay, and the capture's own reason is the one that helps.
        captured = run.results.get("capture")
        is_captured = captured is None or captured.status == "done" or "harness" in run.results
        return run.missing("harness" if is_captured else "capture", "harness", title)
    blocks: list[Block] = [_harness_words(result)]
    blocks += [Text(line=[reason], role="note") for reason in result.unfaithful_because]
    if result.calls:
        blocks += [_harness_plot(result.calls[:_CALLS], result.in_turns), _harness_table(result)]
    return Section(id="harness", title=title, blocks=blocks)


def _harness_words(result: HarnessResult) -> Text:
    verdict = {True: "faithful", False: "not faithful", None: "undecided"}[result.is_faithful]
    parity = result.parity.replace("_", " ") if result.parity else "not compared, for the data are not the pipeline's"
    words = f". Its output is {parity}."
    if result.timing_ratio is not None:
        words += f" It takes {result.timing_ratio:.3f} times as long as in the pipeline"
        if interval := result.timing_ratio_interval:
            words += f" (95 % interval {interval.low:.3f} to {interval.high:.3f}, with {result.caches} caches)"
        if result.in_turns is not None:
            words += f", in turns with runs of the pipeline; {result.alone_timing_ratio:.3f} in a process of its own"
        words += "."
    return Text(
        line=["Stage ", Code(text=result.stage or "–"), " in a process of its own: ", Strong(text=verdict), words]
    )


def _harness_plot(calls: Sequence[CallReplay], turns: InTurns | None) -> Plot:
    groups = [
        (f"call {call.index}, {where}", samples.values, colour)
        for call in calls
        for where, samples, colour in (
            ("in the pipeline", call.in_pipeline_ms, PALETTE[0]),
            ("replayed", call.replayed_ms, PALETTE[1]),
            ("caches emptied", call.evicted_ms, PALETTE[2]),
        )
        if samples is not None
    ]
    if turns is not None:
        sides = (("in the pipeline", turns.pipeline_ms), ("replayed", turns.replayed_ms), ("emptied", turns.evicted_ms))
        groups += [
            (f"in turns, {where}", samples.values, colour)
            for (where, samples), colour in zip(sides, PALETTE, strict=False)
            if samples is not None
        ]
    return Plot(
        title="Calls in the pipeline and alone",
        reading="Each dot is one call; in turns, all captured calls together. Where the boxes of a call lie over each "
        "other, times of the replay stand for the pipeline; where they do not, use the replay for shares and kernels "
        "only.",
        views=[
            View(
                name="calls",
                traces=[box(*group) for group in groups],
                layout=rows_layout([group[0] for group in groups], "ms a call", xaxis={"title": {"text": "ms a call"}}),
            )
        ],
        height=rows_height(len(groups), 30),
    )


def _harness_table(result: HarnessResult) -> Table:
    rows = [
        [
            number(call.index),
            _parity(call),
            number(call.parity.max_rel_error if call.parity else None),
            *(
                number(samples.summary.p50 if samples else None)
                for samples in (call.in_pipeline_ms, call.replayed_ms, call.evicted_ms)
            ),
            number(call.host_lead_ms),
            Cell(text="yes" if call.second_replay_differs else "no"),
        ]
        for call in result.calls
    ]
    columns = [
        *numbers("call"),
        Column(title="output"),
        Column(title="largest error", is_number=True, hint="of the largest value"),
        *numbers("in the pipeline p50", "replayed p50", "caches emptied p50", unit="ms"),
        Column(title="host ahead ms", is_number=True, hint="of the device as it makes the call, there and alone"),
        Column(title="second replay differs"),
    ]
    return Table(caption="Replayed calls", columns=columns, rows=rows)


def _parity(call: CallReplay) -> Cell:
    if call.parity is None:
        return Cell(text="not compared", tone="unsure")
    tone: Tone = "bad" if call.parity.verdict == "different" else "good"
    return Cell(text=call.parity.verdict.replace("_", " "), tone=tone)
