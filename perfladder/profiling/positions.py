"""Rows of one replayed call, with those of repeated modules taken together: position in the block instead of layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Final, TypeVar

from pydantic import Field

from perfladder.models import Model
from perfladder.peaks import Peaks
from perfladder.profiling.kernel_evidence import KernelEvidence
from perfladder.profiling.shares import Share, sum_shares
from perfladder.trace.kernels import KernelSummary
from perfladder.trace.positions import Costs, find_positions, is_repeated
from perfladder.trace.ranking import RankedGroup, reason_of
from perfladder.trace.repeats import add_repeats
from perfladder.trace.roofline import RooflineRow, hold_against_peaks
from perfladder.trace.work import OperatorCall

_BLOCK_DEPTH: Final = 2
_OUTSIDE: Final = "(outside the stage)"
PlacedRow = KernelSummary | RankedGroup | RooflineRow
R = TypeVar("R", bound=PlacedRow)


class PositionRows(Model):
    """Rows over repeated modules: `net.blocks.*.attn` is `attn` of every block, and `num_modules` says of how many."""

    kernels: list[KernelSummary] = Field(description="Most expensive first.")
    by_module: list[Share]
    by_block: list[Share]
    ranking: list[RankedGroup] = Field(description="The largest possible win first.")
    roofline: list[RooflineRow] = Field(description="The largest time first.")


def module_of(region_id: str | None) -> str:
    """Return the module of a region."""
    return region_id.partition(":")[2] if region_id else _OUTSIDE


def block_of(path: str, stage: str) -> str:
    """Return the module two levels below the stage that `path` lies in, such as `unet.up_blocks.1`."""
    return _first_parts(path, stage, _BLOCK_DEPTH)


def take_positions(
    kernels: Sequence[KernelSummary],
    evidence: KernelEvidence,
    *,
    stage: str,
    calls: Iterable[OperatorCall],
    kinds: Mapping[str, Hashable],
    peaks: Peaks | None,
    limit: int,
) -> PositionRows:
    """Take rows of repeated modules together.

    Args:
        kernels: The rows.
        evidence: The other rows of the same call.
        stage: Path of the stage.
        calls: Operator calls of the call, with their work.
        kinds: What makes modules the same.
        peaks: Of the device.
        limit: Kernels, ranked groups and roofline rows to return at most.
    """
    positions = find_positions(_costs(kernels, evidence, calls, kinds))
    modules = [module_of(row.region) for row in kernels]
    blocks = [_block_of_position(positions[path], stage) for path in modules]
    merged = [_merge_kernels(rows, region) for region, rows in _groups(kernels, positions, _kernel_key)]
    ranking = [_merge_ranked(rows, region) for region, rows in _groups(evidence.ranking, positions, _operator_key)]
    roofline = [_merge_work(rows, region, peaks) for region, rows in _groups(evidence.roofline, positions, _work_key)]
    return PositionRows(
        kernels=sorted(merged, key=lambda row: -row.total_us)[:limit],
        by_module=sum_shares(kernels, [positions[path] for path in modules], modules),
        by_block=sum_shares(kernels, blocks, [_cut(path, block) for path, block in zip(modules, blocks, strict=True)]),
        ranking=sorted(ranking, key=lambda row: (-row.possible_win_us, -row.total_us))[:limit],
        roofline=sorted(roofline, key=lambda row: -row.total_us)[:limit],
    )


def _costs(
    kernels: Sequence[KernelSummary],
    evidence: KernelEvidence,
    calls: Iterable[OperatorCall],
    kinds: Mapping[str, Hashable],
) -> Costs:
    others: list[PlacedRow] = [*evidence.ranking, *evidence.roofline]
    time_us = {module_of(_region(row)): 0.0 for row in others}
    for row in kernels:
        path = module_of(row.region)
        time_us[path] = time_us.get(path, 0.0) + row.total_us
    num_bytes: dict[str, float] = {}
    for call in calls:
        path = module_of(call.region)
        num_bytes[path] = num_bytes.get(path, 0.0) + call.num_bytes
    return Costs(time_us=time_us, num_bytes=num_bytes, kinds=kinds)


def _groups(
    rows: Sequence[R], positions: Mapping[str, str], key: Callable[[R], tuple[Hashable, ...]]
) -> list[tuple[str | None, list[R]]]:
    """Return the region id of each position that has rows, and these rows, the longest first; one by key."""
    found: dict[Hashable, list[R]] = {}
    for row in sorted(rows, key=lambda row: -row.total_us):
        region = _region(row)
        kind = None if region is None else region.partition(":")[0]
        found.setdefault((kind, positions[module_of(region)], *key(row)), []).append(row)
    groups = []
    for members in found.values():
        region = _region(members[0])
        if region is not None and len({_region(row) for row in members}) > 1:
            region = f"{region.partition(':')[0]}:{positions[module_of(region)]}"
        groups.append((region, members))
    return groups


def _region(row: PlacedRow) -> str | None:
    return row.region if isinstance(row, KernelSummary) else row.region_id


def _kernel_key(row: KernelSummary) -> tuple[Hashable, ...]:
    called = (row.operator, row.outer_operator, row.function, row.launch_site)
    return (row.kernel, row.category, *called, row.family, row.is_from_graph, row.confidence is None)


def _operator_key(row: RankedGroup) -> tuple[Hashable, ...]:
    return (row.operator,)


def _work_key(row: RooflineRow) -> tuple[Hashable, ...]:
    return (row.operator, row.precision)


def _merge_kernels(rows: Sequence[KernelSummary], region: str | None) -> KernelSummary:
    count, total_us = sum(row.count for row in rows), sum(row.total_us for row in rows)
    return rows[0].model_copy(
        update={
            "region": region,
            "count": count,
            "total_us": total_us,
            "mean_us": total_us / max(count, 1),
            "share": sum(row.share for row in rows),
            "possible_win_us": _sum_known(row.possible_win_us for row in rows),
            "confidence": min((row.confidence for row in rows if row.confidence is not None), default=None),
            "repeat_us": add_repeats(rows),
            "num_modules": _num_modules(rows),
        }
    )


def _merge_ranked(rows: Sequence[RankedGroup], region: str | None) -> RankedGroup:
    total_us, critical_us = sum(row.total_us for row in rows), sum(row.critical_us for row in rows)
    known = [(row.total_us, row.achieved_frac) for row in rows if row.achieved_frac is not None]
    known_us = sum(us for us, _ in known)
    achieved = sum(us * frac for us, frac in known) / known_us if known_us else None
    fraction = _sum_known(row.possible_win_frac for row in rows)
    of_run = _sum_known(row.run_win_frac for row in rows)
    return rows[0].model_copy(
        update={
            "region_id": region,
            "count": sum(row.count for row in rows),
            "total_us": total_us,
            "share": sum(row.share for row in rows),
            "critical_us": critical_us,
            "achieved_frac": achieved,
            "possible_win_us": sum(row.possible_win_us for row in rows),
            "possible_win_frac": None if fraction is None else min(fraction, 1.0),
            "run_win_frac": None if of_run is None else min(of_run, 1.0),
            "reason": reason_of(rows[0].operator, critical_us / max(total_us, 1e-9), achieved),
            "repeat_us": add_repeats(rows),
            "num_modules": _num_modules(rows),
        }
    )


def _merge_work(rows: Sequence[RooflineRow], region: str | None, peaks: Peaks | None) -> RooflineRow:
    """Rates are those of all work in all time, no means of rates."""
    first = rows[0]
    return hold_against_peaks(
        peaks,
        region_id=region,
        operator=first.operator,
        family=first.family,
        precision=first.precision,
        count=sum(row.count for row in rows),
        num_kernels=sum(row.num_kernels for row in rows),
        total_us=sum(row.total_us for row in rows),
        flops=sum(row.flops for row in rows),
        num_bytes=sum(row.num_bytes for row in rows),
        num_modules=_num_modules(rows),
    )


def _num_modules(rows: Iterable[PlacedRow]) -> int:
    return len({_region(row) for row in rows})


def _sum_known(values: Iterable[float | None]) -> float | None:
    """Return the sum; None if one of them is unknown."""
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) if len(known) == len(found) else None


def _block_of_position(position: str, stage: str) -> str:
    """Return the block that a position lies in: as of a path, or one level more where that is a repeated one.

    So `model.layers` goes on to `model.layers.*`, which is a block while the list of them is none. What is repeated
    inside of a repeated block is a part of it.
    """
    block, deeper = block_of(position, stage), _first_parts(position, stage, _BLOCK_DEPTH + 1)
    is_list = is_repeated(_last(deeper)) and not is_repeated(_last(block))
    return deeper if is_list else block


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _first_parts(path: str, stage: str, depth: int) -> str:
    if not path.startswith(f"{stage}."):
        return path
    return ".".join([stage, *path.removeprefix(f"{stage}.").split(".")[:depth]])


def _cut(path: str, position: str) -> str:
    """Return as many components of a path as a position has."""
    return ".".join(path.split(".")[: position.count(".") + 1])
