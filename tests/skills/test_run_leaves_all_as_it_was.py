"""A whole climb on weights in a git work tree: what it prints, what it writes, and what it leaves alone."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from documents import printed, written
from safetensors.torch import save_file

from perfladder.schemas import WRITTEN

pytestmark = pytest.mark.slow

TARGET = """
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn


class Pipe:
    def __init__(self):
        self.net = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)).eval()
        self.net.load_state_dict(load_file(Path(__file__).parent / "weights.safetensors"))

    def __call__(self, x):
        return self.net(x)


def build():
    return Pipe()
"""
WORKLOAD = """
name: of-weights
target: pipe.py:build
inputs: {x: {$tensor: [64, 32]}}
model: weights.safetensors
device: cpu
measured_runs: 3
warmup_runs: 1
"""


def git(folder, *words):
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def sums(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.fixture(scope="module")
def climbed(tmp_path_factory):
    tree = tmp_path_factory.mktemp("tree")
    (tree / "pipe.py").write_text(TARGET)
    (tree / "work.yaml").write_text(WORKLOAD)
    (tree / "notes.txt").write_text("not committed")
    (tree / ".gitignore").write_text("__pycache__/\n")
    net = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 32))
    save_file(net.state_dict(), tree / "weights.safetensors")
    git(tree, "init", "-q", ".")
    git(tree, "add", "pipe.py", "work.yaml", "weights.safetensors", ".gitignore")
    git(tree, "commit", "-qm", "before")
    before = sums(tree), git(tree, "status", "--porcelain"), git(tree, "stash", "list"), git(tree, "worktree", "list")
    runs = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", "perfladder.cli", "run", "work.yaml", "--plain", "--json", "--out", str(runs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    after = sums(tree), git(tree, "status", "--porcelain"), git(tree, "stash", "list"), git(tree, "worktree", "list")
    return SimpleNamespace(before=before, after=after, printed=done.stdout)


def test_code_weights_and_work_tree_are_byte_for_byte_as_before(climbed):
    assert climbed.after == climbed.before
    assert {"pipe.py", "weights.safetensors", ".git/index"} <= set(climbed.before[0])


def test_the_short_answer_and_every_file_keep_to_their_schemas(climbed):
    answer = printed("run", climbed.printed)
    assert (answer["status"], answer["dominating_stage"], answer["not_done"]) == ("done", "net", {})
    run = Path(answer["run_dir"])
    found = [path for path in run.rglob("*.json") if path.name in WRITTEN]
    names = {path.name for path in found}
    assert {"run.json", "environment.json", "key.json", "report.json", *(f"{name}.json" for name in RUNGS)} <= names
    for path in found:
        written(path)


RUNGS = ("stages", "capture", "regions", "harness", "kernels")
