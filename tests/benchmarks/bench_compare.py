"""How often two processes of the same code are called different, and a slower one slower, when both take turns.

    OMP_NUM_THREADS=1 taskset -c 1 python tests/benchmarks/bench_compare.py --trials 40
    OMP_NUM_THREADS=1 taskset -c 1 python tests/benchmarks/bench_compare.py --trials 40 --layers 40 --launches 3

`bench_stats.py` asks the same of the statistics, within one process. Here each trial loads both sides anew, so that
what differs from process to process (addresses, the allocator) is among the noise. A trial compares a stack of layers
with itself (goal: called different in at most 5 %), and with one of 5 % more layers.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

from perfladder.comparing.interleave import Version, compare_interleaved
from perfladder.comparing.judge import Judge
from perfladder.comparing.model import RunComparison, Where
from perfladder.stats import compare_samples
from perfladder.workload import WorkloadFile, parse_workload

SOURCE = """
import torch

class Stack:
    def __init__(self, layers):
        self.net = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(layers)])

    def __call__(self):
        return self.net(torch.ones(64, 256))

def build():
    return Stack(LAYERS)
"""
SLOWDOWN = 1.05
EFFECTS = (0.0, 0.02)
WHERE: Final[tuple[Where, Where]] = ("baseline", "candidate")


def main() -> None:
    """Run the trials and print the rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--launches", type=int, default=6)
    parser.add_argument("--only", choices=["same", "slower"], help="one of the two kinds of trial")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        layers = {"same": arguments.layers, "slower": round(arguments.layers * SLOWDOWN)}
        files = {kind: _write(Path(scratch) / kind, count, arguments.launches) for kind, count in layers.items()}
        for kind in [arguments.only] if arguments.only else list(files):
            told: dict[str, Counter[str]] = {}
            for number in range(arguments.trials):
                comparison = compare_interleaved(
                    Version(files["same"], "baseline"), Version(files[kind], kind), pairs=arguments.pairs
                )
                for way, verdict in _judged(comparison).items():
                    told.setdefault(way, Counter())[verdict] += 1
                print(number, round(comparison.metric.speedup or 0, 4), comparison.metric.interval, flush=True)
            for way, counts in told.items():
                print(f"{kind}, {way}: {dict(counts)}", flush=True)


def _judged(comparison: RunComparison) -> dict[str, str]:
    """The verdict with the pair of processes as the unit, as it counts, and with the pair of runs."""
    sides = [comparison.measured[where].default.wall_ms for where in WHERE]
    found = {}
    for effect in EFFECTS:
        by_launch = Judge(interleaved=True, min_effect=effect).change("wall", sides[0], sides[1])
        by_run = compare_samples(sides[0], sides[1], interleaved=True, min_effect=effect)
        found[f"processes, min effect {effect:.0%}"] = by_launch.verdict
        found[f"runs, min effect {effect:.0%}"] = by_run.verdict
    return found


def _write(folder: Path, layers: int, launches: int) -> WorkloadFile:
    folder.mkdir()
    (folder / "stack.py").write_text(SOURCE.replace("LAYERS", str(layers)))
    data = {"name": "stack", "target": "stack.py:build", "device": "cpu", "warmup_runs": 3, "launches": launches}
    return WorkloadFile(parse_workload(data), folder)


if __name__ == "__main__":
    main()
