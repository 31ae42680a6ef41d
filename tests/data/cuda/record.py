"""Records the traces beside this file on a CUDA device: `python tests/data/cuda/record.py FOLDER`.

Each window is recorded with `record_window`; beside its trace stand the rows of torch's own `key_averages()` on that
window, and what was known about it from outside (how long a replay took by CUDA events, how many bytes were copied).
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

from perfladder import _torch_private
from perfladder.trace import record
from perfladder.trace.record import record_window, span

REGION = "untuned_module"
DEVICE = "cuda"


class Net(nn.Module):
    """A convolution, an attention and a linear layer on [B, C, H, W]; `mark` opens spans around them."""

    def __init__(self, channels: int = 32, mark: Callable[[str, str], Any] = span) -> None:
        super().__init__()
        self.mark = mark
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.mark(REGION, "net.conv"):
            x = F.silu(self.conv(x))
        with self.mark(REGION, "net.attention"):
            q, k, v = self.qkv(x.flatten(2).transpose(1, 2)).chunk(3, dim=-1)
            y = F.scaled_dot_product_attention(*(t.unsqueeze(1) for t in (q, k, v))).squeeze(1)
        with self.mark(REGION, "net.out"):
            return self.out(y)


def record_eager(window: Callable[..., Any]) -> dict[str, Any]:
    """Copies in and out, a wait by `.item()` between modules, a fill and glue outside any region."""
    net, host = Net().to(DEVICE).eval(), torch.randn(2, 32, 16, 16).pin_memory()

    def run() -> None:
        x = host.to(DEVICE, non_blocking=True)
        with span(REGION, "net"):
            y = net(x)
        if y.abs().sum().item() < 0:
            raise AssertionError
        (y * 2 + torch.zeros_like(y)).cpu()

    with torch.no_grad():
        run()
        with window():
            for index in range(3):
                with span("profiled_run", str(index)):
                    run()
    return {"num_runs": 3, "host_to_device_bytes": 2 * 32 * 256 * 4, "device_to_host_bytes": 2 * 32 * 256 * 4}


def record_graph(window: Callable[..., Any]) -> dict[str, Any]:
    """Replays of one captured graph, beside a plain kernel; also timed with CUDA events, unprofiled."""
    net, x = Net().to(DEVICE).eval(), torch.randn(2, 32, 16, 16, device=DEVICE)
    graph, begin, end = torch.cuda.CUDAGraph(), torch.cuda.Event(True), torch.cuda.Event(True)
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                net(x)
        side.synchronize()
        with torch.cuda.graph(graph):
            y = net(x)
        graph.replay()
        torch.cuda.synchronize()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        replay_us = begin.elapsed_time(end) * 1e3
        with window():
            for index in range(3):
                with span("profiled_run", str(index)):
                    with span(REGION, "net"):
                        graph.replay()
                    y.add(1).sum().item()
    return {"num_runs": 3, "replay_us_by_events": replay_us}


def record_compiled(window: Callable[..., Any]) -> dict[str, Any]:
    """A compiled module: Triton kernels from one call of compiled code, which a span inside would break."""
    net, x = Net(mark=lambda *_: nullcontext()).to(DEVICE).eval(), torch.randn(2, 32, 16, 16, device=DEVICE)
    compiled = torch.compile(net)
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
        with window():
            for index in range(3):
                with span("profiled_run", str(index)), span(REGION, "net"):
                    compiled(x)
    return {"num_runs": 3}


def record_annotated(window: Callable[..., Any]) -> dict[str, Any]:
    """No label of ours: the program's own `record_function`, which is a row on the device's timeline too."""
    x = torch.randn(512, 512, device=DEVICE)

    def run() -> None:
        for name in ("encode", "decode", "encode"):
            with torch.profiler.record_function(name):
                x.mm(x).relu_()
                torch.cuda._sleep(20_000)
                x.add(1)
        torch.cuda.synchronize()

    with torch.no_grad():
        run()
        with window():
            run()
    return {"calls": {"encode": 2, "decode": 1}}


def record_streams(window: Callable[..., Any]) -> dict[str, Any]:
    """Two streams that work at the same time: busy time is less than the sum of the kernels."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    x = [torch.randn(256, 256, device=DEVICE) for _ in streams]

    def run() -> None:
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream), span(REGION, f"stream{index}"):
                torch.cuda._sleep(200_000)
                torch.mm(x[index], x[index])
        for stream in streams:
            stream.synchronize()

    with torch.no_grad():
        run()
        with window():
            for index in range(3):
                with span("profiled_run", str(index)):
                    run()
    return {"num_runs": 3, "num_streams": 2}


def record_backward(window: Callable[..., Any]) -> dict[str, Any]:
    """Forward under a region; backward first outside every region, then under one."""
    net, x = Net().to(DEVICE), torch.randn(2, 32, 16, 16, device=DEVICE)

    def forward() -> torch.Tensor:
        with span(REGION, "net"):
            return net(x).square().mean()

    forward().backward()
    with window():
        with span("profiled_run", "0"):
            forward().backward()
            torch.cuda.synchronize()
        with span("profiled_run", "1"), span(REGION, "train"):
            forward().backward()
            torch.cuda.synchronize()
    return {"num_runs": 2}


def record_threads(window: Callable[..., Any]) -> dict[str, Any]:
    """Another thread launches work during the run; all threads are recorded."""
    x = torch.randn(64, 64, device=DEVICE)

    def work() -> None:
        with torch.no_grad(), span(REGION, "worker"):
            for _ in range(3):
                torch.mm(x, x)

    work()
    with window(all_threads=True):
        for index in range(2):
            with span("profiled_run", str(index)):
                with span(REGION, "main"):
                    torch.add(x, 1)
                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
                torch.cuda.synchronize()
    return {"num_runs": 2}


SCENES = {
    "eager": record_eager,
    "graph": record_graph,
    "compiled": record_compiled,
    "annotated": record_annotated,
    "streams": record_streams,
    "backward": record_backward,
    "threads": record_threads,
}


def _row(row: Any) -> dict[str, Any]:
    fields = ("key", "count", "cpu_time_total", "self_cpu_time_total", "device_time_total", "self_device_time_total")
    return {name: getattr(row, name) for name in fields} | {
        "device_type": row.device_type.name,
        "is_annotation": bool(getattr(row, "is_user_annotation", False)),
    }


def _record(folder: Path, name: str) -> None:
    made: list[torch.profiler.profile] = []
    make, configure = record._make_profiler, _torch_private.make_profiler_config

    def keep(*args: Any, **options: Any) -> torch.profiler.profile:
        made.append(make(*args, **options))
        return made[-1]

    def keep_events(*, all_threads: bool, trace_only: bool) -> Any:
        return configure(all_threads=all_threads, trace_only=False)  # else torch's own rows cannot be had

    path = folder / f"{name}.json.gz"
    with (
        mock.patch.object(record, "_make_profiler", keep),
        mock.patch.object(_torch_private, "make_profiler_config", keep_events),
    ):
        facts = SCENES[name](lambda **options: record_window(path, device=DEVICE, **options))
    rows = [_row(row) for row in made[-1].key_averages()]
    made_on = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }
    (folder / f"{name}.torch.json").write_text(json.dumps(made_on | {"facts": facts, "rows": rows}, indent=0))


def _driver() -> str:
    import pynvml

    pynvml.nvmlInit()
    return str(pynvml.nvmlSystemGetDriverVersion())


def main() -> None:
    """Record every scene, or those that are named after the folder."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    for name in sys.argv[2:] or SCENES:
        _record(folder, name)
        print(name, (folder / f"{name}.json.gz").stat().st_size, flush=True)


if __name__ == "__main__":
    main()
