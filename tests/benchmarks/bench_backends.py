"""ONNX Runtime and Inductor against eager, and how often a strategy's choice agrees with a measurement of its own.

    OMP_NUM_THREADS=1 taskset -c 0 python tests/benchmarks/bench_backends.py
    OMP_NUM_THREADS=1 taskset -c 0 python tests/benchmarks/bench_backends.py --model unet --pairs 400 --repeats 10

Each backend is built once. Its speedup is measured in pairs with the plain module, and so is the plain module with
itself: what the noise of this machine alone shows. Then a tuning with these same builds is repeated; a choice agrees if
it is the fastest in the measurement, or if pairs of the two tell no difference beyond the noise. Prints one table.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from bench_tune import collate, encoder, unet
from torch import nn

import perfladder as pl
from perfladder.backend import Backend, BackendConfig, BuildRequest, Built, find_backend
from perfladder.stats import Comparison
from perfladder.tuning.measure import Meter, NumStepsMeasuringStopStrategy, measure_pairs
from perfladder.tuning.module import control_of
from perfladder.tuning.samples import Sample

NAMES = ("onnxruntime", "inductor_aot", "inductor_jit")
PLAIN = "eager"
CPU = torch.device("cpu")
_LENGTH = 32

builds: dict[str, Built] = {}


class BuiltBeforeConfig(BackendConfig):
    """Which build."""

    of: str


class BuiltBefore(Backend):
    """Gives a build that is there already, so that choices differ by their measurements alone."""

    name = "bench_built_before"
    config_class: ClassVar = BuiltBeforeConfig
    is_isolated = False

    def compile(self, request: BuildRequest) -> Built:
        """The build."""
        return builds[self.config.of]


def minilm() -> tuple[nn.Module, list[Any]]:
    """The encoder of the embedding workload, and sentences of 32 tokens."""
    from perfladder.workloads import embedding

    embedder = embedding.build()
    torch.manual_seed(0)
    ids = torch.randint(1000, 20000, (4, _LENGTH))
    return embedder.model, [{"input_ids": one, "attention_mask": torch.ones_like(one)} for one in ids]


MODELS: dict[str, Callable[[], tuple[nn.Module, list[Any]]]] = {"minilm": minilm, "unet": unet, "encoder": encoder}


@dataclass(frozen=True)
class Bench:
    """One model: its wrapper, its dataset, and what is measured."""

    wrapper: Any
    dataset: Any
    batch_size: int
    pairs: int

    @property
    def sample(self) -> Sample:
        """A recorded call of the batch size."""
        recording = control_of(self.wrapper).recording
        assert recording is not None, "it was recorded"
        return next(one for one in recording.samples["0"] if one.batch_size == self.batch_size)

    def compare(self, baseline: Callable[..., Any], candidate: Callable[..., Any], min_effect: float) -> Comparison:
        """Pairs of two calls, in turns."""
        return measure_pairs(
            Meter(CPU),
            baseline,
            candidate,
            self.sample,
            batch_size=self.batch_size,
            stop=NumStepsMeasuringStopStrategy(self.pairs),
            min_effect=min_effect,
            changes_inputs=False,
        ).comparison

    def choice(self, names: list[str]) -> str:
        """What a tuning with the builds takes, by its own measurement."""
        profiling = pl.ProfilingConfig(batch_sizes=[self.batch_size])
        strategy = pl.MaxThroughputStrategy([BuiltBefore(of=name) for name in names], profiling)
        control_of(self.wrapper).strategy = strategy
        report = pl.tune(self.wrapper, self.dataset, batch_sizes=[1, self.batch_size], clear_cache=True)
        decision = report.modules[0].graphs[0].decision
        assert decision is not None, report.describe()
        return next((name for name in names if repr(name) in decision.selected), PLAIN)


def prepared(model: str, batch_size: int, pairs: int) -> Bench:
    """The model, recorded at batches of 1 and of the asked size."""
    module, samples = MODELS[model]()
    dataset: Any = samples
    if model == "unet":
        dataset = pl.DataLoaderFactory(samples * batch_size, collate_fn=collate)
    wrapper = pl.Module(module, model, strategy=pl.OneBackendStrategy(find_backend(PLAIN)()))
    pl.tune(wrapper, dataset, batch_sizes=[1, batch_size], dry_run=True)
    return Bench(wrapper, dataset, batch_size, pairs)


def build_all(bench: Bench, folder: Path) -> dict[str, str]:
    """Build each backend once; returns why some are not there."""
    control = control_of(bench.wrapper)
    assert control.recording is not None, "it was recorded"
    graph, samples = control.recording.table.graphs[0], control.recording.samples["0"]
    absent: dict[str, str] = {}
    for name in NAMES:
        backend = find_backend(name)()
        reason = backend.why_not(CPU) or backend.why_not_for(control.inner) or backend.why_not_for_graph(graph)
        if reason is None:
            (folder / name).mkdir()
            try:
                request = BuildRequest(control.inner, control.plain, graph, samples, CPU, folder / name)
                builds[name] = backend.build(request)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            absent[name] = reason
    return absent


def row(*cells: object) -> None:
    """One row of the table."""
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def told(comparison: Comparison) -> tuple[str, str, str]:
    """Speedup, interval and verdict."""
    assert comparison.speedup is not None, comparison.reason
    interval = comparison.interval
    ends = f"{interval.low:.3f} to {interval.high:.3f}" if interval is not None else "-"
    return f"{comparison.speedup:.3f}", ends, comparison.verdict


def main() -> None:
    """Build, measure, choose again and again, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*MODELS, "all"], default="all", help="encoder is a small one, to try this")
    parser.add_argument("--repeats", type=int, default=10, help="Choices of the strategy")
    parser.add_argument("--pairs", type=int, default=200, help="Of the measurement; a choice has 20")
    parser.add_argument("--batch-size", type=int, default=2)
    options = parser.parse_args()
    if options.batch_size < 2 or options.pairs < 2:
        parser.error("--batch-size and --pairs have to be from 2 up")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    row("model", "backend", "speedup", "95 % interval", "verdict", "chosen", "agrees")
    row(*["---"] * 7)
    for model in ("minilm", "unet") if options.model == "all" else (options.model,):
        with tempfile.TemporaryDirectory() as folder:
            pl.config.cache_dir = Path(folder) / "cache"
            run(model, options, Path(folder))
        builds.clear()


def run(model: str, options: argparse.Namespace, folder: Path) -> None:
    """The rows of one model."""
    bench = prepared(model, options.batch_size, options.pairs)
    absent = build_all(bench, folder)
    plain = control_of(bench.wrapper).plain
    calls = {PLAIN: plain, **{name: built.call for name, built in builds.items()}}
    found = {name: bench.compare(plain, call, 0.01) for name, call in calls.items()}
    floor = max(found[PLAIN].noise_floor or 0.0, 0.01)
    best = max(found, key=lambda name: found[name].speedup or 0.0)
    chosen = Counter(bench.choice(list(builds)) for _ in range(options.repeats))
    agrees = {name: agreement(bench, calls, name, best, floor) for name in chosen}
    for name, comparison in found.items():
        label = f"{name}, with itself" if name == PLAIN else name
        row(model, label, *told(comparison), f"{chosen[name]} of {options.repeats}", agrees.get(name, "-"))
    for name, reason in absent.items():
        row(model, name, "-", "-", reason.splitlines()[0], "-", "-")
    num_right = sum(count for name, count in chosen.items() if agrees[name] != "no")
    row(model, "all choices", "-", "-", f"noise {floor:.1%}", f"best: {best}", f"{num_right} of {options.repeats}")


def agreement(bench: Bench, calls: dict[str, Callable[..., Any]], name: str, best: str, floor: float) -> str:
    """Whether a choice is the fastest one, or one that cannot be told from it."""
    if name == best:
        return "yes"
    comparison = bench.compare(calls[name], calls[best], floor)
    return "no" if comparison.verdict == "faster" else f"within the noise ({comparison.speedup or 0:.3f})"


if __name__ == "__main__":
    main()
