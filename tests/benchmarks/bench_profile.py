"""Times how much longer `perfladder.profile` takes than its runs, on the tiny diffusion workload.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_profile.py --processes 5

Each sample is one profile in a fresh process, since the first profiler of a process costs most. The sum of the runs is
that of all calls of the pipeline, also of the uncounted one inside the profiler; the import of perfladder is not in it.
Prints one line of JSON. Nothing is asserted; the goal is printed beside the numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time

GOAL_S = 2.0


def main() -> None:
    """Parse the arguments and run the benchmark or one of its child processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure()))
        return
    command = [sys.executable, __file__, "--child"]
    samples = []
    for _ in range(options.processes):
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        samples.append(json.loads(done.stdout.splitlines()[-1]))
    beyond = [sample["beyond_runs_s"] for sample in samples]
    print(
        json.dumps(
            {
                "machine": platform.processor() or platform.machine(),
                "cpus": os.cpu_count(),
                "torch": samples[0]["torch"],
                "goal_s": GOAL_S,
                "beyond_runs_s": [round(value, 3) for value in beyond],
                "median_s": round(statistics.median(beyond), 3),
                "samples": samples,
            }
        )
    )


def measure() -> dict[str, object]:
    """Profile once, and compare with the sum of the pipeline's calls."""
    import torch

    import perfladder as pl
    from perfladder.workloads import diffusion

    pipeline = diffusion.build()
    profile = pl.profile
    runs_s: list[float] = []

    def infer(**inputs: object) -> object:
        start = time.perf_counter()
        result = pipeline(**inputs)
        runs_s.append(time.perf_counter() - start)
        return result

    inputs = {"prompt": "a lighthouse at dusk", "num_inference_steps": 4, "height": 64, "width": 64}
    start = time.perf_counter()
    found = profile(pipeline, inputs, inference_function=infer)
    wall_s = time.perf_counter() - start
    return {
        "torch": torch.__version__,
        "wall_s": round(wall_s, 3),
        "runs_s": round(sum(runs_s), 3),
        "num_runs": len(runs_s),
        "beyond_runs_s": wall_s - sum(runs_s),
        "analysis_s": found.data["profiler"]["analysis_s"],
        "num_events": found.data["profiler"]["num_events"],
        "profiled_ratio": found.data["summary"]["profiled_ratio"],
        "warnings": [warning["code"] for warning in found.data["warnings"]],
    }


if __name__ == "__main__":
    main()
