"""Capture and replay by name, in processes of their own: from Python and from the command line."""

import json
import shutil
import subprocess
import sys
import textwrap

import pytest
from documents import printed

import perfladder as pl
from perfladder.capturing.api import capture_request, capture_workload
from perfladder.errors import CaptureError, InputError, NotPossibleHereError, WorkloadError

SOURCE = """
    import os
    from dataclasses import dataclass

    import torch
    from torch import nn

    import perfladder as pl


    @pl.register_capture_type
    @dataclass
    class Frame:
        pixels: torch.Tensor


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(8, 8)

        def forward(self, frame):
            return Frame(self.inner(frame.pixels))

        def decode(self, frame):
            return self.inner(frame.pixels)


    class Heavy(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(10))

        def _apply(self, fn, recurse=True):
            print("heavy was moved", flush=True)
            return super()._apply(fn, recurse)


    class Pipe:
        def __init__(self):
            self.net, self.heavy = Net(), Heavy()

        def to(self, **kwargs):
            self.net.to(**kwargs)
            self.heavy.to(**kwargs)

        def __call__(self, steps=3):
            frame = Frame(torch.ones(2, 8))
            for _ in range(steps):
                frame = self.net(frame)
            return self.net.decode(frame)


    def build():
        return Pipe()


    def build_net():
        return Net()


    def build_broken():
        raise ValueError("no such checkpoint")
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory, write_target):
    return write_target(tmp_path_factory.mktemp("target"), SOURCE, inputs={"steps": 3})


@pytest.fixture(scope="module")
def captured(file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("captures") / "net"
    result = capture_workload(file, capture_request("net", folder, reference_runs=2))
    assert (result.status, result.captured_calls) == ("done", [0, 1, 2])
    return folder


def without_waiting(told):
    """Other tests may measure at the same time."""
    return [line for line in told if not line.startswith("Waiting for device")]


def test_stage_replays_alone_in_a_fresh_process(file, captured, tmp_path):
    log, told = tmp_path / "replay.log", []
    harness = pl.StageBenchHarness(captured, workload=file, log_path=log)
    result = harness.run(repeats=3, tell=told.append)
    assert (result.parity, result.data, result.stage) == ("exact", "captured", "net")
    assert result.peak_host_rss_bytes > 0
    assert without_waiting(told) == ["loading the stage", "replaying"]
    assert "heavy was moved" not in log.read_text(), "the rest is dropped before anything is moved"


def test_an_undecided_time_is_decided_in_turns_with_the_whole_pipeline(file, captured, tmp_path):
    folder, told = tmp_path / "noisy", []
    shutil.copytree(captured, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["yardstick_ms"] = [1e12] * 5  # as if the host had been far slower beside the pipeline
    for call in manifest["calls"]:
        call["in_pipeline_ms"] = [1e6] * 5
    (folder / "manifest.json").write_text(json.dumps(manifest))
    harness = pl.StageBenchHarness(folder, workload=file)
    result = harness.run(repeats=3, in_turns=True, tell=told.append)
    steps = ["loading the stage", "replaying", "loading the target", "replaying in turns"]
    assert without_waiting(told) == steps
    assert result.in_turns is not None
    assert result.parity == "exact"
    assert result.timing_ratio == result.in_turns.ratio
    assert result.alone_timing_ratio == pytest.approx(0, abs=1e-3)


def test_stage_of_a_factory_of_its_own(file, captured):
    factory = f"{file.base_dir / 'pipe.py'}:build_net"
    harness = pl.StageBenchHarness(captured, factory=factory)
    assert harness.run(repeats=2).parity == "exact"
    with pytest.raises(InputError, match="in_turns: a factory gives the stage alone, and no pipeline"):
        harness.run(in_turns=True)


def test_method_of_a_factory_of_its_own(file, tmp_path):
    capture_workload(file, capture_request("net.decode", tmp_path / "decode", reference_runs=1))
    factory = f"{file.base_dir / 'pipe.py'}:build_net"
    assert pl.StageBenchHarness(tmp_path / "decode", factory=factory).run(repeats=2).parity == "exact"


def test_what_to_load_comes_from_the_caller_only(captured, file, make_workload):
    with pytest.raises(InputError, match="Give either the workload that the capture was made of, or a factory"):
        pl.StageBenchHarness(captured)
    with pytest.raises(InputError, match="either"):
        pl.StageBenchHarness(captured, workload=file, factory="a:b")
    with pytest.raises(NotPossibleHereError, match="nproc"):
        pl.StageBenchHarness(captured, workload=make_workload(nproc=2))


def test_factory_that_raises_is_the_targets_failure(file, captured):
    factory = f"{file.base_dir / 'pipe.py'}:build_broken"
    with pytest.raises(WorkloadError, match="no such checkpoint"):
        pl.StageBenchHarness(captured, factory=factory).run()


def test_other_work_than_the_captured_is_told(file, captured):
    other = file.workload.model_copy(update={"inputs": {"steps": 7}})
    result = pl.StageBenchHarness(captured, workload=type(file)(other, file.base_dir)).run(repeats=2)
    assert "REPLAY_WORK_DIFFERS" in {warning.code for warning in result.warnings}


def test_no_capture_is_refused_before_anything_starts(tmp_path, file):
    with pytest.raises(CaptureError, match="is no capture"):
        pl.StageBenchHarness(tmp_path, workload=file)


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "perfladder.cli", *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def workload_path(file):
    path = file.base_dir / "net.yaml"
    path.write_text(
        textwrap.dedent("""
            name: net
            target: ./pipe.py:build
            device: cpu
            inputs: {steps: 3}
        """)
    )
    return path


def test_command_line_captures_and_replays(workload_path, tmp_path):
    folder = tmp_path / "capture"
    done = run("capture", workload_path, "--stage", "net", "--to", folder, "--calls", "0,-1", "--json")
    assert done.returncode == 0, done.stderr
    assert printed("capture", done.stdout)["captured_calls"] == [0, 2]
    shown = run("replay", folder, "--workload", workload_path, "--repeats", 3)
    assert shown.returncode == 0, shown.stderr
    assert "Output exact." in shown.stdout
    assert "| 2 |" in shown.stdout
    again = run("capture", workload_path, "--stage", "net", "--to", folder)
    assert again.returncode == 2
    assert "is there already" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--stage", "nett", "--to", "x"], 2, "stage: the target (Pipe) has no 'nett'. Did you mean"),
        (["--stage", "net", "--to", "x", "--calls", "first"], 2, "--calls 'first': expected 'default', 'all'"),
    ],
)
def test_wrong_arguments_are_explained(workload_path, tmp_path, monkeypatch, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    done = run("capture", workload_path, *arguments)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    assert message in done.stderr


def test_replay_without_a_target_is_explained(tmp_path):
    done = run("replay", tmp_path)
    assert done.returncode == 2
    assert "Give either the workload" in done.stderr
