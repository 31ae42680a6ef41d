"""Random numbers in place of captured ones, of the same form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from perfladder.capturing.encode import scramble
from perfladder.capturing.nodes import Node, TensorNode
from perfladder.capturing.store import Manifest

if TYPE_CHECKING:
    import torch


def random_blocks(manifest: Manifest, blocks: list[torch.Tensor]) -> list[torch.Tensor]:
    """The blocks of a capture, with those that its inputs and outputs point to filled with random numbers.

    Floating-point numbers are normal ones; integers stay within the range that they had, since they may be indices.
    State and generators stay as they are.
    """
    import torch

    made = list(blocks)
    kept = {_block(manifest, tensor) for root in _state_roots(manifest) for tensor in _tensors(root)}
    done = set(kept)
    for call in manifest.calls:
        for node in (*call.inputs.values(), call.output):
            for tensor in _tensors(node):
                number = _block(manifest, tensor)
                if number not in done:
                    done.add(number)
                    made[number] = blocks[number].clone()
                    scramble(made[number], getattr(torch, tensor.dtype))
    return made


def _state_roots(manifest: Manifest) -> Iterator[Node]:
    yield from manifest.owner_state.values()
    for call in manifest.calls:
        yield from (*call.owner_state.values(), *call.rng.values())
        yield from (node for node in call.inputs.values() if node.kind == "generator")


def _tensors(node: Node) -> Iterator[TensorNode]:
    if node.kind == "generator":
        return
    if node.tensor is not None:
        yield node.tensor
    for item in node.items or []:
        yield from _tensors(item)


def _block(manifest: Manifest, tensor: TensorNode) -> int:
    return tensor.storage if manifest.storages is None else manifest.storages[tensor.storage]
