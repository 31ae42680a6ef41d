"""Empty the caches between repeats, as other stages do between two calls in a pipeline: a device's, and the host's."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

    from perfladder.capturing.store import CapturedCall

SHORT_CALL_MS: Final = 25.0
"""Calls shorter than this are timed with emptied caches too: in a pipeline other stages run between two of them."""
_FALLBACK_BYTES: Final = 64 << 20
_MAX_CPU_BYTES: Final = 64 << 20
"""The last cache of a server may have hundreds of MB and many users; this much clears a core's own caches."""
_CPU_CACHES: Final = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Evictor:
    """Overwrites memory twice as large as the caches: of the CPU, and of the accelerator if that is the device.

    A GPU's second-level cache, a CPU's last one and 64 MiB at most. The host's own count on an accelerator too: where
    the host sets the pace, what it finds in its caches is what a call takes.

    Attributes:
        device_bytes: What it holds on an accelerator; 0 on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        cpu = torch.device("cpu")
        devices = [cpu] if device.type == "cpu" else [device, cpu]
        self._memories = [torch.zeros(_num_bytes(one), dtype=torch.uint8, device=one) for one in devices]
        self.device_bytes = sum(memory.nbytes for memory in self._memories if memory.device.type != "cpu")

    def evict(self) -> None:
        """Fill the caches with something else."""
        for memory in self._memories:
            memory.add_(1)


def _num_bytes(device: torch.device) -> int:
    num_bytes = 2 * last_cache_bytes(device)
    return min(_MAX_CPU_BYTES, num_bytes) if device.type == "cpu" else num_bytes


def evictor_for(calls: Sequence[CapturedCall], device: torch.device) -> Evictor | None:
    """What empties the caches between replays of these calls; None where they are too long to care."""
    call_ms = statistics.mean(statistics.median(call.in_pipeline_ms) for call in calls)
    return Evictor(device) if call_ms < SHORT_CALL_MS else None


def last_cache_bytes(device: torch.device) -> int:
    """Size of the cache before memory."""
    if device.type == "cpu":
        return _cpu_cache_bytes(_CPU_CACHES)
    import torch

    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return int(getattr(properties(device), "L2_cache_size", 0)) or _FALLBACK_BYTES if properties else _FALLBACK_BYTES


def _cpu_cache_bytes(folder: Path) -> int:
    try:
        sizes = [file.read_text().strip() for file in folder.glob("index*/size")]
        return max(int(size[:-1]) * _UNITS[size[-1]] for size in sizes)
    except (OSError, ValueError, KeyError, IndexError):
        return _FALLBACK_BYTES
