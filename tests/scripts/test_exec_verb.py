"""`perfladder exec` and `perfladder init` as a person types them."""

import json
import os
import subprocess
import sys

import pytest
import yaml
from documents import printed

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import torch
from torch import nn


class Captioner:
    def __init__(self):
        self.encoder = nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 32)).eval()
        self.head = nn.Linear(32, 8)

    def caption(self, frames, num_tokens):
        for _ in range(num_tokens):
            frames = self.encoder(frames)
        return self.head(frames)


def main():
    print("this is the script's own output")
    with torch.inference_mode():
        Captioner().caption(torch.ones(64, 32), num_tokens=int(sys.argv[1]))
    raise RuntimeError("the script goes no further than its call")


def build(width=32):
    return Captioner()


class Odd:
    def first(self, spec):
        return spec["a"]

    def second(self):
        return None


if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("exec")
    (made / "my_script.py").write_text(SCRIPT)
    return made


def perfladder(folder, *arguments):
    command = [sys.executable, "-m", "perfladder.cli", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


def test_a_script_is_profiled_down_to_its_kernels_without_a_workload_file(folder):
    options = ["--plain", "--json", "--function", "Captioner.caption", "--set", "measured_runs=5"]
    done = perfladder(folder, "exec", *options, "my_script.py", "3")
    assert done.returncode == 0, done.stderr
    outcome = printed("exec", done.stdout)
    run = folder / "runs" / "my_script" / os.path.basename(outcome["run_dir"])
    # Commands of findings name what can be given to `run` again: the script's name alone cannot.
    assert json.loads((run / "run.json").read_text())["workload_source"] == str(run / "workload.yaml")
    stages = json.loads((run / "1-stages" / "stages.json").read_text())
    assert stages["dominating"] == "encoder"
    assert json.loads((run / "3-harness" / "harness.json").read_text())["status"] == "done"
    assert json.loads((run / "4-kernels" / "kernels.json").read_text())["status"] == "done"
    assert "the call: Captioner.caption, called at " in done.stderr
    again = perfladder(folder, "run", str(run / "workload.yaml"), "--plain", "--json", "--until", "stages")
    assert again.returncode == 0, again.stderr


def test_a_workload_file_of_a_factory_is_written_and_runs(folder):
    options = ["--set", "call=caption", "--set", "inputs.num_tokens=2", "--json"]
    done = perfladder(folder, "init", "-o", "made/of_factory.yaml", *options, "my_script.py:build")
    assert done.returncode == 0, done.stderr
    result = printed("init", done.stdout)
    assert result["does_run"]
    assert [stage["path"] for stage in result["found"]["stages"]] == ["caption", "encoder", "head"]
    assert yaml.safe_load((folder / "made/of_factory.yaml").read_text())["inputs"] == {
        "frames": {"$tensor": [1, 32]},
        "num_tokens": 2,
    }
    run = perfladder(folder, "run", "made/of_factory.yaml", "--plain", "--until", "stages", "--json")
    assert run.returncode == 0, run.stderr


def test_options_after_a_factory_are_refused_not_ignored(folder):
    done = perfladder(folder, "init", "my_script.py:build", "--set", "inputs.num_tokens=2")
    assert done.returncode == 2
    assert "Options stand before the target: perfladder init --set inputs.x=1 my_script.py:build" in done.stderr


def test_a_workload_file_of_a_script_keeps_its_arguments(folder):
    done = perfladder(folder, "init", "--function", "Captioner.caption", "my_script.py", "2")
    assert done.returncode == 0, done.stderr
    assert "It runs; next: perfladder run my_script.yaml" in done.stdout
    assert yaml.safe_load((folder / "my_script.yaml").read_text())["target_args"]["arguments"] == ["2"]
    again = perfladder(folder, "init", "--function", "Captioner.caption", "my_script.py", "2")
    assert again.returncode == 2
    assert "is there already" in again.stderr


def test_what_cannot_be_guessed_is_to_be_filled_in(folder):
    (folder / "odd.py").write_text("from my_script import Odd\n\n\ndef build():\n    return Odd()\n")
    done = perfladder(folder, "init", "odd.py:build")
    assert done.returncode == 2
    assert "--set call=NAME (methods: first, second)" in done.stderr
    done = perfladder(folder, "init", "--force", "--set", "call=first", "odd.py:build")
    assert done.returncode == 2
    assert "PUT YOUR OWN IN THEIR PLACE" in (folder / "odd.yaml").read_text()
    assert perfladder(folder, "init", "nothing").returncode == 2
