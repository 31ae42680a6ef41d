"""Whether the output of a whole workload is what it was: numbers within tolerances or a gate, all else exactly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from perfladder.capturing.compare import Difference, Encoded, compare_values
from perfladder.capturing.types import capture_types
from perfladder.tuning.correctness import TOLERANCES, told
from perfladder.tuning.quality import dtype_name, is_measured

if TYPE_CHECKING:
    import torch

    from perfladder.tuning.quality import QualityGate

_PIXELS: Final = "pixels of a picture"
_PICTURE_MODES: Final = ("L", "RGB", "RGBA")
_LEVELS: Final = 1.0
"""Of 255: where a number lies between two levels, an error that is within tolerance rounds it to the other one."""


@dataclass(frozen=True)
class OutputDifference:
    """How an output differs from the expected one.

    Attributes:
        max_abs_error: Over all numbers; levels, for pictures.
        max_rel_error: Of the largest magnitude of each tensor, or of 255 levels.
        quality: Of the gate's metric; None: there is no gate, or nothing differs that it could measure.
        reason: Why it is wrong; None: it is right.
    """

    max_abs_error: float
    max_rel_error: float
    quality: float | None
    reason: str | None


def encode_output(output: Any) -> Encoded:
    """An output as it is now, with pictures of Pillow as arrays."""
    types = {
        name: replace(known, to_state=_picture_state) if _is_picture(known.kind) else known
        for name, known in capture_types().items()
    }
    return Encoded.of({"output": output}, types)


def _is_picture(kind: type) -> bool:
    return any((base.__module__, base.__name__) == ("PIL.Image", "Image") for base in kind.__mro__)


def _picture_state(picture: Any) -> dict[str, Any]:
    name = _PIXELS if picture.mode in _PICTURE_MODES else "pixels"
    return {"mode": picture.mode, name: np.array(picture)}


def not_compared(output: Encoded) -> list[str]:
    """Paths of parts that no comparison sees; an output of nothing is right whatever was computed, and told too."""
    leaves = output.leaves
    if all(leaf.kind == "plain" and leaf.value is None for leaf in leaves.values()):
        return ["output, which holds nothing"]
    return [path for path, leaf in leaves.items() if leaf.kind == "unsupported"]


def compare_output(
    expected: Encoded, found: Encoded, gate: QualityGate | None, *, computed_in: Iterable[str] = ()
) -> OutputDifference:
    """Compare two outputs of one workload.

    Args:
        expected: Of the plain modules.
        found: Of those that were tuned.
        gate: Least likeness of the numbers, in place of their tolerances; None: those beyond their tolerance are wrong.
        computed_in: Dtypes that the tuned modules compute in. The tolerance is the widest of these and of the number's
            own: a picture of a pipeline in float16 is no more exact for being handed over in float32.
    """
    least = max((TOLERANCES.get(dtype, 0.0) for dtype in computed_in), default=0.0)
    differences = compare_values(expected, found, names=("in the plain output", "in the tuned one"))
    formal: dict[str, Difference] = {}
    beyond: dict[str, Difference] = {}
    worst_abs, worst_rel = 0.0, 0.0
    for path, difference in differences.items():
        sides = _numbers(expected, path), _numbers(found, path)
        if not _is_measured(*sides) or "NaN" in difference.reason:
            formal[path] = difference
            continue
        difference, is_accepted = _judged(path, difference, *sides, least)  # type: ignore[arg-type]  # they are measured
        worst_abs, worst_rel = max(worst_abs, difference.max_abs_error), max(worst_rel, difference.max_rel_error)
        if not is_accepted:
            beyond[path] = difference
    reason, quality = told(formal), None
    if reason is None and worst_abs > 0 and gate is not None:
        quality = gate.value_of(expected, found)
        reason = gate.why_not(quality)
    elif reason is None:
        reason = told(beyond)
    return OutputDifference(worst_abs, worst_rel, quality, reason)


def _numbers(output: Encoded, path: str) -> torch.Tensor | None:
    leaf = output.leaves.get(path)
    return output.tensor(leaf) if leaf is not None and leaf.kind in ("tensor", "array") else None


def _is_measured(expected: torch.Tensor | None, found: torch.Tensor | None) -> bool:
    """Whether both are numbers of one form in which an error has a size."""
    if expected is None or found is None or (expected.dtype, expected.shape) != (found.dtype, found.shape):
        return False
    return is_measured(dtype_name(expected))


def _judged(
    path: str, difference: Difference, expected: torch.Tensor, found: torch.Tensor, least: float
) -> tuple[Difference, bool]:
    """The difference with its errors, and whether it is within the tolerance, which is `least` or more."""
    dtype = dtype_name(expected)
    if dtype != "uint8":
        return difference, difference.max_rel_error <= max(TOLERANCES.get(dtype, 0.0), least)
    levels = float((expected.int() - found.int()).abs().max())
    reason = f"largest error {levels:g} of 255 levels"
    is_picture = path.endswith(f".{_PIXELS}")
    return Difference(reason, levels, levels / 255), is_picture and levels <= max(_LEVELS, 255 * least)
