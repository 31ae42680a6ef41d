"""Whether a candidate does what the plain module does: outputs, dtypes, and what happens to the inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from perfladder.capturing.compare import Difference, Encoded, compare_values
from perfladder.capturing.nodes import leaves_of
from perfladder.capturing.types import type_name
from perfladder.tuning.dims import Path
from perfladder.tuning.measure import Arguments
from perfladder.tuning.quality import QualityGate, is_measured
from perfladder.tuning.tree import output_leaves

TOLERANCES: Final = {
    "float64": 1e-7,
    "float32": 1e-4,
    "float16": 1e-2,
    "bfloat16": 3e-2,
    "complex128": 1e-7,
    "complex64": 1e-4,
}
"""Largest accepted error by dtype, relative to the largest magnitude of the tensor; complex as each of the two parts.

A compiler adds in another order. Measured between eager and Inductor: 2e-7 to 3e-6 in float32 over UNets and encoders,
2e-3 in float16; a wrong result is off by its own size.
"""

_SEED: Final = 0
_SHOWN: Final = 3


@dataclass(frozen=True, eq=False)
class Case:
    """One call to check.

    Attributes:
        label: As in "sample 0" or "largest sizes".
        make: Makes its arguments, new ones each time.
    """

    label: str
    make: Callable[[], Arguments]


@dataclass(frozen=True, eq=False)
class Expected:
    """What the plain module does in one case; `opaque` are parts of the output that cannot be looked into.

    `is_overwritten` tells that its output is not what it was any more after the next case.
    """

    case: Case
    output: Encoded
    containers: dict[Path, tuple[str, ...]]
    opaque: dict[str, Any]
    inputs: Encoded
    changes_inputs: bool
    is_overwritten: bool = False


@dataclass(frozen=True)
class Correctness:
    """What was found.

    Attributes:
        num_cases: Cases that were run.
        max_abs_error: Of all outputs.
        max_rel_error: Relative to the largest magnitude of each tensor.
        quality: The worst value of the gate's metric, for a lossy candidate.
        reason: Why the candidate is wrong; None: it is not.
    """

    num_cases: int
    max_abs_error: float
    max_rel_error: float
    quality: float | None
    reason: str | None


def expectations(plain: Callable[..., Any], cases: Sequence[Case], device: torch.device) -> list[Expected]:
    """Run the plain module in all cases."""
    found: list[Expected] = []
    last: _Run | None = None
    for case in cases:
        args, kwargs = case.make()
        before = Encoded.of({"args": args, "kwargs": kwargs})
        ran = _run(plain, (args, kwargs), device)
        if last is not None and _overwrites(ran, last):
            found[-1] = replace(found[-1], is_overwritten=True)
        changes_inputs = bool(compare_values(before, ran.inputs))
        found.append(Expected(case, ran.encoded, ran.containers, ran.opaque, ran.inputs, changes_inputs))
        last = ran
    return found


def check(
    candidate: Callable[..., Any],
    expected: Sequence[Expected],
    device: torch.device,
    gate: QualityGate | None,
    tolerances: Mapping[str, float] = TOLERANCES,
) -> Correctness:
    """Run a candidate in all cases; the first one that is wrong ends it.

    Args:
        candidate: Takes the arguments of the plain module.
        expected: From `expectations`.
        device: Where it runs.
        gate: For a candidate that is lossy by design: a measure of likeness instead of tolerances.
        tolerances: By dtype, as `TOLERANCES`.
    """
    worst_abs, worst_rel, worst_quality = 0.0, 0.0, None
    last: _Run | None = None
    for number, one in enumerate(expected, 1):
        ran = _run(candidate, one.case.make(), device)
        output = ran.encoded
        differences = compare_values(one.output, output, names=("in the plain module", "in the candidate"))
        worst_abs = max([worst_abs, *(d.max_abs_error for d in differences.values())])
        worst_rel = max([worst_rel, *(d.max_rel_error for d in differences.values())])
        wrong, quality = _wrong_outputs(one.output, output, differences, gate, tolerances)
        if quality is not None:
            worst_quality = quality if worst_quality is None else min(worst_quality, quality)
        wrong = wrong or _held_otherwise(one.containers, ran.containers) or _moved(one.output, output)
        wrong = wrong or _not_comparable(one.opaque, ran.opaque) or _wrong_inputs(one, ran.inputs, gate, tolerances)
        if wrong is None and last is not None and not expected[number - 2].is_overwritten and _overwrites(ran, last):
            wrong = "it puts its output into the memory of the one before, which a caller may still hold"
        if wrong is not None:
            return Correctness(number, worst_abs, worst_rel, worst_quality, f"{one.case.label}: {wrong}")
        last = ran
    return Correctness(len(expected), worst_abs, worst_rel, worst_quality, None)


@dataclass(frozen=True, eq=False)
class _Run:
    """A call.

    Attributes:
        output: What it returned, which later calls may change.
        encoded: The same as it was then.
        containers: Classes of what holds the output's parts, by path.
        opaque: Parts that cannot be looked into.
        inputs: Its arguments afterwards.
    """

    output: Any
    encoded: Encoded
    containers: dict[Path, tuple[str, ...]]
    opaque: dict[str, Any]
    inputs: Encoded


def _run(call: Callable[..., Any], arguments: Arguments, device: torch.device) -> _Run:
    """A call with a fixed seed."""
    args, kwargs = arguments
    with seeded(device), torch.no_grad():
        output = call(*args, **kwargs)
    containers = {leaf.path: leaf.containers for leaf in output_leaves(output)}
    encoded, opaque = _encoded(output)
    return _Run(output, encoded, containers, opaque, Encoded.of({"args": args, "kwargs": kwargs}))


def _encoded(output: Any) -> tuple[Encoded, dict[str, Any]]:
    """An output as it is now, and its parts that cannot be looked into by path."""
    encoded = Encoded.of({"output": output})
    if not _opaque_paths(encoded):
        return encoded, {}
    # A class of the user's that tuning was told of, and a capture was not, is compared by its parts.
    leaves = output_leaves(output)
    encoded = Encoded.of({leaf.access_path: leaf.value for leaf in leaves})
    unread = _opaque_paths(encoded)
    return encoded, {leaf.access_path: leaf.value for leaf in leaves if leaf.access_path in unread}


def _overwrites(ran: _Run, last: _Run) -> bool:
    """Whether a call changed the output of the one before, which is still held."""
    before, after = (_memory_in(one.output) for one in (last, ran))
    return not before.isdisjoint(after) and bool(compare_values(last.encoded, _encoded(last.output)[0]))


def _memory_in(output: Any) -> set[tuple[torch.device, int]]:
    """Where the memory of its tensors begins."""
    return {
        (leaf.value.device, leaf.value.untyped_storage().data_ptr())
        for leaf in output_leaves(output)
        if leaf.kind == "tensor" and leaf.value.layout == torch.strided and leaf.value.numel()
    }


def _opaque_paths(values: Encoded) -> set[str]:
    """Names of values with a part that is held by reference only."""
    return {
        name
        for name, node in values.nodes.items()
        if any(leaf.kind == "unsupported" for leaf in leaves_of({name: node}).values())
    }


@contextmanager
def seeded(device: torch.device) -> Iterator[None]:
    """Random numbers from a fixed seed inside the block; those outside go on as if nothing was drawn."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(_SEED)
        yield


def _wrong_outputs(
    expected: Encoded,
    found: Encoded,
    differences: dict[str, Difference],
    gate: QualityGate | None,
    tolerances: Mapping[str, float],
) -> tuple[str | None, float | None]:
    beyond = {
        path: difference
        for path, difference in differences.items()
        if not is_accepted(expected, path, difference, tolerances)
    }
    if gate is None or not beyond:
        return told(beyond), None
    # A measure of likeness is of numbers: another form, and numbers that are none, are wrong in any case.
    formal = {path: d for path, d in beyond.items() if not d.is_of_numbers or not is_measured(_dtype(expected, path))}
    if formal:
        return told(formal), None
    value = gate.value_of(expected, found)
    return gate.why_not(value), value


def is_accepted(expected: Encoded, path: str, difference: Difference, tolerances: Mapping[str, float]) -> bool:
    """Whether a difference at a path is within the tolerance of what is expected there."""
    tolerance = tolerances.get(_dtype(expected, path))
    return difference.is_of_numbers and tolerance is not None and difference.max_rel_error <= tolerance


def _dtype(values: Encoded, path: str) -> str:
    """Of the tensor or array at a path; empty if there is none."""
    leaf = values.leaves.get(path)
    node = leaf.items[0] if leaf is not None and leaf.kind == "array" and leaf.items else leaf
    return node.tensor.dtype if node is not None and node.tensor is not None else ""


def told(differences: Mapping[str, Difference]) -> str | None:
    """The first differences in words; None if there are none."""
    if not differences:
        return None
    shown = [f"{path}: {difference.reason}" for path, difference in list(differences.items())[:_SHOWN]]
    return "; ".join(shown) + (f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else "")


def _held_otherwise(expected: dict[Path, tuple[str, ...]], found: dict[Path, tuple[str, ...]]) -> str | None:
    """A list where there was a tuple, which code after the module may not take."""
    for path, containers in expected.items():
        if containers != found.get(path):
            name = ".".join(["output", *map(str, path)])
            there = " in ".join(reversed(found.get(path, ()))) or "nothing"
            return f"{name} lies in {there}, not in {' in '.join(reversed(containers)) or 'nothing'}"
    return None


def _not_comparable(expected: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """A part of which only the class is known: the very same object, or one that says it is equal, is right."""
    for path, value in expected.items():
        other = found.get(path)
        is_equal = other is value or (type(value).__eq__ is not object.__eq__ and _says_equal(value, other))
        if not is_equal and isinstance(value, torch.Tensor):
            form = "nested tensor" if value.is_nested else f"tensor of layout {value.layout}"
            return f"{path} is a {form}, which cannot be compared"
        if not is_equal:
            return (
                f"{path} is a {type_name(type(value))}, which cannot be compared. If it holds tensors, tell which: "
                "pl.register_input_type"
            )
    return None


def _says_equal(left: Any, right: Any) -> bool:
    try:
        return (left == right) is True
    except Exception:  # whatever a class of the user's raises, it does not say so
        return False


def _moved(expected: Encoded, found: Encoded) -> str | None:
    after = found.leaves
    for path, leaf in expected.leaves.items():
        there = after.get(path)
        if leaf.tensor is not None and there is not None and there.tensor is not None:
            devices = [node.tensor.device for node in (leaf, there) if node.tensor is not None]
            if devices[0] != devices[1]:
                return f"{path} is on {devices[1]}, not on {devices[0]}"
    return None


def _wrong_inputs(
    expected: Expected, inputs: Encoded, gate: QualityGate | None, tolerances: Mapping[str, float]
) -> str | None:
    differences = compare_values(expected.inputs, inputs)
    wrong = {p: d for p, d in differences.items() if not is_accepted(expected.inputs, p, d, tolerances)}
    if not wrong or (gate is not None and expected.changes_inputs):
        return None
    path = next(iter(wrong))
    if not expected.changes_inputs:
        return f"it changes its input {path}, which the plain module leaves as it is"
    return f"it leaves its input {path} otherwise than the plain module does ({wrong[path].reason})"
