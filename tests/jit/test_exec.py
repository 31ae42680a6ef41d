"""`perfladder exec --tune`: an unmodified script in a process of its own."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import os, sys
    import torch
    from torch import nn
    from helper import NUMBER

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x):
            for _ in range(8):
                x = self.last(torch.nn.functional.gelu(self.first(x)).sin().cos())
            return x

    if __name__ == "__main__":
        torch.manual_seed(0)
        net = Net().eval()
        x = torch.ones(4, 16)
        with torch.no_grad():
            for _ in range(3):
                y = net(x)
        print("sum", round(float(y.sum()), 2), NUMBER, sys.argv[1:])
"""


ENDING = """
    import os, sys
    import torch
    from helper import NUMBER

    torch.nn.Linear(2, 2).train()(torch.ones(1, 2))
    print(NUMBER, sys.argv[1:], flush=True)
    if "--raise" in sys.argv:
        raise ValueError("mine")
    if "--kill" in sys.argv:
        os.kill(os.getpid(), 9)
    sys.exit(7)
"""
"""Calls a module that is not tuned, and ends."""


@pytest.fixture
def execute(tmp_path):
    """Run the program by `perfladder exec`, with a cache that lasts for the test."""
    for name, source in (("program.py", PROGRAM), ("ending.py", ENDING)):
        (tmp_path / name).write_text(textwrap.dedent(source))
    (tmp_path / "helper.py").write_text("NUMBER = 42\n")

    def run(*options, script="program.py", arguments=()):
        command = [sys.executable, "-m", "perfladder.cli", "exec", *options, str(tmp_path / script), *arguments]
        variables = {**os.environ, "PERFLADDER_JIT_CACHE_DIR": str(tmp_path / "cache")}
        return subprocess.run(command, capture_output=True, text=True, timeout=280, env=variables, check=False)

    return run


@pytest.mark.slow
def test_the_second_process_tries_nothing_and_gives_the_same(execute):
    first, second = execute("--tune", "--json"), execute("--tune", "--json", arguments=["--json"])
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    before, after = json.loads(first.stdout), json.loads(second.stdout)
    (net,) = [module for module in before["jit"]["modules"] if module["level"] == 0]
    assert (net["name"], net["state"], net["num_calls"]) == ("Net", "tuned", 3)
    assert before["num_tried"] == 2
    assert before["num_reused"] == 0
    assert after["num_tried"] == 0
    assert after["num_reused"] == 2
    assert after["num_builds"] <= 1
    assert after["jit"]["modules"][0]["graphs"][0]["selected"] == net["graphs"][0]["selected"]
    printed = [run.stderr.split("sum ", 1)[1].split()[0] for run in (first, second)]
    assert float(printed[0]) == pytest.approx(float(printed[1]), abs=0.1)
    assert after["arguments"] == ["--json"]


@pytest.mark.slow
def test_output_and_exit_code_are_the_scripts(execute):
    ended = execute("--tune", script="ending.py", arguments=["--exit", "-v"])
    assert ended.returncode == 7
    assert ended.stdout.rstrip().endswith("42 ['--exit', '-v']")
    assert "Linear" in ended.stderr
    assert "init" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", ["--raise", "--kill"])
def test_a_script_that_fails_gives_3(execute, how):
    ended = execute("--tune", script="ending.py", arguments=[how])
    assert ended.returncode == 3
    if how == "--raise":
        assert "ValueError: mine" in ended.stderr
        assert "perfladder/jit/script.py" not in ended.stderr
    else:
        assert "ended without telling" in ended.stderr


def test_a_script_that_is_not_there_is_wrong_input(tmp_path):
    from perfladder.errors import InputError
    from perfladder.jit.execute import execute_tuned

    with pytest.raises(InputError, match="is no file"):
        execute_tuned(str(tmp_path / "missing.py"), [], keeps_stdout=True)
