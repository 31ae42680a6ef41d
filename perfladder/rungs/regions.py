"""Rung 2, region attribution: how much time is in which module or method, and how much outside any? Cost: one profiled window."""

from __future__ import annotations

from perfladder.rungs.base import RungContext, RungResult


class RegionsResult(RungResult):
    """Draft."""

    rung: str = "regions"


def run(context: RungContext) -> RegionsResult:
    """Draft."""
    return RegionsResult(status="not_applicable", reason="draft")
