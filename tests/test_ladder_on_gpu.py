"""The commands on a CUDA device, as a user types them: every rung, memory that runs out, and a tuning that is kept."""

import json
import os
import subprocess
import sys
import textwrap
import uuid

import pytest
import torch
from processes import MARK, marked

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def perfladder(folder, *words, timeout_s=500):
    """Run a command in a folder, with locks and a cache of its own; nothing of it may stay."""
    mark = uuid.uuid4().hex
    own = {MARK: mark, "TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "perfladder.cli", *words, "--json"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **own}, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert marked(mark) == [], "no process is left behind"
    assert "Traceback (most recent call last)" not in done.stdout
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """All rungs of the tiny diffusion pipeline."""
    pytest.importorskip("diffusers")
    folder = tmp_path_factory.mktemp("ladder")
    code, answer = perfladder(folder, "run", "diffusion", "--set", "device=cuda", "--plain")
    assert code == 0, answer
    return answer


def result(run, name):
    with open(os.path.join(run["run_dir"], run["files"][name]), encoding="utf-8") as file:
        return json.load(file)


def test_every_rung_is_done(run):
    assert run["status"] == "done"
    assert run["not_done"] == {}
    for name in ("stages", "regions", "capture", "harness", "kernels"):
        found = result(run, name)
        assert (found["status"], found["device"]) == ("done", "cuda:0"), name


def test_the_replay_gives_what_the_pipeline_gave(run):
    assert result(run, "harness")["parity"] in ("exact", "within_tolerance")


def test_kernels_have_a_module_and_a_named_call(run):
    kernels = result(run, "kernels")
    assert kernels["kind"] == "kernels"
    assert kernels["attributed_share"] >= 0.99
    assert kernels["attributed_share_by_function"] >= 0.99
    by_module = {share["name"]: share["share"] for share in kernels["by_module"]}
    assert by_module.get(kernels["stage"], 0.0) < 0.01, "the stage itself launches next to nothing"


def test_a_pipeline_of_tiny_kernels_is_bound_by_its_host(run):
    with open(os.path.join(run["run_dir"], "report.json"), encoding="utf-8") as file:
        kinds = {finding["kind"] for finding in json.load(file)["findings"]}
    assert kinds & {"host_bound_synchronization", "host_bound_dispatch", "host_bound_python", "device_mostly_idle"}


HUNGRY = """
    import torch
    from torch import nn


    class Hungry(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x) + torch.empty(1 << 40, dtype=torch.uint8, device=x.device)[:8]


    def build():
        return Hungry()
"""


def test_memory_that_runs_out_is_one_message(tmp_path):
    (tmp_path / "hungry.py").write_text(textwrap.dedent(HUNGRY))
    workload = {"name": "hungry", "target": "hungry.py:build", "device": "cuda", "inputs": {"x": {"$tensor": [4, 8]}}}
    (tmp_path / "hungry.yaml").write_text(json.dumps(workload))
    code, answer = perfladder(tmp_path, "run", "hungry.yaml", "--plain")
    assert code == 3
    assert "ran out of memory: OutOfMemoryError" in answer["error"]
    assert "hungry.py" in answer["error"]
    assert torch.cuda.mem_get_info()[0] > 0.5 * torch.cuda.mem_get_info()[1], "the process gave its memory back"


DEEP = """
    import torch
    from torch import nn


    def build():
        torch.manual_seed(0)
        return nn.Sequential(*[layer for _ in range(60) for layer in (nn.Linear(64, 64), nn.GELU())]).eval()
"""


def test_a_host_bound_module_is_tuned_by_the_defaults_and_loads_again(tmp_path):
    (tmp_path / "deep.py").write_text(textwrap.dedent(DEEP))
    # A sequence calls its argument `input`.
    inputs = {"input": {"$tensor": [4, 64]}}
    workload = {"name": "deep", "target": "deep.py:build", "device": "cuda", "inputs": inputs}
    (tmp_path / "deep.yaml").write_text(json.dumps(workload))
    code, tuned = perfladder(tmp_path, "tune", "deep.yaml", "--save", "deep.ait")
    assert (code, tuned["status"]) == (0, "kept"), tuned["reason"]
    (graph,) = tuned["modules"][0]["graphs"]
    assert "cuda_graphs=True" in graph["selected"]
    assert tuned["evidence"]["comparison"]["interval"]["low"] > 1
    code, answer = perfladder(tmp_path, "run", "deep.yaml", "--set", "tuned.archive=deep.ait", "--plain")
    assert code == 0, answer
    kernels = result(answer, "kernels")
    assert kernels["graphs"], "its kernels are those of a replay"
    assert kernels["graphs"][0]["confidence"] > 0.9
