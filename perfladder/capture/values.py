"""Python values with tensors in them, as JSON nodes plus raw storages, and back.

A tensor is (storage, offset, size, stride), so that any dtype, expanded and channels-last layouts, and tensors that
share memory come back as they were. What cannot be stored becomes an `unsupported` node that names its path.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import JsonValue

from perfladder.errors import CaptureError
from perfladder.models import Model

if TYPE_CHECKING:
    import torch

_PLAIN = (bool, int, float, str, type(None))
_MAX_DEPTH = 32


class Node(Model):
    """One value. `kind` says which of the other fields are filled."""

    kind: Literal[
        "plain", "float", "tensor", "list", "tuple", "dict", "record", "generator", "torch", "array", "unsupported"
    ]
    value: JsonValue = None
    items: list[Node] | None = None
    keys: list[JsonValue] | None = None
    type_name: str | None = None
    tensor: TensorNode | None = None
    reason: str | None = None


class TensorNode(Model):
    """Where a tensor lies in its storage; offsets, sizes and strides in elements."""

    storage: int
    offset: int
    size: list[int]
    stride: list[int]
    dtype: str
    device: str
    requires_grad: bool = False


class Encoder:
    """Turns values into nodes and copies their tensors' memory to the CPU at once, before anyone can change it."""

    def __init__(self) -> None:
        self.storages: list[torch.Tensor] = []
        self.unsupported: dict[str, str] = {}
        self._pending: dict[tuple[str, int], _Span] = {}
        self._tensors: list[tuple[dict[str, Any], _Span]] = []

    def encode(self, values: Mapping[str, Any]) -> dict[str, Node]:
        """Encode named values together, so that memory which they share stays shared."""
        self._pending, self._tensors = {}, []
        drafts = {name: self._draft(value, name, 0) for name, value in values.items()}
        for span in self._pending.values():
            span.number = len(self.storages)
            self.storages.append(span.copy())
        for draft, span in self._tensors:
            draft["storage"] = span.number
            draft["offset"] -= span.low // draft.pop("element_bytes")
        return {name: Node.model_validate(draft) for name, draft in drafts.items()}

    def _draft(self, value: Any, path: str, depth: int) -> dict[str, Any]:
        import numpy as np
        import torch

        if depth > _MAX_DEPTH:
            return self._refuse(path, f"nested deeper than {_MAX_DEPTH}")
        if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
            return {"kind": "float", "value": repr(value)}
        if type(value) in _PLAIN:
            return {"kind": "plain", "value": value}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            return {"kind": "array", "items": [self._tensor(torch.from_numpy(np.ascontiguousarray(value)), path)]}
        if isinstance(value, torch.Generator):
            state = self._tensor(value.get_state(), path)
            return {"kind": "generator", "value": str(value.device), "items": [state]}
        if isinstance(value, (torch.dtype, torch.device)):
            return {"kind": "torch", "type_name": type(value).__name__, "value": str(value).removeprefix("torch.")}
        if isinstance(value, enum.Enum):
            return {"kind": "record", "type_name": _type_name(value), "value": value.name}
        return self._container(value, path, depth)

    def _container(self, value: Any, path: str, depth: int) -> dict[str, Any]:
        def inner(items: Any) -> list[dict[str, Any]]:
            return [self._draft(item, f"{path}.{key}", depth + 1) for key, item in items]

        if type(value) in (list, tuple):
            return {"kind": type(value).__name__, "items": inner(enumerate(value))}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            names = list(value._fields)
            return {"kind": "record", "type_name": _type_name(value), "keys": names, "items": inner(zip(names, value, strict=True))}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
            items = inner((name, getattr(value, name)) for name in names)
            return {"kind": "record", "type_name": _type_name(value), "keys": names, "items": items}
        if isinstance(value, Mapping) and all(type(key) in _PLAIN for key in value):
            is_plain = type(value) is dict
            return {
                "kind": "dict" if is_plain else "record",
                "type_name": None if is_plain else _type_name(value),
                "keys": list(value),
                "items": inner(value.items()),
            }
        return self._refuse(path, f"a {_type_name(value)} cannot be stored")

    def _tensor(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        import torch

        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return self._refuse(path, f"a tensor subclass ({_type_name(tensor)}) cannot be stored")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            return self._refuse(path, f"a {tensor.layout} tensor on {tensor.device} cannot be stored")
        draft: dict[str, Any] = {
            "offset": tensor.storage_offset(),
            "size": list(tensor.shape),
            "stride": list(tensor.stride()),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "device": str(tensor.device),
            "requires_grad": tensor.requires_grad,
            "element_bytes": tensor.element_size(),
        }
        storage = tensor.untyped_storage()
        key = (str(tensor.device), storage.data_ptr() or -len(self._pending) - 1)
        span = self._pending.setdefault(key, _Span(tensor))
        span.include(tensor)
        self._tensors.append((draft, span))
        return {"kind": "tensor", "tensor": draft}

    def _refuse(self, path: str, reason: str) -> dict[str, Any]:
        self.unsupported[path] = reason
        return {"kind": "unsupported", "reason": reason}


class _Span:
    """The part of one storage that the encoded tensors use, in bytes; aligned so that every dtype can view it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.keep_alive = tensor
        self.low = 1 << 62
        self.high = 0
        self.number = -1

    def include(self, tensor: torch.Tensor) -> None:
        if tensor.numel() == 0:
            self.low = min(self.low, tensor.storage_offset() * tensor.element_size() // 16 * 16)
            self.high = max(self.high, self.low)
            return
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.storage_offset() * tensor.element_size()
        self.low = min(self.low, start // 16 * 16)
        self.high = max(self.high, start + (reach + 1) * tensor.element_size())

    def copy(self) -> torch.Tensor:
        """The bytes, on the CPU."""
        import torch

        storage = self.keep_alive.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=self.keep_alive.device).set_(storage)
        copied = whole[self.low : self.high].to("cpu", copy=True)
        self.keep_alive = copied
        return copied


class Decoder:
    """Rebuilds values from nodes; every call makes new memory, so that a replay may change its inputs.

    Args:
        storages: The raw bytes, on the CPU.
        device: Where tensors that were not on the CPU go; by default to where they were.
        types: Classes that records may be rebuilt as, by qualified name. Nothing is imported by name.
    """

    def __init__(
        self, storages: list[torch.Tensor], *, device: torch.device | None = None, types: Mapping[str, type] | None = None
    ) -> None:
        self._storages = storages
        self._device = device
        self._types = types or {}
        self._live: dict[tuple[int, str], Any] = {}

    def decode(self, nodes: Mapping[str, Node]) -> dict[str, Any]:
        """Rebuild named values together; memory that was shared is shared again."""
        self._live = {}
        return {name: self._value(node, name) for name, node in nodes.items()}

    def _value(self, node: Node, path: str) -> Any:
        import torch

        items = [self._value(item, f"{path}.{index}") for index, item in enumerate(node.items or [])]
        match node.kind:
            case "plain":
                return node.value
            case "float":
                return float(str(node.value))
            case "tensor":
                assert node.tensor is not None
                return self._tensor(node.tensor)
            case "array":
                return items[0].numpy()
            case "list":
                return items
            case "tuple":
                return tuple(items)
            case "dict":
                return dict(zip(node.keys or [], items, strict=True))
            case "generator":
                generator = torch.Generator(self._place(str(node.value)))
                generator.set_state(items[0])
                return generator
            case "torch":
                text = str(node.value)
                return torch.device(text) if node.type_name == "device" else getattr(torch, text)
            case "record":
                return self._record(node, items, path)
        raise CaptureError(f"{path} was not captured: {node.reason}.")

    def _record(self, node: Node, items: list[Any], path: str) -> Any:
        kind = self._types.get(node.type_name or "")
        if kind is None:
            raise CaptureError(
                f"{path} is a {node.type_name}, which is not among the classes that a capture may rebuild "
                f"({', '.join(self._types) or 'none are registered'})."
            )
        if issubclass(kind, enum.Enum):
            return kind[str(node.value)]
        return kind(**dict(zip(map(str, node.keys or []), items, strict=True)))

    def _tensor(self, node: TensorNode) -> torch.Tensor:
        import torch

        device = self._place(node.device)
        key = (node.storage, str(device))
        if key not in self._live:
            self._live[key] = self._storages[node.storage].to(device, copy=True).untyped_storage()
        dtype = getattr(torch, node.dtype)
        tensor = torch.empty(0, dtype=dtype, device=device)
        tensor.set_(self._live[key], node.offset, node.size, node.stride)
        return tensor.requires_grad_(node.requires_grad) if node.requires_grad else tensor

    def _place(self, recorded: str) -> torch.device:
        import torch

        there = torch.device(recorded)
        return there if there.type == "cpu" or self._device is None else self._device


def leaves(node: Node, path: str = "") -> dict[str, Node]:
    """Every leaf below a node, by its path."""
    if node.items is None or node.kind in ("generator", "array"):
        return {path: node}
    found: dict[str, Node] = {}
    for key, item in zip(node.keys or range(len(node.items)), node.items, strict=True):
        found.update(leaves(item, f"{path}.{key}" if path else str(key)))
    return found


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
