"""Compare encoded values leaf by leaf, to the bit first, and by error only where bits differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perfladder.capturing.decode import Decoder
from perfladder.capturing.encode import Encoder
from perfladder.capturing.nodes import Node, leaves_of
from perfladder.capturing.types import CaptureType

if TYPE_CHECKING:
    import torch

_TOLERANCES = {"float64": 1e-7, "float32": 1e-5, "float16": 1e-3, "bfloat16": 1.6e-2}
"""Largest accepted error relative to the largest magnitude; torch.testing's relative tolerances by dtype."""

_TENSOR_KINDS = ("tensor", "array", "generator")


@dataclass(frozen=True)
class Encoded:
    """Nodes with the memory that they point into: see `Encoder`."""

    nodes: Mapping[str, Node]
    blocks: Sequence[torch.Tensor]
    storages: Sequence[int]

    @classmethod
    def of(
        cls, values: Mapping[str, Any], types: Mapping[str, CaptureType] | None = None, *, identity: bool = False
    ) -> Encoded:
        """Encode values as they are now; `types` and `identity` as in `Encoder`."""
        encoder = Encoder(types)
        return cls(encoder.encode(values, identity=identity), encoder.blocks, encoder.storages)

    @property
    def leaves(self) -> dict[str, Node]:
        """Every leaf of every root, by its path."""
        return leaves_of(self.nodes)

    def tensor(self, leaf: Node) -> torch.Tensor:
        """The numbers of a tensor, an array, or a generator's state, on the CPU."""
        import torch

        node = leaf.items[0] if leaf.items else leaf
        decoder = Decoder(self.blocks, self.storages, device=torch.device("cpu"), types={})
        value: torch.Tensor = decoder.decode({"value": node})["value"]
        return value.detach().cpu()


@dataclass(frozen=True)
class Difference:
    """How two leaves differ; the errors are over the values that are finite on both sides.

    `is_of_numbers` tells that form and dtype agree, and that no value is NaN or infinite on one side only.
    """

    reason: str
    max_abs_error: float = 0.0
    max_rel_error: float = 0.0
    is_within_tolerance: bool = False
    is_of_numbers: bool = False


def compare_values(
    before: Encoded, after: Encoded, *, names: tuple[str, str] = ("before", "after")
) -> dict[str, Difference]:
    """Differences by path; an empty answer means that both are the same to the bit.

    Args:
        before: What is expected.
        after: What was found.
        names: What to call the two sides in a reason.
    """
    expected, found = before.leaves, after.leaves
    differences = {}
    for path in sorted(set(expected) | set(found)):
        if path not in expected or path not in found:
            differences[path] = Difference(f"is there only {names[0] if path in expected else names[1]}")
            continue
        difference = _compare_leaf(expected[path], found[path], before, after)
        if difference is not None:
            differences[path] = difference
    return differences


def _compare_leaf(expected: Node, found: Node, before: Encoded, after: Encoded) -> Difference | None:
    if (expected.kind, expected.type_name) != (found.kind, found.type_name):
        kinds = [node.type_name or node.kind for node in (expected, found)]
        return Difference(f"a {kinds[0]} became a {kinds[1]}")
    if expected.value != found.value or type(expected.value) is not type(found.value):
        return Difference(f"{_shown(expected)} became {_shown(found)}")
    if expected.kind not in _TENSOR_KINDS:
        return None
    return compare_tensors(before.tensor(expected), after.tensor(found))


def compare_tensors(expected: torch.Tensor, found: torch.Tensor) -> Difference | None:
    """None when shape, dtype and every bit agree."""
    import torch

    if expected.dtype != found.dtype or expected.shape != found.shape:
        return Difference(f"{_describe(expected)} became {_describe(found)}")
    if _same_bits(expected, found):
        return None
    if not (expected.is_floating_point() or expected.is_complex()):
        reason = f"{int((expected != found).sum())} of {expected.numel()} values differ"
        return Difference(reason, is_of_numbers=True)
    left, right = (value.to(torch.complex128 if value.is_complex() else torch.float64) for value in (expected, found))
    is_finite = left.isfinite() & right.isfinite()
    is_same = (left == right) | (left.isnan() & right.isnan())
    num_odd = int((~is_finite & ~is_same).sum())
    error = torch.where(is_finite, (left - right).abs(), 0.0)
    scale = float(torch.where(left.isfinite(), left.abs(), 0.0).max()) or 1.0
    absolute = float(error.max())
    relative = absolute / scale
    if num_odd:
        reason = f"{num_odd} of {left.numel()} values are NaN or infinite on one side only"
        return Difference(reason, absolute, relative)
    tolerance = _TOLERANCES.get(str(expected.dtype).removeprefix("torch."), 0.0)
    reason = f"largest error {absolute:.3g} ({relative:.3g} of the largest value)"
    is_within = relative <= tolerance
    return Difference(reason, absolute, relative, is_within_tolerance=is_within, is_of_numbers=True)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    import torch

    if left.numel() == 0:
        return True
    # Copied, since a single element may have any stride, and then cannot be viewed as bytes.
    left, right = (torch.empty(v.numel(), dtype=v.dtype).copy_(v.reshape(-1)).view(torch.uint8) for v in (left, right))
    return torch.equal(left, right)


def _shown(leaf: Node) -> str:
    """A plain value, but no text: that may be a user's, and reasons go into reports."""
    return f"a text of {len(leaf.value)} characters" if isinstance(leaf.value, str) else repr(leaf.value)


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
