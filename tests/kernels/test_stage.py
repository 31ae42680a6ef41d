"""Captured stages in fresh processes: a plan is proved there, and a benchmark folder is written from there."""

import json
import subprocess
import sys
import textwrap

import kernel_toys as toys
import pytest
import torch
from documents import printed

import perfladder as pl
from perfladder.errors import InputError
from perfladder.kernels import KernelOptimizer, standalone_bench

pytestmark = pytest.mark.slow

SOURCE = """
    import time

    import torch
    from torch import nn
    from torch.nn import functional

    import perfladder as pl


    class Net(nn.Module):
        def forward(self, x):
            return functional.gelu(x)


    class Pipe:
        def __init__(self):
            self.net = Net()

        def __call__(self, size=4):
            return self.net(torch.linspace(-1, 1, size))

        def decode(self, x):
            return self.net(x)


    @pl.kernels.register_provider
    class Right(pl.kernels.KernelProvider):
        name, functions = "right", ("gelu",)

        def __call__(self, *args, **kwargs):
            return self.original(*args, **kwargs)


    @pl.kernels.register_provider
    class Slow(Right):
        name = "slow"

        def __call__(self, *args, **kwargs):
            time.sleep(0.002)
            return self.original(*args, **kwargs)


    @pl.kernels.register_provider
    class Wrong(Right):
        name = "wrong"

        def __call__(self, *args, **kwargs):
            return self.original(*args, **kwargs) * 1.5


    def build():
        return Pipe()
"""


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """A workload file, and a capture of its only module."""
    folder = tmp_path_factory.mktemp("stage")
    (folder / "kernel_pipe.py").write_text(textwrap.dedent(SOURCE))
    workload = {"name": "toy", "target": "./kernel_pipe.py:build", "device": "cpu", "inputs": {"size": 4}}
    (folder / "toy.yaml").write_text(json.dumps(workload))

    from perfladder.capturing.api import capture_request, capture_workload
    from perfladder.workload import load_workload

    file = load_workload(str(folder / "toy.yaml"))
    capture_workload(file, capture_request("net", folder / "capture", reference_runs=2))
    return folder


def plan_with(provider):
    """One swap, as if that provider had won."""
    x = torch.linspace(-1, 1, 4)
    form = {"kind": "tensor", "dtype": "float32", "shape": [4], "strides": list(x.stride())}
    signature = {"args": [form], "device_type": "cpu"}
    swap = {"function": "gelu", "signature": signature, "provider": provider}
    return pl.kernels.KernelOptimizationPlan.from_dict({"device_type": "cpu", "swaps": [swap]})


def test_a_plan_is_compared_with_the_pipeline_on_the_stage_alone(captured):
    harness = pl.StageBenchHarness(captured / "capture", workload=captured / "toy.yaml")
    result = harness.run_with_plan(plan_with("wrong"), pairs=10)
    assert result.reason.startswith("call 0 of the captured stage net: output: largest error")
    assert set(result.calls[0].differing) == {"output"}


def test_a_plan_that_does_not_hold_on_the_capture_is_given_up(captured, monkeypatch):
    sys.path.insert(0, str(captured))
    import kernel_pipe

    class Quick(kernel_pipe.Slow):
        """Seems fast here, by the clock of the test."""

        def __call__(self, *args, **kwargs):
            toys.clock.pass_ms(-2)
            return self.original(*args, **kwargs)

    pipe = kernel_pipe.Pipe()
    optimizer = KernelOptimizer([Quick()], clock=toys.clock, min_time_share=0)
    plan = optimizer.make_plan(pipe, module=pipe.net, capture=captured / "capture", workload=captured / "toy.yaml")
    assert plan.whole.comparison.verdict == "faster"
    assert plan.swaps == []
    assert plan.reason == "no call of the captured stage net is faster for certain"
    assert plan.stage.calls[0].measurement.comparison.verdict == "slower"
    assert "stage net, call 0" in plan.describe()


def test_a_workload_without_a_capture_is_refused():
    with pytest.raises(InputError, match="capture: give the folder of a capture"):
        KernelOptimizer(()).make_plan(toys.Net(), workload="toy.yaml")


def test_the_command_writes_a_folder_that_works_by_itself(captured, tmp_path):
    command = [sys.executable, "-m", "perfladder.cli", "kernels", str(captured / "capture"), "--export", "gelu"]
    options = ["--workload", str(captured / "toy.yaml"), "--to", str(tmp_path / "bench"), "--json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    told = printed("kernels", done.stdout)
    assert (told["samples"], told["num_calls"]) == (["1 x float32 [4]"], 1)
    result = standalone_bench.evaluate(tmp_path / "bench", tmp_path / "bench" / "candidate.py")
    assert (result["stage"], result["error"]) == ("benchmark", None)
    harness = pl.StageBenchHarness(captured / "capture", workload=captured / "toy.yaml")
    with pytest.raises(InputError, match="is there already"):
        harness.export("gelu", tmp_path / "bench")
