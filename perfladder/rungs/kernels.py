"""Rung 4, kernel attribution: which kernels, from which operator and module? Cost: one profiled replay."""

from __future__ import annotations

from perfladder.rungs.base import RungContext, RungResult


class KernelsResult(RungResult):
    """Draft."""

    rung: str = "kernels"


def run(context: RungContext) -> KernelsResult:
    """Draft."""
    return KernelsResult(status="not_applicable", reason="draft")
