"""Tune the model once, on a machine like those that serve it, and write what these need.

    python tune.py serving/model.ait
    python tune.py serving/model.ait --backend onnxruntime

Beside the archive lies `expected.json`: requests with the answers of the plain module, for the load test.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from model import MAX_BATCH_SIZE, NUM_FEATURES, build

import perfladder as pl


def main() -> None:
    """Tune, save, and keep what right answers are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--backend", default="onnxruntime", help="Its name, as in docs/tuning.md")
    options = parser.parse_args()

    module = build()
    requests = [torch.randn(size, NUM_FEATURES) for size in (1, 2, 3, 8, MAX_BATCH_SIZE)]
    with torch.no_grad():
        answers = [module(rows) for rows in requests]

    # Ahead of deployment the choice is made already: the speed is reported, and a backend that is wrong is refused.
    backend = pl.backend.find_backend(options.backend)()
    strategy = pl.OneBackendStrategy(backend).enable_performance_validation("diagnostic")
    shapes = {"input": (pl.BatchDim("batch", 1, MAX_BATCH_SIZE), NUM_FEATURES)}
    tuned = pl.Module(module, "classifier", strategy=strategy, dynamic_shapes=shapes)
    report = pl.tune(tuned, list(torch.randn(8, NUM_FEATURES)), batch_sizes=[1, 4], ignore_failing_modules=False)
    print(report.describe())

    options.archive.parent.mkdir(parents=True, exist_ok=True)
    pl.save(tuned, options.archive.absolute())
    cases = [{"inputs": rows.tolist(), "outputs": out.tolist()} for rows, out in zip(requests, answers, strict=True)]
    (options.archive.parent / "expected.json").write_text(json.dumps(cases))


if __name__ == "__main__":
    main()
