"""A verdict in words: the reason, what to do next, and the one line that an alarm carries."""

from __future__ import annotations

from perfladder.nightly.model import Moved, NightVerdict

_NAMED = 3


def reason_of(verdict: NightVerdict) -> str:
    """Why the verdict is what it is."""
    told = {
        "ok": _ok,
        "improvement": _improvement,
        "suspected": _suspected,
        "undecided": _undecided,
        "regression": _regression,
    }
    return told[verdict.kind](verdict)


def next_step(verdict: NightVerdict) -> str | None:
    """What to do; None where there is nothing to do."""
    if verdict.kind == "regression" and verdict.commits is not None:
        good, first = verdict.commits.last_good, verdict.commits.first_changed
        accept = f"If the new level is right: perfladder nightly --accept {verdict.run_id}."
        if good and first and good != first:
            return (
                f"Measure both in turns: perfladder compare WORKLOAD --interleave --baseline-commit {good[:12]} "
                f"--candidate-commit {first[:12]}. {accept}"
            )
        return f"Look at what changed besides the code: versions, driver, clocks, data. {accept}"
    if verdict.kind == "suspected":
        return "Measure a second time." if verdict.second_value is None else "Wait for the next night."
    if verdict.kind == "undecided":
        return "Wait for the next night, or measure again on a machine that does nothing else."
    return None


def alarm_of(verdict: NightVerdict) -> str:
    """One line that names workload, change, commits, stages and kernel families."""
    what = [f"{verdict.workload}: {verdict.metric} is {_change(verdict)}"]
    if verdict.commits is not None:
        what.append(f"since {verdict.commits.first_changed_at[:10]}, {verdict.commits.told}")
    for kind, title in (("stage", "stages"), ("family", "kernel families")):
        rows = [row for row in verdict.moved if row.part == kind]
        if rows:
            what.append(f"{title}: {', '.join(map(_moved, rows[:_NAMED]))}")
    if verdict.causes:
        what.append(f"also changed: {', '.join(cause.field for cause in verdict.causes[:_NAMED])}")
    return "; ".join(what)


def percent(ratio: float) -> str:
    """A ratio as a change: +3.1 %."""
    return f"{100 * (ratio - 1):+.1f} %"


def _moved(row: Moved) -> str:
    ends = f" ({percent(row.interval.low)} to {percent(row.interval.high)})" if row.interval else ""
    return f"{row.name} {percent(row.ratio)}{ends}"


def _change(verdict: NightVerdict) -> str:
    ratio, interval = verdict.ratio or 1.0, verdict.interval
    word = "slower" if ratio > 1 else "faster"
    if verdict.unit == "bytes":
        word = "more" if ratio > 1 else "less"
    ends = f" ({percent(interval.low)} to {percent(interval.high)})" if interval is not None else ""
    return f"{100 * abs(ratio - 1):.1f} % {word}{ends}"


def _nights(verdict: NightVerdict) -> str:
    count = verdict.window or 1
    return "tonight" if count == 1 else f"in the last {count} nights"


def _noise(verdict: NightVerdict) -> str:
    return f"Nights differ by {100 * (verdict.noise or 0):.2f} % (standard deviation)."


def _ok(verdict: NightVerdict) -> str:
    return (
        f"{percent(verdict.ratio or 1.0)} against {verdict.num_baseline_nights} good nights. {_noise(verdict)} "
        f"A step of {100 * (verdict.detectable or 0):.1f} % would have been suspicious in half of first nights."
    )


def _improvement(verdict: NightVerdict) -> str:
    return f"{verdict.metric} is {_change(verdict)} {_nights(verdict)}; this level is the baseline from now on."


def _suspected(verdict: NightVerdict) -> str:
    if verdict.second_value is None:
        return (
            f"{verdict.metric} is {_change(verdict)} {_nights(verdict)}. {_noise(verdict)} One measurement is no proof."
        )
    return (
        f"{verdict.metric} is {_change(verdict)} {_nights(verdict)}, twice; more nights must show it before an alarm."
    )


def _undecided(verdict: NightVerdict) -> str:
    told = f"{verdict.metric} is {_change(verdict)} {_nights(verdict)}"
    if verdict.disturbances:
        return f"{told}, but the machine was not in its usual state: {', '.join(verdict.disturbances)}."
    second = (verdict.second_value or 0) / (verdict.baseline or 1)
    return f"{told}, and the second measurement does not show it: {percent(second)} against the baseline."


def _regression(verdict: NightVerdict) -> str:
    if not verdict.is_new:
        return f"{verdict.metric} is still {_change(verdict)}, {_nights(verdict)}."
    return f"{verdict.metric} is {_change(verdict)} {_nights(verdict)}, and the second measurement shows it too."
