"""Real sessions around a target that misbehaves as its factory or its call is told to."""

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from functools import partial

import processes
import pytest
from processes import MARK, marked

from perfladder.errors import InputError, WorkloadCrashError, WorkloadError, WorkloadTimeoutError
from perfladder.rungs.stages import StagesRequest
from perfladder.rungs.stages import measure as measure_stages
from perfladder.session import LocalSession, Session, _reason
from perfladder.target import LoadRequest, PreloadRequest, load, preload

wait_until = partial(processes.wait_until, limit_s=30)
LIMIT_S = 120

TARGET = """
    import ctypes, os, signal, subprocess, sys, time

    def build(act="nothing"):
        globals()[act]()
        return call

    def call(act="nothing"):
        return globals()[act]()

    def nothing():
        return 1

    def complain():
        print("about to fail", flush=True)

    def segfault():
        complain()
        ctypes.string_at(0)

    def exit_at_once():
        complain()
        os._exit(3)

    def ask_to_exit():
        raise SystemExit(0)

    def be_killed():
        os.kill(os.getpid(), signal.SIGKILL)

    def sleep():
        time.sleep(1000)

    def sleep_in_c():
        ctypes.CDLL(None).sleep(1000)

    def hold_the_gil():
        ctypes.PyDLL(None).sleep(1000)

    def hang_with_a_family():
        sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
        subprocess.Popen(sleep)
        subprocess.Popen(sleep, start_new_session=True)
        time.sleep(1000)

    def leave_a_daemon():
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)

    def run_out_of_memory():
        import resource, torch
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
        return torch.zeros(1 << 32)

    def flood():
        for _ in range(200):
            sys.stdout.write("x" * (1 << 20))
        print("the last line")

    def close_the_standard_streams():
        for fd in (0, 1, 2):
            os.close(fd)
        kept.append(open(os.devnull))

    def close_everything():
        os.closerange(3, 256)
        kept.extend(open(os.devnull, "w") for _ in range(16))

    def fork_and_return():
        os.fork()

    kept = []
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, write_target):
    folder = tmp_path_factory.mktemp("session")
    write_target(folder, TARGET)
    return folder


@pytest.fixture
def mark():
    return uuid.uuid4().hex


@pytest.fixture
def start(folder, write_target, tmp_path, mark):
    """Start a session whose factory or call acts; it is closed at the end, and must then have left nothing."""
    sessions = []

    def make(build="nothing", call="nothing"):
        file = write_target(
            folder, TARGET, target_args={"act": build}, inputs={"act": call}, measured_runs=1, stages="auto"
        )
        session = Session(file, log_path=tmp_path / "session.log", environment={**os.environ, MARK: mark})
        session.__enter__()
        sessions.append(session)
        return session

    yield make
    for session in sessions:
        session.close()
    assert marked(mark) == []


def run_stages(session, timeout_s=LIMIT_S):
    session.call(load, LoadRequest(), timeout_s=LIMIT_S)
    return session.call(measure_stages, StagesRequest(), timeout_s=timeout_s)


def test_a_session_answers_request_after_request(start, mark):
    session = start()
    assert session.call(preload, PreloadRequest(), timeout_s=LIMIT_S).import_s > 0
    info = session.call(load, LoadRequest(), timeout_s=LIMIT_S)
    assert info.target_type == "builtins.function"
    result = session.call(measure_stages, StagesRequest(), timeout_s=LIMIT_S)
    assert result.status == "done"
    assert session.is_alive
    assert len(marked(mark)) == 2, "the guard and the worker"
    session.close()
    session.close()
    assert not session.is_alive
    with pytest.raises(WorkloadCrashError, match="has ended already"):
        session.call(load, LoadRequest(), timeout_s=1)


def test_an_error_travels_as_its_class_and_the_session_lives_on(start):
    session = start(build="missing_act")
    with pytest.raises(WorkloadError, match="KeyError: 'missing_act'"):
        session.call(load, LoadRequest(), timeout_s=LIMIT_S)
    with pytest.raises(WorkloadError, match="KeyError"):
        session.call(load, LoadRequest(), timeout_s=LIMIT_S)
    assert session.is_alive


def test_segfault_is_a_crash_that_names_the_signal_and_the_last_output(start):
    with pytest.raises(WorkloadCrashError, match="SIGSEGV") as caught:
        run_stages(start(call="segfault"))
    assert "about to fail" in str(caught.value)
    assert "in segfault" in str(caught.value), "the fault handler shows where"
    assert caught.value.exit_code == 3


def test_segfault_before_the_answer_is_awaited_is_the_same_crash(start):
    session = start(build="segfault")
    session.submit(load, LoadRequest())
    wait_until(lambda: not session.is_alive)
    with pytest.raises(WorkloadCrashError, match="SIGSEGV"):
        session.result(load, timeout_s=5)


def test_hang_ends_at_the_deadline_with_all_descendants_and_says_where(start, mark):
    session = start(call="hang_with_a_family")
    with pytest.raises(WorkloadTimeoutError, match="did not finish 'stages' within 2 s") as caught:
        run_stages(session, timeout_s=2)
    assert "in hang_with_a_family" in str(caught.value)
    assert marked(mark) == []


@pytest.mark.slow
@pytest.mark.parametrize("act", ["sleep", "sleep_in_c", "hold_the_gil"])
def test_hang_in_c_code_ends_at_the_deadline_and_says_where(start, act):
    with pytest.raises(WorkloadTimeoutError, match=f"It was at: .*in {act}"):
        run_stages(start(call=act), timeout_s=2)


@pytest.mark.slow
def test_hang_while_loading_ends_at_the_deadline(start):
    with pytest.raises(WorkloadTimeoutError, match="did not finish 'load' within 6 s"):
        start(build="sleep").call(load, LoadRequest(), timeout_s=6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "expected"),
    [
        ("exit_at_once", "it exited with code 3"),
        ("be_killed", "killed by SIGKILL, as the kernel does when memory runs out"),
    ],
)
def test_sudden_end_is_a_crash_with_its_reason(start, act, expected):
    with pytest.raises(WorkloadCrashError, match=expected):
        run_stages(start(call=act))


@pytest.mark.slow
def test_a_log_that_nobody_asked_for_is_quoted_and_gone(folder, write_target):
    file = write_target(folder, TARGET, target_args={"act": "nothing"}, inputs={"act": "exit_at_once"})
    with Session(file, log_path=None) as session:
        session.call(load, LoadRequest(), timeout_s=LIMIT_S)
        with pytest.raises(WorkloadCrashError, match=r"Its last output:\n  "):
            session.call(measure_stages, StagesRequest(), timeout_s=LIMIT_S)
    assert not session.log_path.parent.exists()


@pytest.mark.slow
def test_system_exit_is_an_error_and_no_crash(start):
    session = start(call="ask_to_exit")
    with pytest.raises(WorkloadError, match="raised: SystemExit: 0"):
        run_stages(session)
    assert session.is_alive


@pytest.mark.slow
def test_out_of_memory_is_named(start):
    with pytest.raises(WorkloadError, match="The workload's call ran out of memory"):
        run_stages(start(call="run_out_of_memory"))


@pytest.mark.slow
def test_flood_on_stdout_breaks_nothing(start):
    session = start(call="flood")
    assert run_stages(session).status == "done"
    assert session.log_path.stat().st_size > 200 << 20
    assert "the last line" in session._log_tail()
    assert len(session._log_tail()) < 20_000


@pytest.mark.slow
def test_closed_standard_streams_break_nothing(start):
    assert run_stages(start(build="close_the_standard_streams")).status == "done"


@pytest.mark.slow
def test_target_that_closes_the_pipes_is_told_so(start):
    with pytest.raises(WorkloadCrashError, match="closed file descriptors that it did not open"):
        run_stages(start(build="close_everything"))


@pytest.mark.slow
def test_forked_child_that_returns_does_not_answer_for_its_parent(start):
    session = start(call="fork_and_return")
    assert run_stages(session).status == "done"
    assert session.call(load, LoadRequest(), timeout_s=LIMIT_S).target_type == "builtins.function"


@pytest.mark.slow
def test_daemon_of_the_target_ends_with_the_session(start, mark):
    session = start(build="leave_a_daemon")
    session.call(load, LoadRequest(), timeout_s=LIMIT_S)
    assert len(marked(mark)) == 3
    session.close()
    assert marked(mark) == []


@pytest.mark.slow
def test_session_outlives_the_thread_that_started_it(start):
    started = []
    thread = threading.Thread(target=lambda: started.append(start()))
    thread.start()
    thread.join()
    time.sleep(1.5)
    assert run_stages(started[0]).status == "done"


OWNER = """
import sys
from pathlib import Path
from perfladder.session import Session
from perfladder.target import LoadRequest, load
from perfladder.workload import WorkloadFile, parse_workload
workload = parse_workload({"name": "x", "target": "pipe.py:build", "target_args": {"act": "hang_with_a_family"}})
with Session(WorkloadFile(workload, Path(sys.argv[1])), log_path=Path(sys.argv[2])) as session:
    print("ready", flush=True)
    session.call(load, LoadRequest(), timeout_s=600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_owner_that_ends_leaves_nothing(folder, tmp_path, mark, number):
    command = [sys.executable, "-c", OWNER, str(folder), str(tmp_path / "log")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, MARK: mark}
    ) as owner:
        try:
            wait_until(lambda: len(marked(mark)) >= 5, limit_s=60)
        finally:
            owner.send_signal(number)
        wait_until(lambda: marked(mark) == [])
        assert owner.wait(timeout=30) == -number


def test_session_that_cannot_start_its_worker_says_why(write_target, tmp_path):
    file = write_target(tmp_path, TARGET)
    with pytest.raises(WorkloadCrashError, match="No module named"):  # noqa: SIM117
        with Session(file, log_path=tmp_path / "log", environment={"PYTHONHOME": str(tmp_path)}) as session:
            session.call(load, LoadRequest(), timeout_s=20)


def test_session_that_does_not_start_leaves_no_log(write_target, tmp_path):
    session = Session(write_target(tmp_path, TARGET), log_path=None, folder=tmp_path / "missing")
    with pytest.raises(FileNotFoundError), session:
        pass
    assert not session.log_path.parent.exists()


def test_session_in_this_process_runs_the_same_functions(wrap):
    result = LocalSession(wrap(lambda: 1, measured_runs=1)).call(measure_stages, StagesRequest(), timeout_s=1)
    assert result.status == "done"


def test_wrong_stage_in_this_process_is_the_same_error(wrap):
    with pytest.raises(InputError):
        LocalSession(wrap(lambda: 1, stages=["x"])).call(measure_stages, StagesRequest(), timeout_s=1)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (139, "killed by SIGSEGV (a segmentation fault)"),
        (134, "killed by SIGABRT"),
        (137, "killed by SIGKILL, as the kernel does when memory runs out"),
        (1, "it exited with code 1"),
        (255, "it exited with code 255"),
        (None, "it closed its pipe without ending"),
    ],
)
def test_reason_of_an_exit_code(code, expected):
    assert _reason(code) == expected
