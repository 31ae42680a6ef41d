import json
import os
import re
import signal
import subprocess
import sys

import pytest

from perfladder.device_lock import device_lock
from perfladder.errors import NotPossibleHereError

HOLDER = """
import sys, time
from pathlib import Path
from perfladder.device_lock import device_lock
with device_lock("gpu/0:a", what="run runs/toy/1", folder=Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_waits_and_is_told_again_and_again_who_holds_the_device(holder, tmp_path):
    told = []

    def tell(message):
        told.append(message)
        if len(told) == 3:
            holder.stdin.close()  # lets the holder end, so that the wait does

    with device_lock("gpu/0:a", folder=tmp_path, tell=tell, tell_every_s=0.05):
        assert holder.wait(timeout=20) == 0
    assert len(told) >= 3
    expected = rf"Waiting for device gpu/0:a: process {holder.pid} \(run runs/toy/1\), since 2\S+, is measuring on it\."
    assert all(re.fullmatch(expected, line) for line in told), told


def test_a_killed_holder_frees_the_device(holder, tmp_path):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with device_lock("gpu/0:a", folder=tmp_path):
        assert json.loads((tmp_path / "gpu_0_a.holder").read_text())["pid"] == os.getpid()
    assert (tmp_path / "gpu_0_a.holder").read_text() == ""


def test_a_holder_that_cannot_be_read_is_another_process(holder, tmp_path):
    (tmp_path / "gpu_0_a.holder").write_text('{"pid":')
    told = []

    def tell(message):
        told.append(message)
        holder.stdin.close()

    with device_lock("gpu/0:a", folder=tmp_path, tell=tell):
        assert told[0] == "Waiting for device gpu/0:a: another process is measuring on it."


def test_another_device_is_free(holder, tmp_path):
    told = []
    with device_lock("cpu", folder=tmp_path, tell=told.append):
        assert told == []


def test_an_error_inside_frees_the_device(tmp_path):
    with pytest.raises(ZeroDivisionError), device_lock("cpu", folder=tmp_path):
        raise ZeroDivisionError
    told = []
    with device_lock("cpu", folder=tmp_path, tell=told.append):
        assert told == []


def test_no_place_for_locks_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(NotPossibleHereError, match="Set TMPDIR"),
        device_lock("cpu", folder=tmp_path / "file" / "locks"),
    ):
        pass
