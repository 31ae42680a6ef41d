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
from perfladder.instrument import instrument, resolve_site
from perfladder.rungs.stages import StageTimer
from perfladder.stats import Samples, compare_samples, lag1_autocorrelation
from perfladder.workloads import diffusion

SLOWDOWN = 0.05
SIDES = ("A", "A'", "P")
INPUTS = {"prompt": "a lighthouse at dusk", "num_inference_steps": 4, "height": 64, "width": 64}
Recording = dict[str, Any]


def main() -> None:
    """Record, or read a recording, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--runs", type=int, default=20, help="a side and trial")
    parser.add_argument("--triples", type=int, help="to record; default: trials x runs")
    parser.add_argument("--stage", default="unet", help="call site of the module that is made slower")
    parser.add_argument("--core", type=int, help="to pin the process to; default: the last one it may use")
    parser.add_argument("--save", type=Path, help="write the recording here")
    parser.add_argument("--read", type=Path, help="judge this recording, record nothing")
    options = parser.parse_args()
    if options.read:
        recording = json.loads(options.read.read_text())
    else:
        core = options.core if options.core is not None else max(os.sched_getaffinity(0))
        recording = record(options.triples or options.trials * options.runs, options.stage, core)
    if options.save:
        options.save.write_text(json.dumps(recording))
    print(table(recording, options.trials, options.runs))


def record(num_triples: int, stage: str, core: int) -> Recording:
    """Time end to end and the stage, in ms, for each side: [side][triple]."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    pipeline = diffusion.build()
    site = resolve_site(pipeline, stage)
    assert site.is_module, "the wait is put around a module's forward"
    wait = Wait(site.owner.forward)
    site.owner.forward = functools.wraps(wait.original)(wait)
    timer = StageTimer(time.perf_counter_ns, torch.device("cpu"))

    def timed() -> tuple[float, float, float]:
        with instrument([site], timer):
            start_ns = time.perf_counter_ns()
            pipeline(**INPUTS, output_type="np", generator=torch.Generator().manual_seed(0))
            wall_ns = time.perf_counter_ns() - start_ns
        calls = [call.duration_ns for call in timer.take()]
        return wall_ns / 1e6, sum(calls) / 1e6, float(np.median(calls))

    for _ in range(5):
        timed()
    wait_ns = SLOWDOWN * float(np.median([timed()[2] for _ in range(20)]))
    load_before = os.getloadavg()[0]
    began_s = time.time()
    wall_ms: dict[str, list[float]] = {side: [] for side in SIDES}
    stage_ms: dict[str, list[float]] = {side: [] for side in SIDES}
    orders = list(itertools.permutations(SIDES))
    for index in range(num_triples):
        for side in orders[index % len(orders)]:
            wait.duration_ns = wait_ns if side == "P" else 0.0
            wall, own, _ = timed()
            wall_ms[side].append(wall)
            stage_ms[side].append(own)
    return {
        "machine": {
            "cpu": collect_environment({}).cpu,
            "cores": os.cpu_count(),
            "core": core,
            "load_average": [round(load_before, 1), round(os.getloadavg()[0], 1)],
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "numpy", "scipy", "diffusers")},
        },
        "stage": stage,
        "wait_us_per_call": round(wait_ns / 1000, 1),
        "recorded_s": round(time.time() - began_s),
        "wall_ms": wall_ms,
        "stage_ms": stage_ms,
    }


class Wait:
    """Calls the original, and then keeps the core busy for `duration_ns`."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.duration_ns = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One call of the stage."""
        result = self.original(*args, **kwargs)
        end_ns = time.perf_counter_ns() + self.duration_ns
        while time.perf_counter_ns() < end_ns:
            pass
        return result


def table(recording: Recording, trials: int, runs: int) -> str:
    """Shares of verdicts over the trials, with what the noise was like."""
    num_triples = len(recording["wall_ms"]["A"])
    starts = np.linspace(0, num_triples - runs, trials).round().astype(int)
    lines = [f"{key}: {value}" for key, value in recording["machine"].items()]
    share = np.median(recording["stage_ms"]["A"]) / np.median(recording["wall_ms"]["A"])
    lines += [
        f"stage: {recording['stage']}, {share:.0%} of the run, slowed by {recording['wait_us_per_call']} us a call",
        f"{trials} trials of {runs} runs a side, from {num_triples} triples recorded in {recording['recorded_s']} s "
        f"({num_triples // runs} stretches that share no run)",
        "",
        "| samples | median ms | CV | lag-1 | A/A different (goal <= 5 %) | P slower | median interval half-width "
        "| median detectable | P / A |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, label in (("wall_ms", "end to end"), ("stage_ms", f"{recording['stage']} (goal: P slower >= 95 %)")):
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
