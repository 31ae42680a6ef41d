"""The guard around small commands: nothing that a command starts outlives the command, the guard or the parent."""

import os
import signal
import subprocess
import sys
import uuid
from functools import partial
from pathlib import Path

import processes
import pytest
from processes import MARK, is_alive, marked

from perfladder import guard
from perfladder.guard import descendants

GUARD = str(Path(guard.__file__))
wait_until = partial(processes.wait_until, limit_s=20)

# A child, a grandchild in a session of its own, and a daemon whose parent has gone.
FAMILY = """
import os, subprocess, sys, time
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
print("ready", flush=True)
"""


@pytest.fixture
def mark():
    value = uuid.uuid4().hex
    yield value
    for pid in marked(value):  # only after a failed test
        os.kill(pid, signal.SIGKILL)


class Guarded:
    """A guard with its lifeline, as a session starts it."""

    def __init__(self, source, mark):
        read, self.lifeline = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", GUARD, str(read), sys.executable, "-S", "-c", source],
            pass_fds=(read,),
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, MARK: mark},
        )
        os.close(read)

    def wait_ready(self):
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def end(self):
        if self.lifeline is not None:
            os.close(self.lifeline)
            self.lifeline = None


@pytest.fixture
def guarded(mark):
    started = []

    def start(source):
        started.append(Guarded(source, mark))
        return started[-1]

    yield start
    for one in started:
        one.end()
        one.process.kill()
        one.process.communicate()


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("", 0),
        ("raise SystemExit(7)", 7),
        ("import os; os._exit(200)", 200),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("import ctypes; ctypes.string_at(0)", 139),
    ],
)
def test_exit_code_is_the_commands(guarded, source, code):
    assert guarded(source).process.wait(timeout=20) == code


def test_what_the_command_left_behind_ends_with_it(guarded, mark):
    one = guarded(FAMILY)
    assert one.process.wait(timeout=20) == 0
    assert marked(mark) == []


def test_closing_the_lifeline_ends_everything(guarded, mark):
    one = guarded(FAMILY + "time.sleep(600)")
    one.wait_ready()
    assert len(marked(mark)) == 5
    one.end()
    assert one.process.wait(timeout=20) == 137
    assert marked(mark) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_guard_ends_everything(guarded, mark, number):
    one = guarded(FAMILY + "time.sleep(600)")
    one.wait_ready()
    one.process.send_signal(number)
    assert one.process.wait(timeout=20) == 143
    assert marked(mark) == []


def test_command_that_kills_its_process_group_does_not_kill_the_guard(guarded, mark):
    one = guarded(FAMILY + "import signal; os.killpg(0, signal.SIGKILL)")
    assert one.process.wait(timeout=20) == 137
    assert marked(mark) == []


def test_command_that_ignores_signals_and_forks_on_is_ended(guarded, mark):
    source = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
print("ready", flush=True)
for _ in range(400):
    if os.fork():
        os.setsid() if os.getpid() != os.getsid(0) else None
        time.sleep(0.01)
        os._exit(0)
"""
    one = guarded(source.replace("os._exit(0)", "time.sleep(600)"))
    one.wait_ready()
    one.end()
    assert one.process.wait(timeout=20) == 137
    assert marked(mark) == []


def test_the_direct_child_ends_when_the_guard_itself_is_killed(guarded, mark):
    one = guarded("import time; print('ready', flush=True); time.sleep(600)")
    one.wait_ready()
    os.kill(one.process.pid, signal.SIGKILL)
    wait_until(lambda: marked(mark) == [])


def test_command_inherits_what_was_passed_on_but_not_the_lifeline(guarded):
    one = guarded("import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[:-1] == [0, 1, 2])")
    assert one.process.stdout is not None
    assert one.process.stdout.read() == b"True\n"


PARENT = """
import os, subprocess, sys, time
read, write = os.pipe()
command = [sys.executable, "-S", "-c", {family!r}]
subprocess.Popen([sys.executable, "-I", "-S", {guard!r}, str(read), *command], pass_fds=(read,))
if {forks}:
    # A forked child holds a copy of the lifeline open.
    if os.fork() == 0:
        del os.environ["{mark}"]
        os.execvpe(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(6)"], os.environ)
time.sleep(600)
"""


@pytest.mark.parametrize("forks", [False, True])
def test_parent_killed_outright_leaves_nothing(mark, forks):
    source = PARENT.format(guard=GUARD, family=FAMILY + "time.sleep(600)", forks=forks, mark=MARK)
    with subprocess.Popen(
        [sys.executable, "-S", "-c", source], stdout=subprocess.PIPE, env={**os.environ, MARK: mark}
    ) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"ready\n"
            assert len(marked(mark)) == 6
        finally:
            os.kill(parent.pid, signal.SIGKILL)
        wait_until(lambda: marked(mark) == [])


def test_descendants_lists_the_whole_tree():
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', 'input()'])"],
        stdin=subprocess.PIPE,
    ) as process:
        wait_until(lambda: len(descendants(process.pid)) == 1)
        assert process.pid in descendants(os.getpid())
        process.communicate(b"\n")
    assert descendants(process.pid) == []


# What a process with threads looks like on its way out, for as long as its other threads take.
HALF_ENDED = """
import ctypes, platform, subprocess, sys, threading, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
threading.Thread(target=time.sleep, args=(600,)).start()
print(child.pid, flush=True)
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""


def test_a_process_of_which_only_threads_are_left_is_alive_and_so_is_what_it_started():
    with subprocess.Popen([sys.executable, "-S", "-c", HALF_ENDED], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            wait_until(lambda: not is_alive(process.pid))
            assert {process.pid, child} <= set(descendants(os.getpid()))
            process.kill()
            wait_until(lambda: process.pid not in descendants(os.getpid()))
        finally:
            process.kill()
            os.kill(child, signal.SIGKILL)


def test_what_a_half_ended_process_started_ends_with_the_command(guarded, mark):
    source = f"""
import subprocess, sys, time
half = subprocess.Popen([sys.executable, "-S", "-c", {HALF_ENDED!r}], stdout=subprocess.PIPE)
half.stdout.readline()
while " Z " not in open(f"/proc/{{half.pid}}/stat").read():
    time.sleep(0.01)
"""
    assert guarded(source).process.wait(timeout=20) == 0
    assert marked(mark) == []
