"""The JSON form of captured values: nodes that point into raw storages.

A tensor is (storage, offset, size, stride), so that any dtype, expanded and channels-last layouts, and tensors that
share memory come back as they were. What cannot be stored becomes an `unsupported` node that names its path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import JsonValue

from perfladder.errors import CaptureError
from perfladder.models import Model

MAX_DEPTH = 32
PLAIN = (bool, int, float, str, type(None))


class Node(Model):
    """One value. `kind` says which of the other fields are filled."""

    kind: Literal[
        "plain",
        "float",
        "complex",
        "bytes",
        "tensor",
        "list",
        "tuple",
        "set",
        "frozenset",
        "slice",
        "range",
        "ellipsis",
        "dict",
        "record",
        "object",
        "class",
        "generator",
        "torch",
        "array",
        "same",
        "unsupported",
    ]
    value: JsonValue = None
    items: list[Node] | None = None
    keys: list[JsonValue] | None = None
    type_name: str | None = None
    tensor: TensorNode | None = None
    reason: str | None = None
    label: int | None = None
    """Number by which a later `same` node refers to this very object."""


class TensorNode(Model):
    """Where a tensor lies in its storage; offsets, sizes and strides in elements."""

    storage: int
    offset: int
    size: list[int]
    stride: list[int]
    dtype: str
    device: str
    requires_grad: bool = False


def leaves(node: Node, path: str = "") -> dict[str, Node]:
    """Every leaf below a node, by its path."""
    if node.items is None or node.kind in ("generator", "array"):
        return {path: node}
    found: dict[str, Node] = {}
    for key, item in zip(node.keys or range(len(node.items)), node.items, strict=True):
        for name, leaf in leaves(item, f"{path}.{key}" if path else str(key)).items():
            # Keys such as 1 and "1" read the same in a path.
            while name in found:
                name += "'"
            found[name] = leaf
    return found


def leaves_of(nodes: Mapping[str, Node]) -> dict[str, Node]:
    """Every leaf of every root, by its path."""
    return {path: leaf for root, node in nodes.items() for path, leaf in leaves(node, root).items()}


def forms_of(leaves: Mapping[str, Node]) -> dict[str, str]:
    """What each leaf is; a text is told by its length, since results go into reports and stores."""
    forms = {}
    for path, leaf in leaves.items():
        if leaf.tensor is not None:
            forms[path] = f"{leaf.tensor.dtype} {leaf.tensor.size} on {leaf.tensor.device}"
        elif isinstance(leaf.value, str) and leaf.kind == "plain":
            forms[path] = f"text of {len(leaf.value)} characters"
        elif leaf.kind == "plain":
            forms[path] = repr(leaf.value)
    return forms


def labels_of(node: Node) -> set[int]:
    """Labels of the objects that a node holds or refers to."""
    found = set() if node.label is None else {node.label}
    if node.kind == "same":
        found.add(int(str(node.value)))
    return found.union(*map(labels_of, node.items or []))


def is_linked(node: Node) -> bool:
    """Whether a node refers to an object that another one holds, or is referred to."""
    return bool(labels_of(node))


def expanded(node: Node, holders: Mapping[int, Node], depth: int = 0) -> Node:
    """The node with what is held elsewhere, by label, put in the place of each reference to it.

    Raises:
        CaptureError: An object holds itself.
    """
    if depth > 4 * MAX_DEPTH:
        raise CaptureError("The manifest is damaged: an object in it holds itself.")
    if node.kind == "same":
        held = holders.get(int(str(node.value)))
        return node if held is None else expanded(held, holders, depth + 1)
    items = None if node.items is None else [expanded(item, holders, depth + 1) for item in node.items]
    return node.model_copy(update={"items": items, "label": None})


def held_again(node: Node, lost: dict[int, Node]) -> Node:
    """The node with what is held nowhere any more in the place of the first reference to it.

    Args:
        node: May refer to what is lost.
        lost: Objects without a holder, by label; those that have one again are taken out.
    """
    if node.label is not None:
        lost.pop(node.label, None)
    if node.kind == "same":
        held = lost.pop(int(str(node.value)), None)
        return node if held is None else held_again(held, lost)
    if node.items is None or not lost:
        return node
    return node.model_copy(update={"items": [held_again(item, lost) for item in node.items]})


def holders_of(nodes: Iterable[Node]) -> dict[int, Node]:
    """The node that holds each labelled object."""
    found: dict[int, Node] = {}
    for node in nodes:
        if node.label is not None:
            found[node.label] = node
        found.update(holders_of(node.items or []))
    return found


def reach(size: list[int], stride: list[int]) -> int:
    """Elements from a tensor's first to its last one."""
    return sum((length - 1) * step for length, step in zip(size, stride, strict=True))


def torch_constants() -> tuple[type, ...]:
    """Types of torch whose values have a name and no memory."""
    import torch

    return torch.dtype, torch.device, torch.layout, torch.memory_format
