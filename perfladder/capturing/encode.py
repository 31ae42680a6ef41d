"""Values with tensors in them become nodes plus raw storages, copied at once, before anyone can change them."""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from perfladder.capturing.nodes import MAX_DEPTH, PLAIN, Node, reach, torch_constants
from perfladder.capturing.types import CaptureType, capture_types, fields_of, type_name
from perfladder.errors import CaptureError

if TYPE_CHECKING:
    import torch

Draft = dict[str, Any]

_ALIGN: Final = 16
_SHORT_RUN: Final = 4
"""So many plain numbers in a row are taken for sizes and settings, and not for a user's data."""


class BudgetError(CaptureError):
    """The values need more bytes than may be stored."""


class Encoder:
    """Turns values into nodes, and copies their tensors' memory to the CPU.

    Args:
        types: Classes that may be held, by qualified name; by default all that are known now.
        max_bytes: How many bytes of tensors may be stored in all.
        redact: Replace texts, bytes and the numbers in tensors by meaningless ones of the same form.

    Attributes:
        blocks: Distinct raw memories, as `uint8` tensors on the CPU.
        storages: For each storage that a tensor node points to, the block that it begins as. Two storages may begin as
            the same block, and yet be memories of their own.
        unsupported: Reasons by path.
    """

    def __init__(
        self, types: Mapping[str, CaptureType] | None = None, *, max_bytes: int | None = None, redact: bool = False
    ) -> None:
        self.blocks: list[torch.Tensor] = []
        self.storages: list[int] = []
        self.unsupported: dict[str, str] = {}
        self._types = {known.kind: known for known in (capture_types() if types is None else types).values()}
        self._max_bytes = max_bytes
        self._redact = redact
        self._by_sum: dict[tuple[int, int], list[int]] = {}
        self._num_labels = 0
        self._begin(identity=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self.blocks)

    def encode(self, values: Mapping[str, Any], *, keep: Iterable[str] = (), identity: bool = False) -> dict[str, Node]:
        """Encode named values together, so that memory which they share stays shared.

        Args:
            values: By name.
            keep: Names of values that are never redacted.
            identity: Let what is one object in several places be one object again, by `same` nodes.

        Raises:
            BudgetError: They need more bytes than are left; nothing of them is stored.
        """
        self._begin(identity=identity)
        kept = set(keep)
        drafts = {}
        for name, value in values.items():
            self._is_redacting = self._redact and name not in kept
            drafts[name] = self._draft(value, name, 0)
        self._check_budget()
        for span in self._pending.values():
            self._store(span)
        for draft, span in self._tensors:
            draft["storage"] = span.number
            draft["offset"] -= span.low // draft.pop("element_bytes")
        self._alive.clear()
        return {name: Node.model_validate(draft) for name, draft in drafts.items()}

    def _begin(self, *, identity: bool) -> None:
        self._keeps_identity = identity
        self._pending: dict[tuple[str, int], _Span] = {}
        self._tensors: list[tuple[Draft, _Span]] = []
        self._seen: dict[int, Draft | None] = {}
        self._alive: list[Any] = []
        self._is_redacting = False

    def _check_budget(self) -> None:
        if self._max_bytes is None:
            return
        wanted, there = sum(span.num_bytes for span in self._pending.values()), self.num_bytes
        if there + wanted > self._max_bytes:
            self._pending, self._tensors = {}, []
            raise BudgetError(f"{wanted} bytes more would exceed the limit of {self._max_bytes} bytes.")

    def _store(self, span: _Span) -> None:
        block = span.copy()
        alike = self._by_sum.setdefault(_quick_sum(block), [])
        number = next((known for known in alike if self._is_block(known, block)), -1)
        if number < 0:
            number = len(self.blocks)
            self.blocks.append(block)
            alike.append(number)
        span.number = len(self.storages)
        self.storages.append(number)

    def _is_block(self, number: int, block: torch.Tensor) -> bool:
        import torch

        return torch.equal(self.blocks[number], block)

    def _draft(self, value: Any, path: str, depth: int) -> Draft:
        """One value as a node to be; what raises when it is looked at cannot be stored."""
        try:
            return self._drafted(value, path, depth)
        except Exception as error:
            return self._refuse(path, f"a {type_name(type(value))} cannot be read ({type(error).__name__})")

    def _drafted(self, value: Any, path: str, depth: int) -> Draft:
        import numpy as np
        import torch

        if depth > MAX_DEPTH:
            return self._refuse(path, f"nested deeper than {MAX_DEPTH}")
        if type(value) in PLAIN:
            return self._plain(value, path)
        if type(value) is complex:
            return {"kind": "complex", "value": repr(value)}
        if type(value) in torch_constants():
            return {"kind": "torch", "type_name": type(value).__name__, "value": str(value).removeprefix("torch.")}
        if isinstance(value, torch.Size):
            return {"kind": "torch", "type_name": "Size", "value": list(value)}
        if isinstance(value, enum.Enum):
            return {"kind": "record", "type_name": type_name(type(value)), "value": value.name}
        if isinstance(value, np.generic):
            return self._array(value, path)
        if type(value) in (bytes, slice, range, type(...)):
            return self._constant(value)
        if isinstance(value, type):
            return self._class(value, path)
        return self._shared(value, path, depth)

    def _shared(self, value: Any, path: str, depth: int) -> Draft:
        """A value that may be met again as the same object."""
        known = self._seen.get(id(value), _UNSEEN)
        if known is None:
            return self._refuse(path, "it holds itself")
        if known is not _UNSEEN and self._keeps_identity and not isinstance(value, (tuple, frozenset)):
            if "label" not in known:
                known["label"], self._num_labels = self._num_labels, self._num_labels + 1
            return {"kind": "same", "value": known["label"]}
        self._seen[id(value)] = None
        self._alive.append(value)
        draft = self._structure(value, path, depth)
        self._seen[id(value)] = draft
        return draft

    def _structure(self, value: Any, path: str, depth: int) -> Draft:
        import numpy as np
        import torch

        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if type(value) is np.ndarray:
            return self._array(value, path)
        if isinstance(value, torch.Generator):
            return {"kind": "generator", "value": str(value.device), "items": [self._state(value.get_state(), path)]}
        return self._container(value, path, depth)

    def _state(self, state: torch.Tensor, path: str) -> Draft:
        is_redacting, self._is_redacting = self._is_redacting, False
        try:
            return self._tensor(state, path)
        finally:
            self._is_redacting = is_redacting

    def _plain(self, value: Any, path: str) -> Draft:
        if isinstance(value, float) and not math.isfinite(value):
            return {"kind": "float", "value": repr(value)}
        if isinstance(value, str):
            if any("\ud800" <= char <= "\udfff" for char in value):
                return self._refuse(path, "a text with lone surrogates")
            if self._is_redacting:
                value = "x" * len(value)
        return {"kind": "plain", "value": value}

    def _keys(self, value: dict[Any, Any]) -> list[Any]:
        """Keys of a dict; redacted are those that can be no parameter's name."""
        if not self._is_redacting:
            return list(value)
        return [
            key if not isinstance(key, str) or key.isidentifier() else f"{'x' * len(key)}{index}"
            for index, key in enumerate(value)
        ]

    def _numbers_redacted(self, values: Any) -> Any:
        """Long runs of plain numbers, as token ids are, become random ones within the same range."""
        is_run = len(values) > _SHORT_RUN and all(type(value) in (int, float) for value in values)
        if not self._is_redacting or not is_run or not all(map(math.isfinite, values)):
            return values
        chance, low, high = random.Random(len(values)), min(values), max(values)
        drawn = [
            chance.randint(math.floor(low), math.ceil(high)) if type(value) is int else chance.uniform(low, high)
            for value in values
        ]
        return type(values)(drawn)

    def _constant(self, value: Any) -> Draft:
        if isinstance(value, bytes):
            return {"kind": "bytes", "value": (bytes(len(value)) if self._is_redacting else value).hex()}
        if value is ...:
            return {"kind": "ellipsis"}
        parts = [value.start, value.stop, value.step]
        return {"kind": type(value).__name__, "items": [self._draft(part, "", 0) for part in parts]}

    def _class(self, value: type, path: str) -> Draft:
        if value not in self._types:
            return self._refuse(path, f"the class {type_name(value)} cannot be stored")
        return {"kind": "class", "type_name": type_name(value)}

    def _container(self, value: Any, path: str, depth: int) -> Draft:
        def inner(items: Iterable[tuple[Any, Any]]) -> list[Draft]:
            return [self._draft(item, f"{path}.{key}", depth + 1) for key, item in items]

        kind = type(value)
        if kind in (list, tuple, set, frozenset):
            value = self._numbers_redacted(value)
            ordered = sorted(value, key=repr) if kind in (set, frozenset) else value
            return {"kind": kind.__name__, "items": inner(enumerate(ordered))}
        if kind is dict and all(type(key) in PLAIN and _is_json(key) for key in value):
            return {"kind": "dict", "keys": self._keys(value), "items": inner(value.items())}
        known = self._types.get(kind)
        if known is not None and known.to_state is not None:
            state = self._draft(known.to_state(value), path, depth + 1)
            return {"kind": "object", "type_name": known.name, "items": [state]}
        fields = None if kind is dict else fields_of(value)
        if fields is None:
            return self._refuse(path, f"a {type_name(kind)} cannot be stored; see register_capture_type()")
        return {
            "kind": "record",
            "type_name": type_name(kind),
            "keys": list(fields),
            "items": inner(fields.items()),
        }

    def _array(self, value: Any, path: str) -> Draft:
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
        scalar = "scalar" if isinstance(value, np.generic) else None
        return {"kind": "array", "type_name": scalar, "items": [self._tensor(tensor, path)]}

    def _tensor(self, tensor: torch.Tensor, path: str) -> Draft:
        import torch

        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return self._refuse(path, f"a tensor subclass ({type_name(type(tensor))}) cannot be stored")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            return self._refuse(path, f"a {tensor.layout} tensor on {tensor.device} cannot be stored")
        # A conjugated or negated view differs from its memory only by a bit that no storage holds.
        tensor = tensor.detach().resolve_conj().resolve_neg().requires_grad_(tensor.requires_grad)
        draft: Draft = {
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
        span = self._pending.setdefault(key, _Span(tensor, is_redacted=self._is_redacting))
        span.include(tensor)
        self._tensors.append((draft, span))
        return {"kind": "tensor", "tensor": draft}

    def _refuse(self, path: str, reason: str) -> Draft:
        self.unsupported[path] = reason
        return {"kind": "unsupported", "reason": reason}


_UNSEEN: Final[Draft] = {}


class _Span:
    """The part of one storage that the encoded tensors use, in bytes; aligned so that every dtype can view it."""

    def __init__(self, tensor: torch.Tensor, *, is_redacted: bool) -> None:
        self.tensor = tensor
        self.is_redacted = is_redacted
        self.low: int = 1 << 62
        self.high: int = 0
        self.number = -1

    @property
    def num_bytes(self) -> int:
        return self.high - self.low

    def include(self, tensor: torch.Tensor) -> None:
        start = int(tensor.storage_offset()) * tensor.element_size()
        self.low = min(self.low, start // _ALIGN * _ALIGN)
        end = self.low
        if tensor.numel():
            end = start + (reach(list(tensor.shape), list(tensor.stride())) + 1) * tensor.element_size()
        self.high = max(self.high, end)

    def copy(self) -> torch.Tensor:
        """The bytes, on the CPU."""
        import torch

        storage = self.tensor.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=self.tensor.device).set_(storage)
        copied = whole[self.low : self.high].to("cpu", copy=True)
        if self.is_redacted:
            scramble(copied, self.tensor.dtype)
        return copied


def _quick_sum(block: torch.Tensor) -> tuple[int, int]:
    """Equal for equal blocks, and hardly ever for others."""
    import torch

    whole = block.numel() // 8 * 8
    return block.numel(), int(block[:whole].view(torch.int64).sum()) + int(block[whole:].sum())


def scramble(block: torch.Tensor, dtype: torch.dtype) -> None:
    """Replace the numbers by random ones that a model can take: normal ones, and integers within the same range.

    Of types that torch cannot make random they become zeros.
    """
    import torch

    element_bytes = dtype.itemsize
    part = block[: block.numel() // element_bytes * element_bytes]
    # An aligned copy, since a block may begin anywhere.
    values = part.clone().view(dtype)
    if not values.numel():
        return
    seed = torch.Generator().manual_seed(values.numel())
    try:
        if dtype == torch.bool:
            values = torch.randint(0, 2, values.shape, generator=seed).to(dtype)
        elif dtype.is_floating_point or dtype.is_complex:
            values = torch.randn(values.shape, generator=seed).to(dtype)
        else:
            wide = values.to(torch.int64)
            low, high = int(wide.min()), int(wide.max())
            values = torch.randint(low, high + 1, values.shape, generator=seed).to(dtype)
    except (NotImplementedError, OverflowError, RuntimeError, ValueError):
        part.zero_()  # a type that torch cannot make random numbers of, or a range that no number tells
        return
    part.copy_(values.view(torch.uint8))


def _is_json(value: Any) -> bool:
    """Whether JSON gives a plain value back as it was."""
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, str) or not any("\ud800" <= char <= "\udfff" for char in value)
