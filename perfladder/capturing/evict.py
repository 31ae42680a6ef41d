"""Empty the caches of a processor between repeats, as other stages do between two calls in a pipeline."""

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
    """Overwrites a memory twice as large as a GPU's second-level cache, or as a CPU's last one and 64 MiB at most."""

    def __init__(self, device: torch.device) -> None:
        import torch

        num_bytes = 2 * last_cache_bytes(device)
        if device.type == "cpu":
            num_bytes = min(_MAX_CPU_BYTES, num_bytes)
        self.num_bytes = num_bytes
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def evict(self) -> None:
        """Fill the caches with something else."""
        self._memory.add_(1)


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
