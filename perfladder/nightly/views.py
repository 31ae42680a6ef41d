"""Nights as Markdown: one workload's page, all workloads of a night, and the table of the history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from perfladder.markdown import templates
from perfladder.nightly.model import NightVerdict
from perfladder.nightly.outcome import NightlyOutcome
from perfladder.nightly.trend import Trend, TrendPoint
from perfladder.nightly.words import percent
from perfladder.stats import Interval

if TYPE_CHECKING:
    from jinja2 import Environment

_BLOCKS = "▁▂▃▄▅▆▇█"
_SHOWN = 30
_SPARK = 60


def render_night(verdict: NightVerdict, trend: Trend) -> str:
    """The page of one workload: tonight's verdict, what moved, and the trend."""
    return _templates().get_template("night.md.j2").render(v=verdict, t=trend, shown=_SHOWN)


def render_trend(trend: Trend) -> str:
    """The trend of one workload: its changes and last nights."""
    return _templates().get_template("trend.md.j2").render(t=trend, shown=_SHOWN)


def render_outcome(outcome: NightlyOutcome) -> str:
    """All workloads of a night, the alarms with what moved."""
    return _templates().get_template("outcome.md.j2").render(o=outcome)


def render_history(trends: Sequence[Trend]) -> str:
    """The nights of several workloads."""
    return "\n".join(render_trend(trend) for trend in trends) if trends else "There are no nights yet."


def sparkline(trend: Trend) -> str:
    """Comparable first measurements as bars from the lowest to the highest, the last night on the right."""
    values = [point.value for point in trend.points if point.is_comparable and not point.is_second][-_SPARK:]
    low, high = min(values), max(values)
    if high <= low:
        return _BLOCKS[0] * len(values)
    return "".join(_BLOCKS[round((value - low) / (high - low) * (len(_BLOCKS) - 1))] for value in values)


def _templates() -> Environment:
    return templates("perfladder.nightly", _amount, _range, _percent, _commit, _time, _remark, _spark, _value)


def _amount(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value / 2**20:.1f} MiB" if unit == "bytes" else f"{value:.4g} {unit}"


def _range(interval: Interval | None) -> str:
    return "-" if interval is None else f"{percent(interval.low)} to {percent(interval.high)}"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else percent(ratio)


def _commit(commit: str | None) -> str:
    return commit[:10] if commit else "-"


def _time(moment: str) -> str:
    return moment[:16].replace("T", " ")


def _remark(point: TrendPoint) -> str:
    """What else to know of a night."""
    remarks = {
        "second measurement": point.is_second,
        "uncommitted changes": point.is_dirty,
        "other work or hardware": not point.is_comparable,
        "machine disturbed": point.is_disturbed,
    }
    return ", ".join(remark for remark, holds in remarks.items() if holds)


def _spark(trend: Trend) -> str:
    return sparkline(trend)


def _value(value: object) -> str:
    return "none" if value is None else str(value)
