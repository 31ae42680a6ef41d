"""What a mark costs when nothing observes: a function called with and without `@stage`, and an empty `with` block.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_stage_mark.py

The goal is 200 ns for the decorator and 500 ns for the block. Each line is the median of 31 series of 20 000 calls,
minus the same of the bare function or an empty loop.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable

from perfladder.marks import stage

_SERIES, _CALLS = 31, 20_000


def main() -> None:
    """Print the table."""
    cached = stage("cached")

    def plain(x: int) -> int:
        return x

    async def plain_coroutine(x: int) -> int:
        return x

    def call(function: Callable[[int], int]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(_CALLS):
                function(1)

        return run

    def await_all(function: Callable[..., object]) -> Callable[[], None]:
        async def loop() -> None:
            for _ in range(_CALLS):
                await function(1)  # type: ignore[misc]

        return lambda: asyncio.run(loop())

    def block() -> None:
        for _ in range(_CALLS):
            with stage("block"):
                pass

    def cached_block() -> None:
        for _ in range(_CALLS):
            with cached:
                pass

    def empty() -> None:
        for _ in range(_CALLS):
            pass

    rows = {
        "decorator, function (goal 200 ns)": (call(stage("f")(plain)), call(plain)),
        "decorator, coroutine": (await_all(stage("c")(plain_coroutine)), await_all(plain_coroutine)),
        'with stage("..") (goal 500 ns)': (block, empty),
        "with a stage made before": (cached_block, empty),
    }
    print(f"load average {os.getloadavg()[0]:.1f}")
    for name, (marked, bare) in rows.items():
        pairs = [(_ns_per_call(marked), _ns_per_call(bare)) for _ in range(_SERIES)]
        print(f"{name}: {statistics.median(m - b for m, b in pairs):.0f} ns")


def _ns_per_call(run: Callable[[], None]) -> float:
    start = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - start) / _CALLS


if __name__ == "__main__":
    main()
