"""What observing the stages costs: observed runs of the diffusion workload over bare ones, taken in turn (AB BA AB ..).

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_overhead.py --pairs 200
    python tests/benchmarks/bench_overhead.py --pairs 200 --size sd15 --device cuda

The stages are those that rung 1 chooses by itself, and everything that rung 1 does around a run is done for both sides.
Goal: the upper end of the 95 % interval of the ratio of medians is at most 1.01.

`--clock cpu` takes the thread's processor time instead of wall time: on a machine that others use, it leaves out the
time when they had the core, though not what they do to caches and clocks.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch

from perfladder.instrument import instrument
from perfladder.stats import Samples, compare_samples, summarize
from perfladder.target import LoadedTarget
from perfladder.timing.choose import candidate_sites, choose_sites
from perfladder.timing.runs import bare_run
from perfladder.timing.timer import StageTimer
from perfladder.workload import parse_workload
from perfladder.workloads import diffusion

CLOCKS: dict[str, Callable[[], int]] = {"wall": time.perf_counter_ns, "cpu": time.thread_time_ns}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--size", choices=["tiny", "sd15"], default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, help="denoising steps of a run; default: 4, or 10 for sd15")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--core", type=int, help="to pin the process to, on a CPU; default: the last one it may use")
    options = parser.parse_args()
    if options.device == "cpu":
        os.sched_setaffinity(0, {options.core if options.core is not None else max(os.sched_getaffinity(0))})
        torch.set_num_threads(1)
    pixels, dtype = (64, None) if options.size == "tiny" else (512, "float16")
    steps = options.steps or (4 if options.size == "tiny" else 10)
    workload = parse_workload(
        {
            "name": "overhead",
            "target": "in_place:object",
            "inputs": {
                "prompt": "a lighthouse at dusk",
                "num_inference_steps": steps,
                "height": pixels,
                "width": pixels,
                "output_type": "np",
            },
            "device": options.device,
        }
    )
    loaded = LoadedTarget.of(diffusion.build(options.size, device=options.device, dtype=dtype), workload)
    clock = CLOCKS[options.clock]
    for _ in range(options.warmup):
        bare_run(loaded, None, clock)
    sites, _ = choose_sites(loaded, *candidate_sites(loaded), clock)
    timer = StageTimer(clock, loaded.device)
    bare_ms: list[float] = []
    observed_ms: list[float] = []
    num_calls = 0

    def bare() -> None:
        bare_ms.append(bare_run(loaded, None, clock)[0].wall_ms)

    def observed() -> None:
        nonlocal num_calls
        with instrument(sites, timer):
            observed_ms.append(bare_run(loaded, None, clock, is_observed=True)[0].wall_ms)
        num_calls = len(timer.take())

    load_before = os.getloadavg()[0]
    for index in range(options.pairs):
        for side in (bare, observed) if index % 2 == 0 else (observed, bare):
            side()
    sides = (Samples(launches=[side]) for side in (observed_ms, bare_ms))
    comparison = compare_samples(*sides, interleaved=True)
    bare_summary = summarize(bare_ms)
    print(f"load average {load_before:.1f} before, {os.getloadavg()[0]:.1f} after; torch {torch.__version__}")
    print(f"{len(sites)} sites, {num_calls} observed calls a run; device {loaded.device}")
    print(f"clock: {options.clock}")
    print(f"bare run: p50 {bare_summary.p50:.2f} ms, CV {bare_summary.std / bare_summary.mean:.1%}")
    print(f"observed / bare: {comparison.speedup:.4f}")
    if comparison.interval:
        interval = comparison.interval
        print(f"95 % interval: {interval.low:.4f} to {interval.high:.4f} (goal: at most 1.01), {options.pairs} pairs")


if __name__ == "__main__":
    main()
