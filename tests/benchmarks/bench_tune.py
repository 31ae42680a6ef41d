"""Whether tuning chooses rightly: Inductor is taken exactly when it beats the plain module in a measurement of its own.

    OMP_NUM_THREADS=1 taskset -c 0 python tests/benchmarks/bench_tune.py encoder
    OMP_NUM_THREADS=1 taskset -c 0 python tests/benchmarks/bench_tune.py unet --folder /tmp/bench

Prints the decision, the same comparison with more pairs, how long the tuning took, and how long a second tuning of the
unchanged module takes; run again with the same folder for a second tuning in a new process.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import perfladder as pl
from perfladder.backend import TorchEagerBackend, TorchInductorJitBackend
from perfladder.tuning.measure import Meter, NumStepsMeasuringStopStrategy, measure_pairs
from perfladder.tuning.module import control_of


def encoder() -> tuple[nn.Module, list[Any]]:
    """A transformer encoder of three layers, and sentences of 32 tokens."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(192, 6, 768, batch_first=True, norm_first=True, activation="gelu")
    module = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    return module, list(torch.randn(4, 32, 192))


def unet() -> tuple[nn.Module, list[Any]]:
    """The UNet of the tiny diffusion workload, on latents that one call takes."""
    from perfladder.workloads import diffusion

    torch.manual_seed(0)
    module = diffusion.build(size="tiny").unet.eval()
    sample = {"sample": torch.randn(4, 8, 8), "timestep": torch.tensor(7), "encoder_hidden_states": torch.randn(77, 32)}
    return module, [{**sample, "sample": sample["sample"] * factor, "return_dict": False} for factor in (1.0, 0.5)]


def collate(samples: list[Any]) -> dict[str, Any]:
    """Batches of a UNet's arguments: one time step for all."""
    return {
        "sample": torch.stack([sample["sample"] for sample in samples]),
        "timestep": samples[0]["timestep"],
        "encoder_hidden_states": torch.stack([sample["encoder_hidden_states"] for sample in samples]),
        "return_dict": False,
    }


def main() -> None:
    """Tune, measure again, tune again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["encoder", "unet"])
    parser.add_argument("--folder", type=Path, default=None, help="Cache folder; default: a new one")
    parser.add_argument("--pairs", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    module, samples = encoder() if options.what == "encoder" else unet()
    dataset: Any = samples if options.what == "encoder" else pl.DataLoaderFactory(samples, collate_fn=collate)
    with tempfile.TemporaryDirectory() as scratch:
        pl.config.cache_dir = options.folder or Path(scratch)
        strategy = pl.FirstWinsStrategy([TorchInductorJitBackend(), TorchEagerBackend()])
        wrapper: Any = pl.Module(module, strategy=strategy)
        for number in (1, 2):
            start = time.perf_counter()
            report = pl.tune(wrapper, dataset, batch_sizes=[1, 2])
            print(f"tuning {number}: {time.perf_counter() - start:.1f} s, {report.num_builds} builds")
        decision = report.modules[0].graphs[0].decision
        assert decision is not None, report.describe()
        print(f"chosen: {decision.selected}. {decision.reason}")
        record = decision.candidates[0]
        print(f"Inductor: {record.status}, trial {record.trial_s} s, build {record.build_s} s, {record.details}")
        remeasure(wrapper, options.pairs)


def remeasure(wrapper: Any, pairs: int) -> None:
    """The candidate against the plain module once more, with other pairs."""
    control = control_of(wrapper)
    recording = control.recording
    assert recording is not None, "it was recorded"
    graph = recording.table.graphs[0]
    backend = TorchInductorJitBackend()
    from perfladder.backend import BuildRequest

    with tempfile.TemporaryDirectory() as folder:
        samples = recording.samples[graph.name]
        request = BuildRequest(control.inner, control.plain, graph, samples, torch.device("cpu"), Path(folder))
        built = backend.build(request)
    sample = max(samples, key=lambda one: one.batch_size or 1)
    timing = measure_pairs(
        Meter(torch.device("cpu")),
        control.plain,
        built.call,
        sample,
        batch_size=sample.batch_size or 1,
        stop=NumStepsMeasuringStopStrategy(pairs),
        min_effect=0.01,
        changes_inputs=False,
    )
    print(f"measured again, {pairs} pairs: {timing.comparison.verdict}. {timing.comparison.reason}")


if __name__ == "__main__":
    main()
