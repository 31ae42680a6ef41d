"""The modules of a workload's target, by the command line."""

import subprocess
import sys

import pytest
from documents import printed

from perfladder.errors import InputError
from perfladder.report import render_inspection
from perfladder.tuning.inspect_workload import InspectRequest, InspectResult, measure

SOURCE = """
    import torch
    from torch import nn


    class Pipe:
        def __init__(self):
            self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
            self.idle = nn.Linear(2, 2)

        def __call__(self, steps=2):
            x = torch.ones(4, 64)
            for _ in range(steps):
                x = self.net(x)
            return x


    def build():
        return Pipe()
"""


def test_modules_of_a_target(load_target):
    result = measure(load_target(SOURCE, inputs={"steps": 3}), InspectRequest(number_of_iterations=2))
    (net,) = result.modules
    assert (net.name, net.execution_count, net.depth, result.num_iterations) == ("net", 6, 1, 2)
    assert 0 < net.execution_ratio < 1
    assert (net.num_layers, net.num_parameters, net.precisions) == (2, 64 * 65, ["float32"])
    assert InspectResult.model_validate_json(result.model_dump_json()) == result
    assert "| `net` | Sequential | 6 |" in render_inspection(result)


def test_depths_are_those_asked_for(load_target):
    result = measure(load_target(SOURCE), InspectRequest(min_depth=2))
    assert {module.name for module in result.modules} == {"net.0", "net.1"}
    with pytest.raises(InputError, match="No module of the object ran"):
        measure(load_target(SOURCE), InspectRequest(min_depth=3))


def test_command_line(write_target, tmp_path):
    write_target(tmp_path, SOURCE)
    (tmp_path / "pipe.yaml").write_text("name: pipe\ntarget: pipe.py:build\ndevice: cpu\n")

    def run(*arguments):
        command = [sys.executable, "-m", "perfladder.cli", "inspect", str(tmp_path / "pipe.yaml"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = run("--iterations", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert [module["name"] for module in printed("inspect", done.stdout)["modules"]] == ["net"]
    wrong = run("--min-depth", "3", "--max-depth", "2")
    assert wrong.returncode == 2
    assert "--max-depth 2 is less than --min-depth 3" in wrong.stderr
