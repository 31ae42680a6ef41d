"""What the tests of Nsight Compute share: a capture that claims a GPU, and an `ncu` that does as it is told."""

import json
import shutil

import fake_ncu
import pytest
from ncu_reports import Launch, write_report

from perfladder.nsight import thresholds as t
from perfladder.nsight.command import KernelFilter
from perfladder.nsight.preflight import Gpu, check_machine
from perfladder.rungs import capture
from perfladder.rungs.capture import CaptureRequest
from perfladder.rungs.ncu import NcuRequest
from perfladder.target import LoadedTarget

TARGET = """
    import torch
    from torch import nn

    class Pipe:
        def __init__(self):
            self.stage = nn.Linear(4, 4)

        def __call__(self):
            return [self.stage(torch.ones(2, 4)) for _ in range(3)]

    def build():
        return Pipe()

    def stage():
        return nn.Linear(4, 4)
"""

KERNEL = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int, float*)"
FUNCTION = "vectorized_elementwise_kernel"
GPU = Gpu(name="NVIDIA H200", capability=(9, 0))

STREAMING = {
    "SpeedOfLight": {t.COMPUTE: 20.0, t.MEMORY: 92.0, t.DRAM: 92.0, t.L2: 55.0, t.L1: 40.0},
    "LaunchStats": {t.WAVES: 40.0, t.GRID: 10560, "launch__sm_count": 132},
}


@pytest.fixture(scope="module")
def captured(tmp_path_factory, write_target):
    """A capture of a CPU whose manifest says that it was made on a GPU; tests that change it copy it."""
    folder = tmp_path_factory.mktemp("captured")
    file = write_target(folder, TARGET, filename="of_ncu.py", target="of_ncu.py:build")
    loaded = LoadedTarget(file.workload, file.base_dir)
    loaded.load()
    made = capture.measure(loaded, CaptureRequest(stage="stage", folder=str(folder / "capture"), reference_runs=1))
    assert made.status == "done"
    manifest = folder / "capture" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"device": "cuda:0"}))
    return file, folder / "capture"


@pytest.fixture
def copied(captured, tmp_path):
    return shutil.copytree(captured[1], tmp_path / "own-capture")


@pytest.fixture
def install_ncu(tmp_path, monkeypatch):
    """Put a fake `ncu` with a plan first on the PATH; a report is given by its launches."""

    def install(*launches: Launch, **plan):
        if launches:
            plan["report"] = str(write_report(tmp_path / "fake.ncu-rep", launches))
        path = fake_ncu.install(tmp_path / "bin", **plan)
        monkeypatch.setenv("PATH", str(path.parent), prepend=":")
        return path

    return install


@pytest.fixture
def called(tmp_path):
    return lambda: json.loads((tmp_path / "bin" / "called.json").read_text())


@pytest.fixture
def preflight():
    """Of a machine with a GPU and nobody else on it."""
    return lambda **changes: check_machine(GPU, holders=[], **changes)


@pytest.fixture
def make_request(captured, tmp_path):
    def make(capture=None, **fields):
        folder = tmp_path / "5-ncu"
        folder.mkdir(exist_ok=True)
        chosen = KernelFilter(function=FUNCTION, nvtx_range="replay_stage", **fields.pop("chosen", {}))
        fields = {"kernel": KERNEL, "call_index": 1, "limit_s": 60.0, **fields}
        return NcuRequest(capture=str(capture or captured[1]), folder=str(folder), chosen=chosen, **fields)

    return make


@pytest.fixture
def streaming():
    """A launch of an elementwise kernel that device memory limits."""
    return Launch(
        FUNCTION,
        "void at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>>(int, float *)",
        STREAMING,
        nvtx_range="replay_stage",
    )
