"""Times the analysis of one profiler window against torch's own first `key_averages()`, each in a fresh process.

    python tests/benchmarks/bench_trace.py                       # 150 k and 1 M events
    python tests/benchmarks/bench_trace.py --events 150000 --repeats 5
    python tests/benchmarks/bench_trace.py --workload diffusion-sd15 --set inputs.num_inference_steps=5

The window is of a chain of small modules that gives so many events, or of ten runs of a workload with marked stages.

Three measurements, each the median over `--repeats` processes, all of one thread on the CPU:

- ours: export of the finished window, read, attribution to regions, operator, kernel and timeline tables;
- torch: the first `key_averages()` of an identical window (a second call would be several times cheaper);
- reader: a separate process that imports perfladder's trace reader, reads the file and makes the same tables; its wall
  time includes the interpreter's start and all imports.

`speedup` compares wall times, `speedup_without_export` leaves out torch's own writing of the file, `speedup_cpu` the
processor times of the same calls, which a busy machine disturbs less.
Prints a line of JSON for each number of events. Nothing is asserted; the goals are printed beside the numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

SPEEDUP_GOAL = 15.0
READER_GOAL = {"wall_s": 5.0, "peak_rss_mb": 1000.0}  # for 1 M events
EXTRA_RSS_GOAL_MB = 150.0
RUNS = 10


def main() -> None:
    """Parse the arguments and run either the whole benchmark or one of its child processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, nargs="+", default=[150_000, 1_000_000])
    parser.add_argument("--workload", help="a file, or the name of a built-in; in place of --events")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="of the workload")
    parser.add_argument("--repeats", type=int, default=3, help="processes for each measurement")
    parser.add_argument("--torch-repeats", type=int, help="processes for torch's side; default: as --repeats")
    parser.add_argument("--child", choices=["ours", "torch", "reader"], help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        window = partial(_profiled_window, options.events[0])
        if options.workload:
            window = partial(_pipeline_window, options.workload, options.set)
        print(json.dumps(CHILDREN[options.child](options.path, window)))
        return
    print(json.dumps(_machine()), flush=True)
    windows = [["--events", str(num_events)] for num_events in options.events]
    if options.workload:
        windows = [["--workload", options.workload, *(word for text in options.set for word in ("--set", text))]]
    for window in windows:
        print(json.dumps(_measure(window, options.repeats, options.torch_repeats or options.repeats)), flush=True)


def _measure(window: list[str], repeats: int, torch_repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        ours = [_child("ours", path, window) for _ in range(repeats)]
        reader = [_child("reader", path, window) for _ in range(repeats)]
        trace_mb = path.stat().st_size / 1e6
        torch_side = [_child("torch", path, window) for _ in range(torch_repeats)]
    ours_s, torch_s = _median(ours, "total_s"), _median(torch_side, "key_averages_s")
    return {
        "num_events": ours[0]["num_events"],
        "trace_mb": round(trace_mb, 1),
        "ours_s": {key: _median(ours, key) for key in ours[0] if key.endswith("_s")},
        "torch_s": torch_s,
        "torch_samples_s": [sample["key_averages_s"] for sample in torch_side],
        "torch_cpu_s": _median(torch_side, "key_averages_cpu_s"),
        "speedup": round(torch_s / ours_s, 1),
        "speedup_without_export": round(torch_s / (ours_s - _median(ours, "export_s")), 1),
        "speedup_cpu": round(_median(torch_side, "key_averages_cpu_s") / _median(ours, "total_cpu_s"), 1),
        "speedup_goal": SPEEDUP_GOAL,
        "extra_rss_mb": _median(ours, "extra_rss_mb"),
        "extra_rss_goal_mb": EXTRA_RSS_GOAL_MB,
        "torch_extra_rss_mb": _median(torch_side, "extra_rss_mb"),
        "reader": {key: _median(reader, key) for key in ("wall_s", "read_s", "peak_rss_mb")},
        "reader_goal": READER_GOAL,
    }


def _median(samples: list[dict[str, float]], key: str) -> float:
    return round(statistics.median(sample[key] for sample in samples), 3)


def _child(name: str, path: Path, window: list[str]) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", name, "--path", str(path), *window]
    roots = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": roots, "KINETO_LOG_LEVEL": "99"}
    begin = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    wall_s = time.perf_counter() - begin
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{"))
    return json.loads(line) | {"wall_s": wall_s}


def _profiled_window(num_events: int) -> Any:
    """Return a stopped profiler with about `num_events` spans: `RUNS` runs of nested modules, labelled as ours are."""
    import torch

    from perfladder.trace.labels import RUN_KIND
    from perfladder.trace.record import span

    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.GroupNorm(2, 4), torch.nn.SiLU())
        for _ in range(10)
    ]
    x = torch.randn(1, 4, 8, 8)

    def step() -> None:
        with span("untuned_module", "unet"):
            y = x
            for index, block in enumerate(blocks):
                with span("untuned_module", f"unet.blocks.{index}"):
                    y = block(y)

    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.no_grad():
        with torch.profiler.profile(activities=activities) as probe:
            step()
        steps = max(1, round(num_events / RUNS / len(probe.profiler.kineto_results.events())))
        with torch.profiler.profile(activities=activities) as profiler:
            for run in range(RUNS):
                with span(RUN_KIND, str(run)):
                    for _ in range(steps):
                        step()
                    (x * 2).mean().item()
    return profiler


def _pipeline_window(name: str, changes: list[str]) -> Any:
    """Return a stopped profiler with `RUNS` runs of a workload, whose stages are labelled as ours are."""
    import torch

    from perfladder.changes import with_changes
    from perfladder.instrument import instrument
    from perfladder.profiling.observers import Annotator
    from perfladder.sites import stage_sites
    from perfladder.target import LoadedTarget
    from perfladder.trace.labels import RUN_KIND
    from perfladder.trace.record import span
    from perfladder.workload import load_workload

    file = with_changes(load_workload(name), changes, source=name)
    loaded = LoadedTarget(file.workload, file.base_dir)
    loaded.load()
    for _ in range(3):
        loaded.run()
    loaded.synchronize()
    kinds = {"cpu": torch.profiler.ProfilerActivity.CPU, "cuda": torch.profiler.ProfilerActivity.CUDA}
    with (
        torch.profiler.profile(activities=[kinds[one] for one in loaded.activities]) as profiler,
        instrument(stage_sites(loaded.obj), Annotator()),
    ):
        for run in range(RUNS):
            loaded.prepare_run()
            with span(RUN_KIND, str(run)):
                loaded.run()
                loaded.synchronize()
    return profiler


def _analyse(path: Path) -> tuple[Any, dict[str, float]]:
    """Read a trace and make all tables; return the trace and the seconds each part took."""
    from perfladder.trace.attribution import attribute
    from perfladder.trace.kernels import list_kernels, summarize_kernels
    from perfladder.trace.model import Trace
    from perfladder.trace.operators import key_averages
    from perfladder.trace.regions import report_regions
    from perfladder.trace.timeline import report_timeline

    times = {}
    begin = time.perf_counter()
    trace = Trace.read(path)
    times["read_s"] = time.perf_counter() - begin
    attribution = attribute(trace)
    times["attribute_s"] = time.perf_counter() - begin - times["read_s"]
    report = report_regions(trace, attribution)
    views = key_averages(trace)
    kernels = summarize_kernels(list_kernels(trace, attribution))
    report_timeline(trace)
    times["tables_s"] = time.perf_counter() - begin - times["read_s"] - times["attribute_s"]
    assert len(report.runs) == RUNS
    assert views["cpu_time_total"]
    assert kernels
    return trace, times


def _ours(path: Path, window: Callable[[], Any]) -> dict[str, float]:
    profiler = window()
    import perfladder.trace.kernels
    import perfladder.trace.operators
    import perfladder.trace.read
    import perfladder.trace.regions
    import perfladder.trace.timeline  # noqa: F401 - imports are no part of the analysis

    before_mb = _rss_mb()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    profiler.export_chrome_trace(str(path))
    export_s = time.perf_counter() - begin
    trace, times = _analyse(path)
    total_s, total_cpu_s = time.perf_counter() - begin, time.process_time() - cpu_begin
    return {
        "num_events": trace.num_events,
        "export_s": export_s,
        "total_s": total_s,
        "total_cpu_s": total_cpu_s,
        "extra_rss_mb": _peak_rss_mb() - before_mb,
    } | times


def _torch(path: Path, window: Callable[[], Any]) -> dict[str, float]:
    del path
    profiler = window()
    before_mb = _rss_mb()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    profiler.key_averages()
    times = {"key_averages_s": time.perf_counter() - begin, "key_averages_cpu_s": time.process_time() - cpu_begin}
    return times | {"extra_rss_mb": _peak_rss_mb() - before_mb}


def _reader(path: Path, window: Callable[[], Any]) -> dict[str, float]:
    del window
    _, times = _analyse(path)
    return {"read_s": times["read_s"], "peak_rss_mb": _peak_rss_mb()}


def _rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def _peak_rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def _machine() -> dict[str, Any]:
    import msgspec
    import numpy
    import torch

    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "cpu": model,
        "num_cpus": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "msgspec": msgspec.__version__,
    }


CHILDREN = {"ours": _ours, "torch": _torch, "reader": _reader}

if __name__ == "__main__":
    main()
