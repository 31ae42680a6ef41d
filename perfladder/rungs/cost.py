"""What a rung will cost, as far as the rungs before it tell, and whether the workload's budget allows it."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import Field

from perfladder.models import Model
from perfladder.workload import Budget

Ask = Callable[[str], bool]
"""Asks the user at the terminal; True is yes."""

_UNITS = (("time_s", "s"), ("disk_bytes", "MiB on disk"), ("memory_bytes", "MiB of memory"))


class CostEstimate(Model):
    """What a rung will cost; what is not known is None, and never taken for 0."""

    time_s: float | None = None
    disk_bytes: int | None = None
    memory_bytes: int | None = Field(default=None, description="Of the device, or on a CPU of the process.")
    basis: str = Field(description="What the figures rest on.")

    def __str__(self) -> str:
        known = [_amount(name, getattr(self, name)) for name, _ in _UNITS if getattr(self, name) is not None]
        return f"about {', '.join(known)} ({self.basis})" if known else f"cost not known ({self.basis})"

    def over(self, budget: Budget | None) -> str | None:
        """What of it the budget does not allow, in words; None if it allows all that is known."""
        for name, _ in _UNITS:
            cost, limit = getattr(self, name), None if budget is None else getattr(budget, f"max_rung_{name}")
            if cost is not None and limit is not None and cost > limit:
                return f"about {_amount(name, cost)}, and budget.max_rung_{name} is {limit:g}"
        return None


def _amount(name: str, value: float) -> str:
    unit = dict(_UNITS)[name]
    return f"{value:.3g} {unit}" if name == "time_s" else f"{value / 2**20:.3g} {unit}"


def why_skipped(
    estimate: CostEstimate, budget: Budget | None, *, name: str, question: str, ask: Ask | None, asks_always: bool
) -> str | None:
    """Why a rung is not climbed for its cost; None if it is.

    No question is asked unless the user wants one before every rung, or the rung is over budget. Then a user at a
    terminal decides; without one, a rung over budget is skipped.

    Args:
        estimate: Its cost.
        budget: The workload's.
        name: The rung.
        question: What it asks.
        ask: Asks the user; None without a terminal.
        asks_always: Whether to ask before this rung anyway.
    """
    over = estimate.over(budget)
    if over is None and not asks_always:
        return None
    if ask is None:
        return f"Over budget: {over}. Raise it in the workload, or leave it out." if over else None
    told = f"It is over budget: {over}." if over else f"Cost: {estimate}."
    if ask(f"Climb {name}? {question} {told}"):
        return None
    return f"Declined at the terminal{f'; over budget: {over}' if over else ''}."
