"""Parts of all kernel time under names of some sort: operators, modules, blocks."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from perfladder.models import Model
from perfladder.trace.kernels import KernelSummary
from perfladder.trace.repeats import add_repeats


class Share(Model):
    """A part of all kernel time."""

    name: str
    total_us: float
    share: float
    count: int
    repeat_us: list[float] = Field(default=[], description="Its time in each profiled replay, as measured.")
    num_modules: int | None = Field(
        default=None, description="How many modules the name stands for, where repeated ones are taken together."
    )


def sum_shares(
    rows: Sequence[KernelSummary], names: Sequence[str], modules: Sequence[str] | None = None
) -> list[Share]:
    """Sum rows under names, the largest total first.

    Args:
        rows: The rows.
        names: Of each row.
        modules: Of each row, the module that it counts as one of; a name of a single one is that module's.
    """
    by_name: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        by_name.setdefault(name, []).append(index)
    shares = []
    for name, places in by_name.items():
        found = [rows[index] for index in places]
        counted = {modules[index] for index in places} if modules is not None else set()
        shares.append(
            Share(
                name=next(iter(counted)) if len(counted) == 1 else name,
                total_us=sum(row.total_us for row in found),
                share=sum(row.share for row in found),
                count=sum(row.count for row in found),
                repeat_us=add_repeats(found),
                num_modules=None if modules is None else len(counted),
            )
        )
    return sorted(shares, key=lambda share: -share.total_us)
