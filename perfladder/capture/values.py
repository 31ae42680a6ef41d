"""Python values with tensors in them, as JSON nodes plus raw storages, and back.

A tensor is (storage, offset, size, stride), so that any dtype, expanded and channels-last layouts, and tensors that
share memory come back as they were. What cannot be stored becomes an `unsupported` node that names its path.
"""

from __future__ import annotations

import dataclasses
import enum
import math
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
        "plain",
        "float",
        "complex",
        "tensor",
        "list",
        "tuple",
        "dict",
        "record",
        "generator",
        "torch",
        "array",
        "unsupported",
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
        if type(value) is float and not math.isfinite(value):
            return {"kind": "float", "value": repr(value)}
        if type(value) is complex:
            return {"kind": "complex", "value": repr(value)}
        if type(value) in _PLAIN:
            return (
                {"kind": "plain", "value": value}
                if _is_json(value)
                else self._refuse(path, "a text with lone surrogates")
            )
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.generic) or type(value) is np.ndarray:
            return self._array(value, path)
        if isinstance(value, torch.Generator):
            state = self._tensor(value.get_state(), path)
            return {"kind": "generator", "value": str(value.device), "items": [state]}
        if type(value) in _torch_constants():
            return {"kind": "torch", "type_name": type(value).__name__, "value": str(value).removeprefix("torch.")}
        if isinstance(value, torch.Size):
            return {"kind": "torch", "type_name": "Size", "value": list(value)}
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
            return {
                "kind": "record",
                "type_name": _type_name(value),
                "keys": names,
                "items": inner(zip(names, value, strict=True)),
            }
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
            items = inner((name, getattr(value, name)) for name in names)
            return {"kind": "record", "type_name": _type_name(value), "keys": names, "items": items}
        if isinstance(value, Mapping) and all(type(key) in _PLAIN and _is_json(key) for key in value):
            is_plain = type(value) is dict
            return {
                "kind": "dict" if is_plain else "record",
                "type_name": None if is_plain else _type_name(value),
                "keys": list(value),
                "items": inner(value.items()),
            }
        return self._refuse(path, f"a {_type_name(value)} cannot be stored")

    def _array(self, value: Any, path: str) -> dict[str, Any]:
        """A numpy array or scalar, as the tensor of its values."""
        import numpy as np
        import torch

        array = np.asarray(value)
        if not (isinstance(value, np.ndarray) and array.flags.c_contiguous and array.flags.writeable):
            array = np.array(array, copy=True, order="C")
        try:
            tensor = torch.from_numpy(array)
        except TypeError:
            return self._refuse(path, f"a numpy {type(value).__name__} of {array.dtype} cannot be stored")
        type_name = "scalar" if isinstance(value, np.generic) else None
        return {"kind": "array", "type_name": type_name, "items": [self._tensor(tensor, path)]}

    def _tensor(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        import torch

        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return self._refuse(path, f"a tensor subclass ({_type_name(tensor)}) cannot be stored")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            return self._refuse(path, f"a {tensor.layout} tensor on {tensor.device} cannot be stored")
        # A conjugated or negated view differs from its memory only by a bit that no storage holds.
        tensor = tensor.resolve_conj().resolve_neg()
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
        self.low: int = 1 << 62
        self.high: int = 0
        self.number = -1

    def include(self, tensor: torch.Tensor) -> None:
        if tensor.numel() == 0:
            self.low = min(self.low, tensor.storage_offset() * tensor.element_size() // 16 * 16)
            self.high = max(self.high, self.low)
            return
        reach = _reach(list(tensor.shape), list(tensor.stride()))
        start = int(tensor.storage_offset()) * tensor.element_size()
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
        self,
        storages: list[torch.Tensor],
        *,
        device: torch.device | None = None,
        types: Mapping[str, type] | None = None,
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
        try:
            return self._rebuilt(node, path)
        except (AssertionError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise CaptureError(f"{path} is damaged: it cannot be rebuilt ({type(error).__name__}: {error}).") from error

    def _rebuilt(self, node: Node, path: str) -> Any:
        import torch

        items = [self._value(item, f"{path}.{index}") for index, item in enumerate(node.items or [])]
        match node.kind:
            case "plain":
                return node.value
            case "float":
                return float(str(node.value))
            case "complex":
                return complex(str(node.value))
            case "tensor":
                assert node.tensor is not None
                return self._tensor(node.tensor)
            case "array":
                array = items[0].numpy()
                return array[()] if node.type_name == "scalar" else array
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
                return _torch_constant(str(node.type_name), node.value)
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
        if not 0 <= node.storage < len(self._storages):
            raise ValueError(f"there is no storage {node.storage}")
        if key not in self._live:
            self._live[key] = self._storages[node.storage].to(device, copy=True).untyped_storage()
        dtype = _torch_constant("dtype", node.dtype)
        tensor = torch.empty(0, dtype=dtype, device=device)
        num_bytes = (node.offset + _reach(node.size, node.stride) + 1) * tensor.element_size()
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
        return there if there.type == "cpu" or self._device is None else self._device


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


def _reach(size: list[int], stride: list[int]) -> int:
    """Elements from a tensor's first to its last one."""
    return sum((length - 1) * step for length, step in zip(size, stride, strict=True))


def _torch_constants() -> tuple[type, ...]:
    import torch

    return torch.dtype, torch.device, torch.layout, torch.memory_format


def _torch_constant(type_name: str, value: JsonValue) -> Any:
    """A constant of torch by its name, and nothing else that torch has under that name."""
    import torch

    if type_name == "device":
        return torch.device(str(value))
    if type_name == "Size":
        return torch.Size(value)  # type: ignore[arg-type]
    found = getattr(torch, str(value), None)
    if type(found).__name__ != type_name or not isinstance(found, _torch_constants()):
        raise ValueError(f"{value!r} is no {type_name} of torch")
    return found


def _is_json(value: Any) -> bool:
    """Whether JSON gives a plain value back as it was."""
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, str) or value.isprintable() or not any("\ud800" <= char <= "\udfff" for char in value)


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
