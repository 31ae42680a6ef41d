"""What is not the same on the two sides: fields that are compared, fields that forbid it, and what only disturbs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from perfladder.comparing.model import Difference
from perfladder.environment import Snapshot
from perfladder.errors import InputError
from perfladder.models import ResultWarning
from perfladder.workload import Workload

if TYPE_CHECKING:
    from perfladder.comparing.sides import MeasuredSide

_SHOWN = 6
_CLOCK_CHANGE = 0.05
OF_THE_MACHINE = ("MACHINE_BUSY", "DEVICE_SHARED", "DEVICE_MEMORY_LOW", "DEVICE_THROTTLED")
"""Codes of warnings on the state of the machine, which each launch may give."""

_ABSENT = object()


def list_differences(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> list[Difference]:
    """Fields that differ, dotted; a list is one field unless it holds mappings."""
    one, other = dict(_leaves(baseline)), dict(_leaves(candidate))
    names = [name for name in {**one, **other} if one.get(name, _ABSENT) != other.get(name, _ABSENT)]
    # Where one side has a mapping and the other none, those of its fields tell it that hold something.
    inner = {name for name in names if any(name[:end] in names for end, sign in enumerate(name) if sign == ".")}
    heads = {name[:end] for name in inner for end, sign in enumerate(name) if sign == "."}
    empty = {name for name in inner if one.get(name) is None and other.get(name) is None}
    return [
        Difference(field=name, baseline=one.get(name), candidate=other.get(name))
        for name in names
        if name not in heads | empty
    ]


def require_same_work(baseline: Workload, candidate: Workload) -> None:
    """Refuse a comparison of different work.

    Raises:
        InputError: Names the fields that differ.
    """
    fields = baseline.fingerprints.work.fields, candidate.fingerprints.work.fields
    differences = list_differences(*fields)
    if not differences:
        return
    named = "".join(
        f"\n  {d.field}: {_short(d.baseline)} in the baseline, {_short(d.candidate)} in the candidate"
        for d in differences[:_SHOWN]
    )
    more = f"\n  and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    raise InputError(
        f"The two sides do not do the same work, so the ratio of their times says nothing:{named}{more}\n"
        "Make these fields equal. What may differ are configuration (dtype, attention_backend, compile, device, "
        "nproc), the commit, and the environment."
    )


def comparison_warnings(
    baseline: MeasuredSide, candidate: MeasuredSide, protocol: list[Difference]
) -> list[ResultWarning]:
    """What weakens a comparison of these sides."""
    states = _sentence("The machine was not in the same state", _states(baseline, candidate))
    outputs = _told("The outputs are not alike, so the work may not be", _outputs(baseline, candidate))
    found = [
        _warning(code="PROTOCOL_DIFFERS", message=_told("The sides were measured in different ways", protocol)),
        _warning(code="MACHINE_STATE_DIFFERS", message=states),
        _warning(code="OUTPUT_DIFFERS", message=outputs),
        _warning(code="UNCOMMITTED_CHANGES", message=_uncommitted(baseline, candidate)),
        _warning(code="RUN_INCOMPLETE", message=_incomplete(baseline, candidate)),
    ]
    own = [
        warning.model_copy(update={"message": f"{where}: {warning.message}"})
        for where, side in (("baseline", baseline), ("candidate", candidate))
        for warning in _once(side.stages.warnings)
    ]
    return [*(warning for warning in found if warning is not None), *own]


def _once(warnings: list[ResultWarning]) -> list[ResultWarning]:
    """What is said of the machine in each launch is told once."""
    told = {(w.code, "" if w.code in OF_THE_MACHINE else w.message): w for w in reversed(warnings)}
    return [warning for warning in warnings if warning in told.values()]


def _warning(*, code: str, message: str | None) -> ResultWarning | None:
    return None if message is None else ResultWarning(code=code, message=message)


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        items = enumerate(value)
    else:
        yield prefix, value
        return
    for key, inner in items:
        yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))


def _told(what: str, differences: list[Difference]) -> str | None:
    return _sentence(what, [f"{d.field} {_short(d.baseline)} and {_short(d.candidate)}" for d in differences])


def _sentence(what: str, parts: list[str]) -> str | None:
    if not parts:
        return None
    more = f", and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return f"{what}: {'; '.join(parts[:_SHOWN])}{more}."


def _states(baseline: MeasuredSide, candidate: MeasuredSide) -> list[str]:
    """Load, threads and clocks that differ so much that times may follow them."""
    before = baseline.stages.snapshot_before, candidate.stages.snapshot_before
    after = baseline.stages.snapshot_after, candidate.stages.snapshot_after
    found = []
    if before[0] is not None and before[1] is not None:
        if before[0].is_busy != before[1].is_busy:
            found.append(f"load {before[0].load_average_1m:.1f} and {before[1].load_average_1m:.1f}")
        if before[0].torch_threads != before[1].torch_threads:
            found.append(f"torch threads {before[0].torch_threads} and {before[1].torch_threads}")
    if after[0] is not None and after[1] is not None:
        found += _clocks(after[0], after[1])
    return found


def _clocks(one: Snapshot, other: Snapshot) -> list[str]:
    pairs: list[tuple[str, float | None, float | None]] = [("CPU clock MHz", one.cpu_mhz, other.cpu_mhz)]
    found = []
    for first, second in zip(one.devices, other.devices, strict=False):
        pairs.append((f"device {first.index} clock MHz", first.sm_clock_mhz, second.sm_clock_mhz))
        if (first.throttle_reasons or []) != (second.throttle_reasons or []):
            reasons = [", ".join(state.throttle_reasons or []) or "nothing" for state in (first, second)]
            found.append(f"device {first.index} held down by {reasons[0]} and {reasons[1]}")
    for name, clock, other_clock in pairs:
        if clock and other_clock and abs(clock / other_clock - 1) > _CLOCK_CHANGE:
            found.append(f"{name} {clock:.0f} and {other_clock:.0f}")
    return found


def _outputs(baseline: MeasuredSide, candidate: MeasuredSide) -> list[Difference]:
    seen = [side.stages.observed for side in (baseline, candidate)]
    if seen[0] is None or seen[1] is None:
        return []
    fields = [{"type": one.output_type, "shape": one.output_shapes, "items": one.num_items} for one in seen if one]
    return list_differences(fields[0], fields[1])


def _uncommitted(baseline: MeasuredSide, candidate: MeasuredSide) -> str | None:
    dirty = [name for name, side in (("baseline", baseline), ("candidate", candidate)) if side.info.git.dirty]
    if not dirty:
        return None
    return f"The {' and the '.join(dirty)} had uncommitted changes, so the commit does not say what was measured."


def _incomplete(baseline: MeasuredSide, candidate: MeasuredSide) -> str | None:
    ended = [record for side in (baseline, candidate) for record in side.records if record.status != "done"]
    return _sentence("Not every run was finished", [f"{record.run_id} is {record.status}" for record in ended])


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
