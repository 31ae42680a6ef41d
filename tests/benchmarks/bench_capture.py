"""What capture and replay cost, and how near a replay comes to the pipeline.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_capture.py io --gib 1
    OMP_NUM_THREADS=1 python tests/benchmarks/bench_capture.py armed --pairs 200
    OMP_NUM_THREADS=1 python tests/benchmarks/bench_capture.py replay --workload diffusion --stage unet --launches 3

`io`: bytes a second of writing a capture (sums and flush to disk included) and of reading it, beside plain writing
with a flush, plain SHA-256 and a plain read of the same bytes, in turn (goal: 1 GB/s, or 80 % of the slower of disk and
sum). Writing and summing are two threads: do not pin it to one core.

`armed`: runs of the tiny diffusion pipeline in which one stage is armed for capture and no call is chosen, over bare
ones, in turn (goal: at most 1.01).

`replay`: parity and timing of captured stages, each in a fresh process (goal: exact and within 5 % on a CPU for calls
of at least 5 ms, within 3 % for the UNet of `diffusion-sd15` on a GPU).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from perfladder.capturing.api import StageBenchHarness, capture_request, capture_workload
from perfladder.capturing.encode import Encoder
from perfladder.capturing.recorder import Recorder
from perfladder.capturing.store import Manifest, read_manifest, read_storages, write_capture
from perfladder.changes import with_changes
from perfladder.instrument import instrument
from perfladder.sites import resolve_site
from perfladder.stats import Samples, compare_samples
from perfladder.target import LoadedTarget
from perfladder.timing.runs import bare_run
from perfladder.workload import load_workload, parse_workload
from perfladder.workloads import diffusion


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    io = verbs.add_parser("io")
    io.add_argument("--gib", type=float, default=1.0)
    io.add_argument("--rounds", type=int, default=3)
    io.add_argument("--folder", type=Path, help="on the disk to measure")
    armed = verbs.add_parser("armed")
    armed.add_argument("--pairs", type=int, default=200)
    replay = verbs.add_parser("replay")
    replay.add_argument("--workload", default="diffusion")
    replay.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="of the workload")
    replay.add_argument("--stage", action="append", required=True)
    replay.add_argument("--launches", type=int, default=3)
    replay.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}; torch {torch.__version__}; {torch.get_num_threads()} threads")
    {"io": _io, "armed": _armed, "replay": _replay}[options.verb](options)


def _manifest() -> Manifest:
    return Manifest(
        perfladder_version="0",
        torch_version=torch.__version__,
        stage="s",
        owner_type="o",
        device="cpu",
        work_digest="0" * 16,
        calls_per_run=1,
        calls=[],
        num_storages=0,
        sha256={},
    )


def _io(options: argparse.Namespace) -> None:
    num_bytes = int(options.gib * 2**30)
    blocks = [torch.randint(0, 255, (num_bytes // 8,), dtype=torch.uint8) for _ in range(8)]
    speeds: dict[str, list[float]] = {}

    def timed(name: str, action: Callable[[], object]) -> None:
        start = time.perf_counter()
        action()
        speeds.setdefault(name, []).append(num_bytes / 1e9 / (time.perf_counter() - start))

    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder, plain = Path(scratch) / "capture", Path(scratch) / "plain"
        for _ in range(options.rounds):
            timed("write a capture", lambda: write_capture(folder, _manifest(), blocks))
            timed("plain write and flush", lambda: _plain_write(plain, blocks))
            timed("SHA-256 of memory", lambda: [hashlib.sha256(block.numpy()).digest() for block in blocks])
            timed("read a capture", lambda: read_storages(folder, read_manifest(folder)))
            timed("plain read", lambda: _plain_read(plain))
    for name, found in speeds.items():
        print(f"{name}: {np.median(found):.2f} GB/s ({min(found):.2f} to {max(found):.2f})")
    middle = {name: float(np.median(found)) for name, found in speeds.items()}
    for name, disk in (("write a capture", "plain write and flush"), ("read a capture", "plain read")):
        print(
            f"{name}: {middle[name] / min(middle[disk], middle['SHA-256 of memory']):.0%} of the slower of disk and sum"
        )


def _plain_write(path: Path, blocks: list[torch.Tensor]) -> None:
    with path.open("wb", buffering=0) as file:
        for block in blocks:
            view = memoryview(block.numpy())
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def _plain_read(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def _armed(options: argparse.Namespace) -> None:
    inputs = {"prompt": "a lighthouse at dusk", "num_inference_steps": 4, "height": 64, "width": 64}
    workload = parse_workload({"name": "armed", "target": "in_place:object", "inputs": inputs, "device": "cpu"})
    loaded = LoadedTarget.of(diffusion.build("tiny"), workload)
    site = resolve_site(loaded.obj, "unet", field_name="stage")
    recorder = Recorder(loaded, lambda index: False, Encoder())
    sides: dict[str, list[float]] = {"armed": [], "bare": []}

    def armed() -> None:
        with instrument([site], recorder):
            sides["armed"].append(bare_run(loaded, None, time.perf_counter_ns)[0].wall_ms)

    def bare() -> None:
        sides["bare"].append(bare_run(loaded, None, time.perf_counter_ns)[0].wall_ms)

    for _ in range(5):
        bare()
    sides["bare"].clear()
    for index in range(options.pairs):
        for side in (bare, armed) if index % 2 == 0 else (armed, bare):
            side()
    samples = (Samples(launches=[sides[name]]) for name in ("armed", "bare"))
    comparison = compare_samples(*samples, interleaved=True)
    print(f"armed / bare: {comparison.speedup:.4f}, 95 % interval {comparison.interval}; {options.pairs} pairs")


def _replay(options: argparse.Namespace) -> None:
    file = with_changes(load_workload(options.workload), options.set, source=options.workload)
    for stage in options.stage:
        with tempfile.TemporaryDirectory() as scratch:
            captured = capture_workload(file, capture_request(stage, Path(scratch) / "capture"))
            if captured.status != "done":
                print(f"{stage}: {captured.reason}")
                continue
            harness = StageBenchHarness(Path(scratch) / "capture", workload=file)
            for _ in range(options.launches):
                result = harness.run(repeats=options.repeats, in_turns=True)
                interval = result.timing_ratio_interval
                per_call = [f"{call.in_pipeline_ms.summary.p50:.2f}" for call in result.calls]
                leads = [f"{call.host_lead_ms:.2f}" for call in result.calls]
                ratios = {"warm": result.warm_timing_ratio, "emptied": result.evicted_timing_ratio}
                print(
                    f"{stage}: parity {result.parity}, {result.timing_ratio:.3f} times (95 % interval "
                    f"{interval.low:.3f} to {interval.high:.3f}){' in turns' if result.in_turns else ''}, faithful in "
                    f"time: {result.is_timing_faithful}; "
                    f"{', '.join(f'{ratio:.3f} with {name} caches' for name, ratio in ratios.items() if ratio)}; "
                    f"alone {result.alone_timing_ratio or result.timing_ratio:.3f}; "
                    f"host work takes {result.host_ratio:.3f} times as long; in the pipeline {', '.join(per_call)} ms "
                    f"a call, host ahead {', '.join(leads)} ms",
                    flush=True,
                )


if __name__ == "__main__":
    main()
