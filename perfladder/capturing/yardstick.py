"""A fixed piece of host work, timed beside other things: how fast the host is just then.

A process on a shared machine runs at one speed or another, by the core that it is on and by who else uses that core.
"""

from __future__ import annotations

import time
from typing import Final

_DISPATCHES: Final = 1000
_NS_PER_MS: Final = 1e6


class Yardstick:
    """Calls and dispatches tiny operators on the CPU, as an eager pipeline's host does; about 1 to 3 ms."""

    def __init__(self) -> None:
        import torch

        self._x = torch.zeros(1, device="cpu")

    def time_ms(self) -> float:
        """Milliseconds of it, after a little of it that is not timed: what ran before has filled the caches."""
        import torch

        with torch.inference_mode():
            self._work(_DISPATCHES // 5)
            start = time.perf_counter_ns()
            self._work(_DISPATCHES)
            return (time.perf_counter_ns() - start) / _NS_PER_MS

    def _work(self, count: int) -> None:
        for _ in range(count):
            self._x.add_(1)
