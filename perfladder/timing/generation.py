"""Text generation: time to the first token and time for each later one, from the calls of `generate`'s two phases."""

from __future__ import annotations

from dataclasses import dataclass, field

from perfladder.instrument import Site
from perfladder.stats import Samples, summarize
from perfladder.timing.results import GenerationTiming
from perfladder.timing.timer import Call, RunTiming


@dataclass
class _Generation:
    """One call of `generate`: when its tokens were there, in ms from its start."""

    prefill_ms: float
    token_times_ms: list[float] = field(default_factory=list)


def generation_of(runs: list[RunTiming], sites: list[Site], *, on_device: bool) -> GenerationTiming | None:
    """Time the tokens of the first model of which both phases were observed; None where there is none.

    A token counts as there when the next step begins, so that choosing it is included; the last one when `generate`
    returns. A step makes one token of each sequence; with beams or a draft model steps and tokens differ.
    """
    prefills = {id(site.owner): site for site in sites if site.phase == "prefill"}
    both = [prefills[id(site.owner)] for site in sites if site.phase == "decode" and id(site.owner) in prefills]
    for prefill in both:
        found = [made for timing in runs for made in _generations(timing, prefill, on_device=on_device)]
        if found:
            return _summary(prefill.path.rpartition(".")[0], found, len(runs))
    return None


def _summary(model: str, found: list[_Generation], num_runs: int) -> GenerationTiming:
    gaps = [b - a for made in found for a, b in zip(made.token_times_ms, made.token_times_ms[1:], strict=False)]
    return GenerationTiming(
        model=model,
        generations_per_run=len(found) / num_runs,
        steps_per_generation=sum(len(made.token_times_ms) for made in found) / len(found),
        first_token_ms=Samples(launches=[[made.token_times_ms[0] for made in found]]),
        prefill_ms=Samples(launches=[[made.prefill_ms for made in found]]),
        token_ms=summarize(gaps) if gaps else None,
        token_samples_ms=[round(gap, 6) for gap in gaps],
    )


def _generations(timing: RunTiming, prefill: Site, *, on_device: bool) -> list[_Generation]:
    """The generations of one run; those that ran at once are told apart by the `generate` call around them."""
    steps = [call for call in timing.calls if call.site.phase and call.site.owner is prefill.owner]
    groups: dict[int, list[Call]] = {}
    newest = 0
    for call in sorted(steps, key=lambda call: call.start_ns):
        around = _around(call)
        if around is None and call.site.phase == "prefill":
            # Nobody observes `generate`, as when it is the workload's own call.
            newest = id(call)
        groups.setdefault(newest if around is None else id(around), []).append(call)
    complete = [calls for calls in groups.values() if calls[0].site.phase == "prefill"]
    return [_generation(timing, calls, len(complete), on_device=on_device) for calls in complete]


def _around(call: Call) -> Call | None:
    """The call of `generate` that a step belongs to, if it was observed."""
    parent = call.parent
    while parent is not None:
        if parent.site.owner is call.site.owner and parent.site.method == "generate":
            return parent
        parent = parent.parent
    return None


def _generation(timing: RunTiming, steps: list[Call], num_generations: int, *, on_device: bool) -> _Generation:
    spans = [timing.span(call, on_device=on_device) for call in steps]
    around = _around(steps[0])
    if around is not None:
        start, end = timing.span(around, on_device=on_device)
    elif num_generations == 1:
        start, end = 0.0, timing.wall_ms
    else:
        start, end = spans[0][0], spans[-1][1]
    times = [later_start for later_start, _ in spans[1:]] + [end]
    return _Generation(spans[0][1] - spans[0][0], [moment - start for moment in times])
