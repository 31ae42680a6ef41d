"""Wrong input and failing workloads at the command line: one message, an exit code, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import uuid

import pytest
import torch
from processes import MARK, marked, wait_until

PIPE = """
    import asyncio, ctypes, time, torch
    from pathlib import Path

    class Pipe:
        def __init__(self):
            self.net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(60)])
            self.answers = []

        def __call__(self, act="nothing", after=None):
            if after is None or list(Path(__file__).parent.glob(after)):
                getattr(self, act)()
            return self.net(torch.ones(1, 64))

        def nothing(self):
            pass

        def segfault(self):
            ctypes.string_at(0)

        def hang(self):
            Path(__file__).with_name("asleep").touch()
            time.sleep(1000)

        def run_out_of_memory(self):
            torch.zeros(1 << 45)

    def build(fail=False):
        if fail:
            raise OSError("no weights here")
        return Pipe()

    def strict(obj, x):
        return obj()

    class Answer:
        def __repr__(self):
            return "the answer was written out"

    async def respond(obj, act):
        if not obj.answers:
            obj.answers.append(Answer())
            return obj.answers[0]
        Path(__file__).with_name("asleep").touch()
        await asyncio.sleep(1000)
"""


@pytest.fixture
def run(tmp_path):
    mark = uuid.uuid4().hex

    def climb(until="stages", **fields):
        (tmp_path / "pipe.py").write_text(textwrap.dedent(PIPE))
        workload = {
            "name": "bad",
            "target": "pipe.py:build",
            "device": "cpu",
            "stages": ["net"],
            "warmup_runs": 1,
            "measured_runs": 3,
            "timeout_s": 60,
            **fields,
        }
        (tmp_path / "work.yaml").write_text(json.dumps(workload))
        # Locks of its own: other runs on this machine are none of this test's.
        environment = {**os.environ, MARK: mark, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "perfladder.cli", "run", str(tmp_path / "work.yaml"), "--plain", "--json"]
        command += ["--until", until, "--out", str(tmp_path / "runs")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
        assert marked(mark) == [], "no process is left behind"
        assert "Traceback" not in done.stderr
        return done

    return climb


def error_of(done):
    return json.loads(done.stdout)["error"]


def record_in(tmp_path):
    (path,) = tmp_path.glob("runs/bad/*/run.json")
    return json.loads(path.read_text())


def test_unknown_field_ends_before_a_run_is_made(run, tmp_path):
    done = run(warmup_run=3)
    assert done.returncode == 2
    assert error_of(done)["type"] == "InputError"
    assert "Did you mean 'warmup_runs'" in error_of(done)["message"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"target": "absent.py:build"}, 2, "target: there is no file"),
        ({"target_args": {"fail": True}}, 3, "The factory pipe.py:build raised: OSError: no weights here"),
        ({"inputs": {"aft": 1}, "call": "pipe.py:build"}, 3, "raised: TypeError"),
        ({"inputs": {"acr": 1}, "call": "net.forward"}, 2, "inputs: the target's net.forward does not accept"),
        ({"target_args": {"fial": 1}}, 2, "target_args: .*Did you mean 'fail'"),
        ({"stages": ["nett"]}, 2, "stages: .*Did you mean 'net'"),
        ({"inputs": {"act": "segfault"}}, 3, "killed by SIGSEGV"),
        ({"inputs": {"act": "hang"}, "timeout_s": 15}, 3, "did not finish 'stages' within 15 s.*in hang"),
        ({"inputs": {"act": "run_out_of_memory"}}, 3, "ran out of memory"),
        pytest.param(
            {"device": "cuda"},
            4,
            "device: 'cuda' was asked for",
            marks=pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator"),
        ),
    ],
    ids=str,
)
def test_failure_is_one_message_and_an_exit_code(run, tmp_path, fields, code, message):
    import re

    done = run(**fields)
    record = record_in(tmp_path)
    assert done.returncode == code
    assert re.search(message, record["error"], re.DOTALL)
    assert (record["status"], record["exit_code"]) == ("failed", code)
    assert len([line for line in done.stderr.splitlines() if line.startswith("error:")]) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("act", ["segfault", "hang", "run_out_of_memory"])
def test_failure_in_a_later_rung_keeps_the_finished_ones(run, tmp_path, act):
    inputs = {"act": act, "after": "runs/bad/*/1-stages/stages.json"}
    done = run(until="capture", inputs=inputs, timeout_s=20 if act == "hang" else 60)
    record = record_in(tmp_path)
    assert [(rung["name"], rung["status"]) for rung in record["rungs"]] == [("stages", "done"), ("capture", "failed")]
    assert done.returncode == 5
    assert (tmp_path / "runs" / "bad" / record["run_id"] / "1-stages" / "stages.json").is_file()
    assert (tmp_path / "runs" / "bad" / record["run_id"] / "report.md").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "call"),
    [(signal.SIGTERM, 143, None), (signal.SIGINT, 130, None), (signal.SIGINT, 130, "pipe.py:respond")],
    ids=["terminated", "ctrl-c", "ctrl-c in a coroutine"],
)
def test_a_run_that_is_told_to_end_says_so_and_leaves_nothing(tmp_path, number, code, call):
    mark = uuid.uuid4().hex
    (tmp_path / "pipe.py").write_text(textwrap.dedent(PIPE))
    workload = {"name": "bad", "target": "pipe.py:build", "device": "cpu", "call": call, "inputs": {"act": "hang"}}
    (tmp_path / "work.yaml").write_text(json.dumps(workload))
    environment = {**os.environ, MARK: mark, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "perfladder.cli", "run", str(tmp_path / "work.yaml"), "--plain", "--json"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "runs")], stdout=-1, stderr=-1, text=True, env=environment
    )
    for line in process.stderr:
        if "stages (rung 1)" in line:
            break
    wait_until((tmp_path / "asleep").exists, limit_s=60)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert json.loads(out)["error"]["exit_code"] == code
    assert "Interrupted." in err
    record = record_in(tmp_path)
    assert (record["status"], record["exit_code"]) == ("interrupted", code)
    log = (tmp_path / "runs" / "bad" / record["run_id"] / "session.log").read_text()
    assert "written out" not in out + err + log
    assert marked(mark) == []


def test_usage_errors_are_json_too(tmp_path):
    command = [sys.executable, "-m", "perfladder.cli", "run", "x.yaml", "--bogus", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert error_of(done)["type"] == "UsageError"
