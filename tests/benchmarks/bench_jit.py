"""How long the first tuned call takes just-in-time tuning in a first and in a second process.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_jit.py

Each process builds the UNet of the tiny diffusion workload, switches JIT on, and calls it until a call is served by
what was chosen; the time is that from the first call's begin to the end of that call, imports and building the model
not included. The first process has an empty cache and tries Inductor; the second one has the first one's cache. The
goal is 3 times faster. The candidate is taken if it is right, whatever its speed, so that Inductor serves the calls on
every machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

GOAL = 3.0


def main() -> None:
    """Run both processes, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure()))
        return
    with tempfile.TemporaryDirectory() as cache:
        variables = {**os.environ, "PERFLADDER_JIT_CACHE_DIR": cache}
        first, second = (_child(variables) for _ in range(2))
    ratio = first["first_tuned_call_s"] / second["first_tuned_call_s"]
    print(
        json.dumps({"goal": GOAL, "ratio": round(ratio, 2), "first": first, "second": second, "cpus": os.cpu_count()})
    )


def _child(variables: dict[str, str]) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, __file__, "--child"], check=True, capture_output=True, text=True, env=variables
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure() -> dict[str, object]:
    """Call the UNet until a call is served."""
    import torch

    import perfladder as pl
    from perfladder import jit
    from perfladder.jit.finder import finder
    from perfladder.workloads import diffusion

    pipe = diffusion.build(size="tiny")
    backends = [pl.backend.TorchInductorJitBackend(), pl.backend.TorchEagerBackend()]
    jit.jit_config.strategy = pl.MaxThroughputStrategy(backends).enable_performance_validation("diagnostic")
    torch.manual_seed(0)
    unet = pipe.unet.eval()
    arguments = _arguments(unet)
    jit.enable()
    start = time.perf_counter()
    with torch.no_grad():
        # The first call of a first process is eager, since it is recorded.
        for _ in range(2):
            unet(**arguments)
            if finder.report().modules[0].graphs[0].num_tried == 0:
                break
    passed = time.perf_counter() - start
    (module,) = [module for module in finder.report().modules if module.level == 0]
    (graph,) = module.graphs
    return {
        "first_tuned_call_s": round(passed, 3),
        "state": module.state,
        "selected": graph.selected,
        "num_tried": graph.num_tried,
        "num_reused": graph.num_reused,
        "num_builds": graph.num_builds,
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
    }


def _arguments(unet: object) -> dict[str, object]:
    import torch

    config = unet.config  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(2, config.in_channels, 32, 32, generator=generator)
    states = torch.randn(2, 77, config.cross_attention_dim, generator=generator)
    return {"sample": sample, "timestep": torch.tensor(10), "encoder_hidden_states": states}


if __name__ == "__main__":
    main()
