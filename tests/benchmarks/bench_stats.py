"""How often `compare_samples` is right on the tiny diffusion workload: same code, and one stage made 5 % slower.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_stats.py --trials 100 --runs 20
    python tests/benchmarks/bench_stats.py --triples 600 --save runs.json      # shorter; trials then share runs
    python tests/benchmarks/bench_stats.py --read runs.json --runs 10          # judge a recording again

One process pinned to one core records triples of runs: A, the same code again (A'), and P, in which a busy wait of 5 %
of the stage's own median call follows each of its calls. The wrapper is there in all three, and the six orders of a
triple take turns. A trial is `--runs` consecutive triples: A against A' must not be called different (goal: at most
5 %), P must be called slower on the stage's own samples (goal: at least 95 %).

By default trials share no run (trials x runs triples). With `--triples` fewer are recorded, and trials are stretches of
consecutive triples whose starts are spread evenly over the recording: every trial is then still one that could have
been measured just so, but trials overlap, and the table says how many separate stretches there are.

`--clock cpu` takes the thread's processor time instead of wall time: on a machine that others use, it leaves out the
time when they had the core, though not what they do to caches and clocks.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import platform
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perfladder.environment import collect_environment
from perfladder.instrument import instrument
from perfladder.rungs.stages import StageTimer
from perfladder.sites import resolve_site
from perfladder.stats import Samples, compare_samples, lag1_autocorrelation
from perfladder.workloads import diffusion

SLOWDOWN = 0.05
SIDES = ("A", "A'", "P")
INPUTS = {"prompt": "a lighthouse at dusk", "num_inference_steps": 4, "height": 64, "width": 64}
CLOCKS: dict[str, Callable[[], int]] = {"wall": time.perf_counter_ns, "cpu": time.thread_time_ns}
Recording = dict[str, Any]


def main() -> None:
    """Record, or read a recording, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--runs", type=int, default=20, help="a side and trial")
    parser.add_argument("--triples", type=int, help="to record; default: trials x runs")
    parser.add_argument("--stage", default="unet", help="call site of the module that is made slower")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--core", type=int, help="to pin the process to; default: the last one it may use")
    parser.add_argument("--save", type=Path, help="write the recording here")
    parser.add_argument("--read", type=Path, help="judge this recording, record nothing")
    options = parser.parse_args()
    if options.read:
        recording = json.loads(options.read.read_text())
    else:
        core = options.core if options.core is not None else max(os.sched_getaffinity(0))
        recording = record(options.triples or options.trials * options.runs, options.stage, core, options.clock)
    if options.save:
        options.save.write_text(json.dumps(recording))
    print(table(recording, options.trials, options.runs))


def record(num_triples: int, stage: str, core: int, clock_name: str) -> Recording:
    """Time end to end and the stage, in ms, for each side: [side][triple]."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    pipeline = diffusion.build()
    site = resolve_site(pipeline, stage)
    assert site.is_module, "the wait is put around a module's forward"
    clock = CLOCKS[clock_name]
    wait = Wait(site.owner.forward, clock)
    site.owner.forward = functools.wraps(wait.original)(wait)
    timer = StageTimer(clock, torch.device("cpu"))

    def timed() -> tuple[float, float, float]:
        with instrument([site], timer):
            start_ns = clock()
            pipeline(**INPUTS, output_type="np", generator=torch.Generator().manual_seed(0))
            total_ns = clock() - start_ns
        calls = [call.duration_ns for call in timer.take()]
        return total_ns / 1e6, sum(calls) / 1e6, float(np.median(calls))

    for _ in range(5):
        timed()
    wait_ns = SLOWDOWN * float(np.median([timed()[2] for _ in range(20)]))
    load_before = os.getloadavg()[0]
    began_s = time.time()
    total_ms: dict[str, list[float]] = {side: [] for side in SIDES}
    stage_ms: dict[str, list[float]] = {side: [] for side in SIDES}
    orders = list(itertools.permutations(SIDES))
    for index in range(num_triples):
        for side in orders[index % len(orders)]:
            wait.duration_ns = wait_ns if side == "P" else 0.0
            total, own, _ = timed()
            total_ms[side].append(total)
            stage_ms[side].append(own)
    return {
        "machine": {
            "cpu": collect_environment({}).cpu,
            "cores": os.cpu_count(),
            "core": core,
            "clock": clock_name,
            "load_average": [round(load_before, 1), round(os.getloadavg()[0], 1)],
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "numpy", "scipy", "diffusers")},
        },
        "stage": stage,
        "wait_us_per_call": round(wait_ns / 1000, 1),
        "recorded_s": round(time.time() - began_s),
        "total_ms": total_ms,
        "stage_ms": stage_ms,
    }


class Wait:
    """Calls the original, and then keeps the core busy for `duration_ns`."""

    def __init__(self, original: Callable[..., Any], clock: Callable[[], int]) -> None:
        self.original = original
        self.clock = clock
        self.duration_ns = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One call of the stage."""
        result = self.original(*args, **kwargs)
        end_ns = self.clock() + self.duration_ns
        while self.clock() < end_ns:
            pass
        return result


def table(recording: Recording, trials: int, runs: int) -> str:
    """Shares of verdicts over the trials, with what the noise was like."""
    num_triples = len(recording["total_ms"]["A"])
    starts = np.linspace(0, num_triples - runs, trials).round().astype(int)
    lines = [f"{key}: {value}" for key, value in recording["machine"].items()]
    share = np.median(recording["stage_ms"]["A"]) / np.median(recording["total_ms"]["A"])
    lines += [
        f"stage: {recording['stage']}, {share:.0%} of the run, slowed by {recording['wait_us_per_call']} us a call",
        f"{trials} trials of {runs} runs a side, from {num_triples} triples recorded in {recording['recorded_s']} s "
        f"({num_triples // runs} stretches that share no run)",
        "",
        "| samples | median ms | CV | lag-1 | A/A different (goal <= 5 %) | P slower | median interval half-width "
        "| median detectable | P / A |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, label in (("total_ms", "end to end"), ("stage_ms", f"{recording['stage']} (goal: P slower >= 95 %)")):
        sides = {side: np.array(values) for side, values in recording[name].items()}
        same, planted = ([_compare(sides["A"], sides[other], start, runs) for start in starts] for other in ("A'", "P"))
        first = sides["A"]
        spread = f"{first.std() / first.mean():.1%} | {lag1_autocorrelation(first):.2f}"
        widths = [(c.interval.high / c.interval.low) ** 0.5 - 1 for c in same if c.interval]
        lines.append(
            f"| {label} | {np.median(first):.2f} | {spread} "
            f"| {np.mean([c.verdict in ('faster', 'slower') for c in same]):.1%} "
            f"| {np.mean([c.verdict == 'slower' for c in planted]):.1%} | {np.median(widths):.1%} "
            f"| {np.median([c.minimum_detectable_difference for c in same]):.1%} "
            f"| {np.median(sides['P']) / np.median(first):.3f} |"
        )
    return "\n".join(lines)


def _compare(baseline: np.ndarray, candidate: np.ndarray, start: int, runs: int) -> Any:
    stretch = slice(start, start + runs)
    sides = (Samples(launches=[side[stretch].tolist()]) for side in (baseline, candidate))
    return compare_samples(*sides, interleaved=True)


if __name__ == "__main__":
    main()
