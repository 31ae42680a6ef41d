"""Where and how a built-in workload makes its modules: on which device, in which dtype, from which seed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from perfladder import target
from perfladder.errors import InputError


def resolve_device(device: str) -> torch.device:
    """The device that a workload asks for, or `meta`, where modules have shapes but no weights.

    Raises:
        InputError: It is not a device name.
        NotPossibleHereError: This machine or this build of torch has no such device.
    """
    return torch.device("meta") if device == "meta" else target.resolve_device(device)


def resolve_dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    """Turn a dtype or its torch name into a floating-point dtype; None is float32.

    Raises:
        InputError: It is not the name of a floating-point dtype.
    """
    if dtype is None:
        return torch.float32
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise InputError(f"Unknown dtype {dtype!r}: expected for example 'float32', 'bfloat16' or 'float16'.")
    return resolved


def require_size(size: str, sizes: Iterable[str], workload: str) -> None:
    """Refuse a size that a workload does not have.

    Raises:
        InputError: It is none of `sizes`.
    """
    if size not in sizes:
        raise InputError(f"Unknown size {size!r} of the workload {workload}: expected one of {', '.join(sizes)}.")


@contextmanager
def seeded_construction(device: torch.device, dtype: torch.dtype, seed: int) -> Iterator[None]:
    """Make modules in this block directly on `device` in `dtype`, with the same weights for the same seed and device.

    A large model is thus never initialised in float32 on the CPU first. When the block ends, the default dtype and the
    random state of the CPU and of `device` are as before.
    """
    on_accelerator = device.type not in ("cpu", "meta")
    if on_accelerator:
        fork = torch.random.fork_rng(devices=[device.index], device_type=device.type)
    else:
        fork = torch.random.fork_rng(devices=[])
    default_dtype = torch.get_default_dtype()
    with fork, device:
        # torch.manual_seed would reseed every accelerator too, whose state nothing here puts back.
        seed_generators = torch.manual_seed if on_accelerator else torch.default_generator.manual_seed
        seed_generators(seed)
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(default_dtype)


_IMPORT_NOISE = (
    "torchao",  # native libraries for other GPUs and Python versions than this one
    "torchao.kernel.intmm",  # no triton
    "torch.utils._pytree",  # a deprecated call that torchao makes
    "transformers.utils.import_utils",  # no torchvision, so images are resized with pillow
    "diffusers.quantizers.torchao.torchao_quantizer",  # no torchao tensor classes to load quantized checkpoints with
)
"""Loggers that warn when transformers or diffusers is imported, about features that no built-in workload uses."""


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Drop what `_IMPORT_NOISE` logs below the level error in this block; all else is logged as before."""
    loggers = [logging.getLogger(name) for name in _IMPORT_NOISE]
    for logger in loggers:
        logger.addFilter(_is_error)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_error)
