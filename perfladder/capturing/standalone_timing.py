"""The second part of `replay.py`: how a call is timed. perfladder's own replay times its calls with it too.

`script.py` joins it with the other parts. Only torch and the standard library are imported.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

# [code]

# --- timing


def time_ms(call: Callable[[], object], device: torch.device, lead_ms: float = 0.0) -> float:
    """Make a call once and time it: by device events where there is a device, which has nothing else to do.

    Args:
        call: What to time.
        device: Where it works.
        lead_ms: How far ahead of the device the host is to be when it begins, as it was in the pipeline: what it needs
            to launch the call's first work is hidden then. On CUDA devices only.
    """
    if device.type == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    hold(device, lead_ms)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def hold(device: torch.device, ms: float) -> None:
    """Keep a CUDA device busy for so long, without touching its memory or caches."""
    if ms > 0 and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda._sleep(round(ms * cycles_per_ms(device)))


@functools.cache
def cycles_per_ms(device: torch.device) -> float:
    """How many of its own cycles a CUDA device counts in a millisecond, measured while it works."""
    cycles = 10_000_000
    begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        torch.cuda._sleep(cycles)  # an idle device has a lower clock
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
    end.synchronize()
    return cycles / float(begin.elapsed_time(end))
