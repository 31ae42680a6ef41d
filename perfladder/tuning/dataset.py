"""Samples of any form become calls of a given batch size."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from perfladder.errors import InputError

if TYPE_CHECKING:
    import torch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_PLAIN = (bool, int, float, type(None))


class Sized(Protocol):
    """What a map-style `torch.utils.data.Dataset` or a list offers."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class DataLoaderFactory:
    """Makes a loader for each batch size from one dataset.

    A last batch that is not full is dropped; a dataset that has fewer samples than a batch gives one batch in which its
    samples come again.

    Args:
        dataset: Samples by index, with a length.
        collate_fn: Makes a batch of a list of samples; by default `collate`.
        num_workers: Processes that load samples, as in `torch.utils.data.DataLoader`.

    Raises:
        InputError: The dataset has no length, or no samples.
    """

    def __init__(
        self, dataset: Sized, collate_fn: Callable[[list[Any]], Any] | None = None, num_workers: int = 0
    ) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise InputError(
                f"dataset: a {type(dataset).__name__} has no length or no samples by index; give a list, or a "
                "torch.utils.data.Dataset with __len__ and __getitem__."
            )
        if not len(dataset):
            raise InputError("dataset: it holds no samples.")
        self.dataset = dataset
        self.collate_fn = collate_fn or collate
        self.num_workers = num_workers

    def create_dataloader(self, batch_size: int) -> torch.utils.data.DataLoader[Any]:
        """A loader of whole batches.

        Raises:
            InputError: The batch size is no whole number from 1 up.
        """
        from torch.utils.data import DataLoader

        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise InputError(f"batch_size: expected a whole number from 1 up, got {batch_size!r}.")
        samples = _Repeated(self.dataset, batch_size) if len(self.dataset) < batch_size else self.dataset
        return DataLoader(
            samples,  # type: ignore[arg-type]
            batch_size=batch_size,
            drop_last=True,
            shuffle=False,
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
        )


class _Repeated:
    """A dataset that is made long enough by beginning again."""

    def __init__(self, dataset: Sized, length: int) -> None:
        self._dataset, self._length = dataset, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index % len(self._dataset)]


def collate(samples: list[Any]) -> Any:
    """Make one batch of samples that have the same form.

    Tensors and arrays are stacked along a new first axis, texts become a list, mappings, lists and tuples are collated
    part by part. Numbers, flags and None that are equal in all samples stay as they are, since they are settings of the
    call; numbers that differ become a tensor. Anything else becomes a list.

    Raises:
        InputError: The samples differ in form.
    """
    return _collate(samples, "sample")


def _collate(samples: list[Any], where: str) -> Any:
    import numpy as np
    import torch

    first = samples[0]
    kinds = list(dict.fromkeys(type(sample).__name__ for sample in samples))
    if len(kinds) > 1:
        raise InputError(f"dataset: {where} is a {kinds[0]} in one sample and a {kinds[1]} in another.")
    if isinstance(first, np.ndarray):
        return _collate([torch.from_numpy(sample) for sample in samples], where)
    if isinstance(first, torch.Tensor):
        shapes = {tuple(sample.shape) for sample in samples}
        if len(shapes) > 1:
            listed = " and ".join(str(list(shape)) for shape in sorted(shapes)[:2])
            raise InputError(
                f"dataset: {where} has the shapes {listed}, which cannot be stacked. Give a DataLoaderFactory with a "
                "collate_fn that pads, or a batch size of 1."
            )
        return torch.stack(samples)
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for sample in samples for key in sample)
        missing = [key for key in keys if any(key not in sample for sample in samples)]
        if missing:
            raise InputError(f"dataset: {where} has {missing[0]!r} in some samples only.")
        return {key: _collate([sample[key] for sample in samples], f"{where}[{key!r}]") for key in keys}
    if isinstance(first, (list, tuple)):
        if len({len(sample) for sample in samples}) > 1:
            raise InputError(f"dataset: {where} is a {type(first).__name__} whose length differs between samples.")
        parts = [_collate(list(part), f"{where}[{index}]") for index, part in enumerate(zip(*samples, strict=True))]
        return parts if isinstance(first, list) else tuple(parts)
    if isinstance(first, _PLAIN):
        is_same = all(sample == first for sample in samples)
        return first if is_same else torch.tensor(samples)
    return samples


def calls_of(dataset: Any, batch_size: int, *, max_batches: int | None = None) -> Iterator[Arguments]:
    """The calls that a dataset stands for, at one batch size.

    Args:
        dataset: A `DataLoaderFactory`; a map-style Dataset; a sequence of samples; or a tensor or a text, which is one
            sample. A sample is a tensor, a text, a sequence (positional arguments), a mapping (keyword arguments), or a
            pair of both.
        batch_size: Samples in a call.
        max_batches: At most so many calls; None or 0 is all.

    Raises:
        InputError: The dataset has another form, or its samples differ in form.
    """
    loader = _factory(dataset).create_dataloader(batch_size)
    for batch in itertools.islice(loader, max_batches or None):
        yield as_call(batch)


def _factory(dataset: Any) -> DataLoaderFactory:
    import torch

    if isinstance(dataset, DataLoaderFactory):
        return dataset
    if isinstance(dataset, Mapping) or (dataset is not None and not hasattr(dataset, "__len__")):
        raise InputError(
            f"dataset: expected a list of samples, a Dataset or a DataLoaderFactory, not a {type(dataset).__name__}; "
            "one sample goes into a list."
        )
    if dataset is None:
        raise InputError("dataset: give samples, such as [{'prompt': 'a lighthouse'}].")
    return DataLoaderFactory([dataset] if isinstance(dataset, (torch.Tensor, str)) else dataset)


def as_call(batch: Any) -> Arguments:
    """How a batch is passed: a pair of sequence and mapping as both, a mapping by keyword, a sequence by position."""
    import torch

    if isinstance(batch, (list, tuple)) and len(batch) == 2 and isinstance(batch[1], Mapping):
        args = batch[0] if isinstance(batch[0], (list, tuple)) else (batch[0],)
        return tuple(args), _names(batch[1])
    if isinstance(batch, Mapping):
        return (), _names(batch)
    is_texts = isinstance(batch, list) and all(isinstance(item, str) for item in batch)
    if isinstance(batch, (list, tuple)) and not is_texts and not isinstance(batch, torch.Size):
        return tuple(batch), {}
    return (batch,), {}


def _names(arguments: Mapping[Any, Any]) -> dict[str, Any]:
    bad = [name for name in arguments if not isinstance(name, str)]
    if bad:
        raise InputError(f"dataset: a sample's keyword arguments have names; {bad[0]!r} is none.")
    return dict(arguments)


def cycled(calls: Sequence[Arguments], count: int) -> Iterator[Arguments]:
    """So many calls, beginning again where there are fewer."""
    return itertools.islice(itertools.cycle(calls), count)
