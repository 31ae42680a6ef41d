"""Nodes and storages become values again."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from perfladder.capturing.nodes import Node, TensorNode, leaves, reach, torch_constants
from perfladder.capturing.types import CaptureType, capture_types
from perfladder.errors import CaptureError

if TYPE_CHECKING:
    import torch

_DAMAGE = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Decoder:
    """Rebuilds values from nodes; every call makes new memory, so that a replay may change its inputs.

    Args:
        blocks: The raw memories, on the CPU.
        storages: For each storage the block that it begins as; by default one storage a block.
        device: Where tensors that were not on the CPU go; by default to where they were.
        types: Classes that may be rebuilt, by qualified name; by default all that are known now.
    """

    def __init__(
        self,
        blocks: Sequence[torch.Tensor],
        storages: Sequence[int] | None = None,
        *,
        device: torch.device | None = None,
        types: Mapping[str, CaptureType] | None = None,
    ) -> None:
        self._blocks = blocks
        self._storages = range(len(blocks)) if storages is None else storages
        self._device = device
        self._types = capture_types() if types is None else types
        self._live: dict[tuple[int, str], Any] = {}
        self._made: dict[int, Any] = {}

    def decode(self, nodes: Mapping[str, Node]) -> dict[str, Any]:
        """Rebuild named values together; memory and objects that were shared are shared again."""
        self._live, self._made = {}, {}
        return {name: self._value(node, name) for name, node in nodes.items()}

    def _value(self, node: Node, path: str) -> Any:
        try:
            value = self._rebuilt(node, path)
        except _DAMAGE as error:
            raise CaptureError(f"{path} is damaged: it cannot be rebuilt ({type(error).__name__}: {error}).") from error
        if node.label is not None:
            self._made[node.label] = value
        return value

    def _rebuilt(self, node: Node, path: str) -> Any:
        items = [self._value(item, f"{path}.{index}") for index, item in enumerate(node.items or [])]
        match node.kind:
            case "plain":
                return node.value
            case "float":
                return float(str(node.value))
            case "complex":
                return complex(str(node.value))
            case "bytes":
                return bytes.fromhex(str(node.value))
            case "ellipsis":
                return ...
            case "tensor":
                assert node.tensor is not None
                return self._tensor(node.tensor)
            case "array":
                array = items[0].numpy()
                return array[()] if node.type_name == "scalar" else array
            case "same":
                return self._made[int(str(node.value))]
            case "generator":
                return self._generator(node, items)
            case "torch":
                return self._constant(node)
            case "record" | "object" | "class":
                return self._typed(node, items, path)
            case "unsupported":
                raise CaptureError(f"{path} was not captured: {node.reason}.")
        return _container(node, items)

    def _generator(self, node: Node, items: list[Any]) -> torch.Generator:
        import torch

        generator = torch.Generator(self._place(str(node.value)))
        generator.set_state(items[0])
        return generator

    def _constant(self, node: Node) -> Any:
        constant = _torch_constant(str(node.type_name), node.value)
        return self._place(str(node.value)) if node.type_name == "device" else constant

    def _typed(self, node: Node, items: list[Any], path: str) -> Any:
        known = self._types.get(node.type_name or "")
        if known is None:
            raise CaptureError(
                f"{path} is a {node.type_name}, which is not among the classes that a capture may rebuild here. "
                "Register it with perfladder.register_capture_type() in the module of the factory."
            )
        if node.kind == "class":
            return known.kind
        if issubclass(known.kind, enum.Enum):
            return known.kind[str(node.value)]
        if node.kind == "object":
            return known.rebuild(items[0])
        return known.kind(**dict(zip(map(str, node.keys or []), items, strict=True)))

    def _tensor(self, node: TensorNode) -> torch.Tensor:
        import torch

        device = self._place(node.device)
        key = (node.storage, str(device))
        if not 0 <= node.storage < len(self._storages):
            raise ValueError(f"there is no storage {node.storage}")
        if key not in self._live:
            block = self._blocks[self._storages[node.storage]]
            self._live[key] = block.to(device, copy=True).untyped_storage()
        dtype = _torch_constant("dtype", node.dtype)
        tensor = torch.empty(0, dtype=dtype, device=device)
        num_bytes = (node.offset + reach(node.size, node.stride) + 1) * tensor.element_size()
        # torch would quietly enlarge a storage that is too small.
        if min([node.offset, *node.size, *node.stride]) < 0 or (
            0 not in node.size and num_bytes > self._live[key].nbytes()
        ):
            raise ValueError(f"its {node.size} with strides {node.stride} reach outside their storage")
        tensor.set_(self._live[key], node.offset, node.size, node.stride)
        return tensor.requires_grad_(node.requires_grad) if node.requires_grad else tensor

    def _place(self, recorded: str) -> torch.device:
        import torch

        there = torch.device(recorded)
        return there if there.type in ("cpu", "meta") or self._device is None else self._device


def _container(node: Node, items: list[Any]) -> Any:
    match node.kind:
        case "list":
            return items
        case "tuple":
            return tuple(items)
        case "set":
            return set(items)
        case "frozenset":
            return frozenset(items)
        case "slice":
            return slice(*items)
        case "range":
            return range(*items)
        case "dict":
            return dict(zip(node.keys or [], items, strict=True))
    raise ValueError(f"a node of kind {node.kind} has no such form")


def not_rebuildable(nodes: Mapping[str, Node], types: Mapping[str, CaptureType]) -> dict[str, str]:
    """Paths of what cannot be rebuilt, each with the reason: not stored, or of a class that no capture may make."""
    found: dict[str, str] = {}
    for root, node in nodes.items():
        for path, leaf in leaves(node, root).items():
            if leaf.kind == "unsupported":
                found[path] = leaf.reason or "cannot be stored"
        for path, typed in _typed_nodes(node, root).items():
            if typed.type_name not in types:
                found[path] = f"a {typed.type_name} is no class that a capture may rebuild; see register_capture_type()"
    return found


def _typed_nodes(node: Node, path: str) -> dict[str, Node]:
    found = {path: node} if node.kind in ("record", "object", "class") else {}
    for key, item in zip(node.keys or range(len(node.items or [])), node.items or [], strict=True):
        found.update(_typed_nodes(item, f"{path}.{key}"))
    return found


def _torch_constant(type_name: str, value: JsonValue) -> Any:
    """A constant of torch by its name, and nothing else that torch has under that name."""
    import torch

    if type_name == "device":
        return torch.device(str(value))
    if type_name == "Size":
        return torch.Size(value)  # type: ignore[arg-type]
    found = getattr(torch, str(value), None)
    if type(found).__name__ != type_name or not isinstance(found, torch_constants()):
        raise ValueError(f"{value!r} is no {type_name} of torch")
    return found
