"""Run directories whose times a test sets: really measured, of parts that move the clock by what they should take."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from perfladder.environment import GitState, Snapshot
from perfladder.ladder import rung_named
from perfladder.rundir import RunDirectory
from perfladder.rungs.base import RungResult
from perfladder.rungs.stages import StagesRequest, measure
from perfladder.target import LoadedTarget
from perfladder.timing.launches import merge_launches
from perfladder.workload import parse_workload

IDLE = Snapshot(load_average_1m=0.1, num_cpus=2, available_memory_bytes=1, torch_threads=1)


class Clock:
    """Nanoseconds that pass only when a part says so."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class Part(nn.Module):
    """Takes `ms`, more or less."""

    def __init__(self, clock: Clock, ms: float, generator: random.Random, noise: float) -> None:
        super().__init__()
        self.clock, self.ms, self.generator, self.noise = clock, ms, generator, noise
        self.pace = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.now_ns += round(1e6 * self.ms * self.pace * (1 + self.noise * self.generator.uniform(-1, 1)))
        return x


class Pipe:
    """Calls its parts one after the other."""

    def __init__(self, clock: Clock, parts: Mapping[str, float], seed: int, noise: float) -> None:
        generator = random.Random(seed)
        self.clock = clock
        self.names = list(parts)
        for name, ms in parts.items():
            setattr(self, name, Part(clock, ms, generator, noise))

    def __call__(self, width: int = 4) -> torch.Tensor:
        x = torch.ones(1, width)
        for name in self.names:
            x = getattr(self, name)(x)
        self.clock.now_ns += 1_000_000
        return x


def clocked_run(
    root: Path,
    parts: Mapping[str, float],
    *,
    launches: int = 5,
    seed: int = 0,
    noise: float = 0.02,
    commit: str | None = None,
    dirty: bool = False,
    further: tuple[RungResult, ...] = (),
    **fields: Any,
) -> Path:
    """Measure parts that take so many ms in several launches, and write the run; 1 ms is outside every part."""
    data = {"name": "clocked", "target": "pipe.py:build", "device": "cpu", "warmup_runs": 1, "measured_runs": 10}
    workload = parse_workload({**data, "launches": launches, **fields})
    run = RunDirectory.create(root, workload, source="clocked.yaml", base_dir=root)
    results = []
    for number in range(launches):
        clock = Clock()
        loaded = LoadedTarget.of(Pipe(clock, parts, 100 * seed + number, noise), workload)
        result = measure(loaded, StagesRequest(), clock=clock)
        # What else this machine does is none of the test's.
        results.append(result.model_copy(update={"snapshot_before": IDLE, "snapshot_after": IDLE, "warnings": []}))
    info = loaded.info({})
    git = GitState(commit=commit, dirty=dirty)
    prints = type(info.fingerprints).of(workload, **git.as_configuration())
    (run.path / "environment.json").write_text(
        info.model_copy(update={"git": git, "fingerprints": prints}).model_dump_json()
    )
    for result in (merge_launches(results), *further):
        rung = rung_named(result.rung)
        run.write_result(run.rung_folder(rung.number, rung.name), rung.name, result, "done", None)
    run.update(status="done", exit_code=0)
    return run.path
