"""Distinct inputs of named calls, each kept once with a count: on their device, on the CPU, or in files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from perfladder.functional.names import Call
from perfladder.trace.record import span

SAMPLING_KIND: Final = "sampling"
"""Kind of the span around the copying of a sample; what is launched in it belongs to no module."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
FunctionData = dict[str, list[tuple[int, Arguments]]]

_PLAIN: Final = (bool, int, str, bytes, type(None))
_MAX_DEPTH: Final = 16


@dataclass(frozen=True)
class LeftOut:
    """Samples that were seen and not kept.

    Attributes:
        num_samples: Distinct ones.
        num_calls: Calls with them.
        reason: Why.
    """

    num_samples: int
    num_calls: int
    reason: str


@dataclass
class _Sample:
    arguments: Arguments | None
    reason: str = ""
    num_calls: int = 1


@dataclass
class SampleStore:
    """Takes the inputs of calls and keeps each distinct one.

    Inputs are the same if their tensors have the same shapes, dtypes, strides and devices, and all else is equal; the
    first one's tensors are kept. They are copied, since the program may change them later; parameters are not, unless
    they go elsewhere.

    Args:
        names: Functions to keep inputs of; None for every one of `torch.nn.functional`.
        place: `device` (where the tensors are), `cpu`, or a folder, for files that vanish with their tensors.
        budget_bytes: How much the copies may hold together.
    """

    names: frozenset[str] | None
    place: str | Path = "device"
    budget_bytes: int | None = None
    num_bytes: int = 0
    _samples: dict[str, dict[Any, _Sample]] = field(default_factory=dict)

    def take(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count a call, and keep its inputs if they are new."""
        if not (call.is_functional if self.names is None else call.name in self.names):
            return
        samples = self._samples.setdefault(call.name, {})
        try:
            key = _signature((tuple(args), dict(kwargs)))
        except (RuntimeError, NotImplementedError) as error:
            key = _first_line(error)
        known = samples.get(key)
        if known is not None:
            known.num_calls += 1
            return
        with span(SAMPLING_KIND, call.name):
            samples[key] = self._keep(tuple(args), dict(kwargs))

    def _keep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Sample:
        if any(_is_capturing(tensor) for tensor in tensors_in((args, kwargs))):
            return _Sample(None, "a CUDA graph was being captured, and would have captured the copying too")
        spans = _Spans(keeps_parameters=self.place == "device")
        try:
            spans.add((args, kwargs))
            if self.budget_bytes is not None and self.num_bytes + spans.num_bytes > self.budget_bytes:
                return _Sample(None, f"the budget of {self.budget_bytes} bytes")
            kept = spans.copied((args, kwargs), self._copy)
        except (OSError, RuntimeError, NotImplementedError) as error:
            return _Sample(None, _first_line(error))
        self.num_bytes += spans.num_bytes
        return _Sample(kept)

    def _copy(self, flat: torch.Tensor) -> torch.Tensor:
        """Copy bytes [N] to where samples are kept."""
        if self.place == "device":
            return flat.clone()
        on_cpu = flat.to("cpu", copy=True)
        return on_cpu if self.place == "cpu" else _in_file(on_cpu, Path(self.place))

    def function_data(self) -> FunctionData:
        """Return what was kept, by function: how often, and the inputs."""
        return {
            name: [(sample.num_calls, sample.arguments) for sample in samples.values() if sample.arguments is not None]
            for name, samples in self._samples.items()
        }

    def left_out(self) -> dict[str, LeftOut]:
        """Return what was not kept, by function."""
        found = {}
        for name, samples in self._samples.items():
            missing = [sample for sample in samples.values() if sample.arguments is None]
            if missing:
                found[name] = LeftOut(len(missing), sum(sample.num_calls for sample in missing), missing[0].reason)
        return found


def copied_arguments(arguments: Arguments, *, keeps_parameters: bool = True) -> Arguments:
    """Copy arguments into memory of their own, with their strides; parameters stay what they are, unless told."""
    spans = _Spans(keeps_parameters=keeps_parameters)
    spans.add(arguments)
    return spans.copied(arguments, torch.clone)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _is_capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _in_file(flat: torch.Tensor, folder: Path) -> torch.Tensor:
    """Move bytes to a file without a name, whose pages are read when they are used, and which ends with the tensor."""
    if not len(flat):
        return flat
    handle, name = tempfile.mkstemp(prefix="sample-", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            flat.numpy().tofile(file)
        return torch.from_file(name, shared=False, size=len(flat), dtype=torch.uint8)
    finally:
        os.unlink(name)


def _signature(value: Any, depth: int = 0) -> Any:
    """Return a hashable value that is equal for samples that count as the same."""
    if isinstance(value, torch.Tensor):
        is_strided = value.layout == torch.strided and not value.is_nested
        strides = value.stride() if is_strided else None
        shape = None if value.is_nested else tuple(value.shape)
        return "tensor", type(value), value.dtype, shape, strides, value.device, value.layout
    if type(value) in _PLAIN:
        return type(value), value
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        return type(value), tuple((key, _signature(inner, depth + 1)) for key, inner in value.items())
    if depth < _MAX_DEPTH and isinstance(value, (list, tuple)):
        return type(value), tuple(_signature(inner, depth + 1) for inner in value)
    if isinstance(value, (float, complex, slice)):
        return type(value), repr(value)
    try:
        hash(value)
    except TypeError:
        return type(value), id(value)
    return type(value), value


def tensors_in(value: Any, depth: int = 0) -> list[torch.Tensor]:
    """Return the tensors in arguments, also in lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        return [value]
    if depth >= _MAX_DEPTH:
        return []
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for inner in value for tensor in tensors_in(inner, depth + 1)]
    return []


_Memory = Mapping[tuple[int, torch.dtype], torch.Tensor]


class _Range(NamedTuple):
    """The elements of one storage that tensors of one sample use."""

    tensor: torch.Tensor
    low: int
    high: int

    @property
    def num_bytes(self) -> int:
        return (self.high - self.low) * self.tensor.element_size()


class _Spans:
    """What a sample's tensors occupy; those that share memory share it in the copy as well, and keep their strides."""

    def __init__(self, *, keeps_parameters: bool) -> None:
        self._keeps_parameters = keeps_parameters
        self._ranges: dict[tuple[int, torch.dtype], _Range] = {}
        self._num_other_bytes = 0

    def _is_kept(self, tensor: torch.Tensor) -> bool:
        return self._keeps_parameters and isinstance(tensor, torch.nn.Parameter)

    def add(self, value: Any) -> None:
        for tensor in tensors_in(value):
            if self._is_kept(tensor):
                continue
            if not _is_plain(tensor):
                self._num_other_bytes += num_bytes(tensor)
                continue
            low = int(tensor.storage_offset())
            high = low + _reach(tensor)
            known = self._ranges.get(_place(tensor), _Range(tensor, low, high))
            self._ranges[_place(tensor)] = _Range(tensor, min(low, known.low), max(high, known.high))

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self._ranges.values()) + self._num_other_bytes

    def copied(self, arguments: Arguments, copy: Callable[[torch.Tensor], torch.Tensor]) -> Arguments:
        memory = {
            place: copy(_flat(part.tensor, part.low, part.high).view(torch.uint8)).view(part.tensor.dtype)
            for place, part in self._ranges.items()
        }
        args, kwargs = self._rebuilt(arguments, memory, 0)
        return args, kwargs

    def _rebuilt(self, value: Any, memory: _Memory, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            return value if self._is_kept(value) else self._on(memory, value)
        if depth >= _MAX_DEPTH:
            return value
        if type(value) in (list, tuple):
            return type(value)(self._rebuilt(inner, memory, depth + 1) for inner in value)
        if type(value) is dict:
            return {key: self._rebuilt(inner, memory, depth + 1) for key, inner in value.items()}
        return value

    def _on(self, memory: _Memory, tensor: torch.Tensor) -> torch.Tensor:
        if not _is_plain(tensor):
            return tensor.detach().clone()
        low = self._ranges[_place(tensor)].low
        return memory[_place(tensor)].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - low)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is its memory and nothing else."""
    is_memory = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
    is_own_class = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_own_class and is_memory and not tensor.is_nested and not tensor.is_conj() and not tensor.is_neg()


def _place(tensor: torch.Tensor) -> tuple[int, torch.dtype]:
    return tensor.untyped_storage().data_ptr(), tensor.dtype


def _reach(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first one up to behind its last one."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _flat(tensor: torch.Tensor, low: int, high: int) -> torch.Tensor:
    return tensor.detach().as_strided((high - low,), (1,), low)


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; 0 if it does not tell."""
    try:
        return int(tensor.numel() * tensor.element_size())
    except RuntimeError:
        return 0
