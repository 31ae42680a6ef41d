"""An unfinished run is gone on with in its own folder: what still holds is taken over, and nothing else."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from perfladder import content_key
from perfladder.checksums import Checksums
from perfladder.content_key import SourcesRequest, list_sources, weight_files
from perfladder.environment import collect_environment
from perfladder.errors import InputError
from perfladder.find_runs import find_run
from perfladder.ladder import RUNGS, Climb, climb
from perfladder.resume import Keys
from perfladder.rundir import RunDirectory
from perfladder.rungs.base import RungResult
from perfladder.workload import WorkloadFile

NAMES = [rung.name for rung in RUNGS if not rung.is_optional]


class Kind:
    """A rung whose result is the base of all results."""

    def __init__(self, name):
        self.name, self.result_type = name, RungResult


KINDS = [Kind("first"), Kind("second"), Kind("third")]


@pytest.fixture(scope="module")
def environment():
    return collect_environment({})


@pytest.fixture
def file(tmp_path, make_workload):
    (tmp_path / "net.safetensors").write_text("weights")
    return WorkloadFile(make_workload(target_args={"weights": "net.safetensors"}), tmp_path)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "pipe.py"
    path.write_text("x = 1\n")
    return path


@pytest.fixture
def unfinished(tmp_path, file, environment, source):
    """A run with three results, as a killed process leaves it."""
    with_sources = {str(source): Checksums().of(source)}
    run = RunDirectory.create(tmp_path / "runs", file.workload, source="x", base_dir=tmp_path)
    keys = Keys(run, file, environment, Checksums())
    keys.add_sources(with_sources)
    for number, kind in enumerate(KINDS):
        folder = run.rung_folder(number, kind.name)
        (folder / "trace.json").write_text("[]")
        result = RungResult(rung=kind.name, artifacts={"trace": "trace.json"})
        run.write_result(folder, kind.name, result, "done", None, keys.key_of(kind.name))
    run.close()
    return run.path


def holding(path, file, environment):
    run = RunDirectory.open(path)
    found = Keys(run, file, environment, Checksums()).holding(KINDS)
    return list(found.results), found.reason


def test_all_holds_where_nothing_has_changed(unfinished, file, environment):
    assert holding(unfinished, file, environment) == (["first", "second", "third"], None)


def test_another_limit_is_no_other_work(unfinished, file, environment):
    changes = {"timeout_s": 5.0, "budget": {"max_rung_time_s": 3}}
    workload = type(file.workload).model_validate({**file.workload.model_dump(mode="json"), **changes})
    assert holding(unfinished, file._replace(workload=workload), environment)[1] is None


def test_a_changed_field_is_named_with_both_values(unfinished, file, environment):
    changed = file._replace(workload=file.workload.model_copy(update={"inputs": {"steps": 4}}))
    names, reason = holding(unfinished, changed, environment)
    assert names == []
    assert reason == "first is measured again, and what follows it: workload.inputs.steps is 4 now, and was None."


def test_another_machine_is_named(unfinished, file, environment):
    other = environment.model_copy(update={"packages": {**environment.packages, "torch": "9.9"}})
    names, reason = holding(unfinished, file, other)
    assert names == []
    assert "environment.packages.torch is '9.9' now, and was" in reason


@pytest.mark.parametrize("name", ["pipe.py", "net.safetensors"])
def test_a_changed_file_is_named(unfinished, file, environment, source, name):
    path = source.parent / name
    path.write_text(path.read_text() + "# more")
    assert f"the file {path} has changed" in holding(unfinished, file, environment)[1]
    path.unlink()
    assert f"the file {path} is gone" in holding(unfinished, file, environment)[1]


def test_another_version_of_perfladder_is_named(unfinished, file, environment, monkeypatch):
    monkeypatch.setattr("perfladder.resume.__version__", "7.0")
    assert "perfladder is 7.0 now, and was" in holding(unfinished, file, environment)[1]


def test_what_follows_a_damaged_result_is_measured_again_too(unfinished, file, environment):
    (unfinished / "1-second" / "second.json").write_text('{"rung": "sec')
    names, reason = holding(unfinished, file, environment)
    assert names == ["first"]
    assert "second is measured again, and what follows it:" in reason
    assert "second.json is damaged" in reason
    assert reason.endswith(".")
    assert ".." not in reason.replace(str(unfinished), "")


def test_a_result_that_was_edited_is_noticed_by_what_rests_on_it(unfinished, file, environment):
    path = unfinished / "1-second" / "second.json"
    path.write_text(path.read_text().replace('"device": null', '"device": "cuda"'))
    names, reason = holding(unfinished, file, environment)
    assert names == ["first", "second"]
    assert "configuration.rests_on.second is" in reason


def test_a_missing_trace_is_measured_again(unfinished, file, environment):
    (unfinished / "2-third" / "trace.json").unlink()
    assert holding(unfinished, file, environment) == (
        ["first", "second"],
        f"third is measured again, and what follows it: {unfinished / '2-third' / 'trace.json'} is gone.",
    )


@pytest.mark.parametrize("status", ["failed", "skipped"])
def test_what_failed_is_measured_again_and_what_was_skipped_is_decided_again(unfinished, file, environment, status):
    path = unfinished / "run.json"
    record = json.loads(path.read_text())
    record["rungs"][1]["status"] = status
    path.write_text(json.dumps(record))
    names, reason = holding(unfinished, file, environment)
    assert names[:1] == ["first"]
    assert "second" not in names
    assert reason == ("second is measured again, and what follows it: it failed." if status == "failed" else reason)


def test_a_run_of_an_older_perfladder_has_no_keys_and_is_measured_again(unfinished, file, environment):
    path = unfinished / "run.json"
    record = json.loads(path.read_text())
    for entry in record["rungs"]:
        del entry["content_key"]
    path.write_text(json.dumps(record))
    assert "kept without what it rests on" in holding(unfinished, file, environment)[1]


def test_sources_are_as_they_were_when_they_were_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(content_key, "_SEEN", {})
    path = tmp_path / "user_module_of_this_test.py"
    path.write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    __import__(path.stem)
    before = list_sources(None, SourcesRequest()).files
    path.write_text("x = 2\n")
    assert list_sources(None, SourcesRequest()).files[str(path)] == before[str(path)] != Checksums().of(path)
    assert not [name for name in before if "site-packages" in name or name.endswith("/json/__init__.py")]


def test_weights_are_found_by_the_names_that_the_workload_gives(tmp_path, make_workload):
    model = tmp_path / "model"
    (model / "unet").mkdir(parents=True)
    for name in ("unet/a.safetensors", "unet/config.json", "readme.md"):
        (model / name).write_text(name)
    workload = make_workload(target_args={"deep": [{"path": "model"}], "size": "tiny", "bad": "\0", "here": "."})
    found = weight_files(workload, tmp_path)
    assert found == [str(model / "unet/a.safetensors"), str(model / "unet/config.json")]


def test_a_large_file_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr("perfladder.checksums._LARGE_BYTES", 1)
    weights = tmp_path / "w.bin"
    weights.write_text("one")
    first = Checksums(tmp_path / "cache").of(weights)
    monkeypatch.setattr("perfladder.checksums.sha256_of", lambda _: "read again")
    assert Checksums(tmp_path / "cache").of(weights) == first
    weights.write_text("three")
    assert Checksums(tmp_path / "cache").of(weights) == "read again"
    assert Checksums().of(tmp_path / "none") is None


def test_a_run_that_is_being_written_is_not_gone_on_with(tmp_path, make_workload):
    run = RunDirectory.create(tmp_path, make_workload(), source="x", base_dir=tmp_path)
    with pytest.raises(InputError, match=rf"still being written, by process {os.getpid()}"):
        RunDirectory.resume(run.path, make_workload())
    run.close()
    again = RunDirectory.resume(run.path, make_workload())
    assert len(again.record.resumed_at) == 1
    assert again.record.status == "running"


def test_a_finished_run_is_refused_and_one_with_a_failed_rung_is_not(tmp_path, make_workload):
    run = RunDirectory.create(tmp_path, make_workload(), source="x", base_dir=tmp_path)
    run.update(status="done")
    run.close()
    with pytest.raises(InputError, match="is finished, and there is nothing to go on with") as caught:
        RunDirectory.resume(run.path, make_workload())
    assert caught.value.exit_code == 2
    run.write_result(run.rung_folder(1, "stages"), "stages", RungResult(rung="stages"), "failed", "it hung")
    assert RunDirectory.resume(run.path, make_workload()).record.exit_code is None


def test_a_run_of_another_workload_is_refused(tmp_path, make_workload):
    run = RunDirectory.create(tmp_path, make_workload(), source="x", base_dir=tmp_path)
    run.close()
    with pytest.raises(InputError, match="is of the workload 'test', and 'other' was given"):
        RunDirectory.resume(run.path, make_workload(name="other"))


def test_latest_is_the_latest_of_the_workload(tmp_path, make_workload):
    run = RunDirectory.create(tmp_path, make_workload(), source="x", base_dir=tmp_path)
    RunDirectory.create(tmp_path, make_workload(name="other"), source="x", base_dir=tmp_path)
    assert find_run("latest", tmp_path, workload_name="test") == run.path
    with pytest.raises(InputError, match=r"none below .*third"):
        find_run("latest", tmp_path, workload_name="third")


def test_what_a_killed_write_has_left_is_taken_away_and_never_read(tmp_path, make_workload):
    run = RunDirectory.create(tmp_path, make_workload(), source="x", base_dir=tmp_path)
    run.close()
    half = run.path / ".run.json.0a0b.part"
    half.write_text('{"run_id": "ha')
    assert RunDirectory.resume(run.path, make_workload()).record.run_id == run.record.run_id
    assert not half.exists()


TARGET = """
    import os, torch
    from pathlib import Path

    VICTIM = Path(__file__).with_name("victim")

    class Pipe:
        def __init__(self):
            self.net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(20)])

        def __call__(self):
            if VICTIM.exists():
                pid = int(VICTIM.read_text()) or os.getpid()
                VICTIM.unlink()
                os.kill(pid, 9)
            return self.net(torch.ones(8, 64))

    def build():
        torch.manual_seed(0)
        return Pipe()
"""

DRIVER = """
import json, os, resource, signal, sys
from pathlib import Path
from perfladder.errors import PerfladderError
from perfladder.ladder import climb
from perfladder.workload import load_workload

workload, runs_dir, resume, until, act, at = sys.argv[1:]

def tell(line):
    print(line, file=sys.stderr, flush=True)
    if at and line.startswith(at):
        if act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if act == "kill inside":
            Path(workload).with_name("victim").write_text(str(os.getpid()))
        if act == "fill":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

try:
    outcome = climb(load_workload(workload), runs_dir=runs_dir, until=until, tell=tell, resume=resume or None)
    print(outcome.model_dump_json())
except PerfladderError as error:
    print(json.dumps({"error": str(error), "exit_code": error.exit_code}))
"""

_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE = 24, 1


def _obey_permissions():
    """The superuser too may not write where the mode says so."""
    ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, 0, 0, 0)


@pytest.fixture
def drive(tmp_path, write_target):
    """Climb in a process of its own.

    At a line of progress it may `kill` itself, let its target do so (`kill inside`), or `fill` its disk.
    """
    file = write_target(tmp_path, textwrap.dedent(TARGET), name="toy", warmup_runs=1, measured_runs=3, stages=["net"])
    (tmp_path / "toy.yaml").write_text(json.dumps(file.workload.model_dump(mode="json")))

    def run(resume="", until="kernels", act="", at=""):
        arguments = [str(tmp_path / "toy.yaml"), str(tmp_path / "runs"), resume, until, act, at]
        environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, "-c", DRIVER, *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=environment,
            preexec_fn=_obey_permissions,
        )

    return run


def started_at(run_dir):
    record = RunDirectory.open(run_dir).record
    return {e.name: json.loads((run_dir / e.folder / f"{e.name}.json").read_text())["started_at"] for e in record.rungs}


@pytest.mark.slow
def test_killed_before_and_inside_rungs_the_run_loses_none_that_was_finished(drive, tmp_path):
    # The line of a rung comes when it begins, and the one before it is finished then.
    kills = [("kill", "loading the target"), *(("kill", f"{name} (rung") for name in NAMES[1:])]
    kills[2] = ("kill inside", "regions (rung")
    finished, resume = {}, ""
    for act, at in kills:
        done = drive(resume=resume, act=act, at=at)
        assert done.returncode == -signal.SIGKILL, done.stderr
        (run_dir,) = (tmp_path / "runs" / "toy").iterdir()
        now, resume = started_at(run_dir), "latest"
        assert list(now) == NAMES[: max([NAMES.index(name) for name in NAMES if at.startswith(name)], default=0)]
        assert finished.items() <= now.items()
        assert RunDirectory.open(run_dir).record.status == "running"
        finished = now
    (run_dir / "4-kernels" / "kernels.json").write_text('{"rung": "half')
    done = drive(resume=str(run_dir))
    outcome = json.loads(done.stdout)
    assert (outcome["status"], outcome["exit_code"], outcome["run_dir"]) == ("done", 0, str(run_dir)), done.stderr
    assert finished.items() < started_at(run_dir).items()
    assert done.stderr.count("taken over, as measured at") == len(NAMES) - 1
    assert len(RunDirectory.open(run_dir).record.resumed_at) == len(kills)
    assert (run_dir / "report.md").is_file()
    assert list((tmp_path / "runs" / "toy").iterdir()) == [run_dir]


@pytest.mark.slow
def test_a_full_disk_costs_nothing_that_was_finished(drive, tmp_path):
    full = json.loads(drive(act="fill", at="capture", until="capture").stdout)
    assert full["exit_code"] == 4
    assert "cannot be written" in full["error"]
    (run_dir,) = (tmp_path / "runs" / "toy").iterdir()
    assert f"--resume {run_dir.name}" in full["error"]
    before = started_at(run_dir)
    assert list(before) == ["stages"]
    run_dir.chmod(0o500)
    read_only = json.loads(drive(resume="latest", until="capture").stdout)
    run_dir.chmod(0o700)
    assert (read_only["exit_code"], "Permission denied" in read_only["error"]) == (4, True), read_only
    (tmp_path / "pipe.py").write_text((tmp_path / "pipe.py").read_text() + "\n# changed\n")
    done = drive(resume="latest", until="capture")
    assert json.loads(done.stdout)["status"] == "done", done.stderr
    assert f"stages is measured again, and what follows it: the file {tmp_path / 'pipe.py'} has changed" in done.stderr
    assert started_at(run_dir)["stages"] > before["stages"]


@pytest.mark.slow
def test_a_killed_session_costs_its_rung_which_is_measured_when_the_run_is_gone_on_with(tmp_path, write_target):
    file = write_target(tmp_path, TARGET, name="toy", warmup_runs=1, measured_runs=3, stages=["net"])
    runs_dir = tmp_path / "runs"
    with Climb(file, source="x", runs_dir=runs_dir, until="capture") as ladder:
        ladder.wait_until_loaded()
        for rung in ladder.rungs_to_climb():
            if rung.name == "capture":
                (tmp_path / "victim").write_text("0")
            ladder.climb_rung(rung)
        first = ladder.finish()
    ladder.run.close()
    assert [entry.status for entry in ladder.run.record.rungs] == ["done", "failed"]
    told = []
    outcome = climb(file, runs_dir=runs_dir, until="capture", resume=first.run_dir, tell=told.append)
    assert (outcome.run_dir, outcome.exit_code) == (first.run_dir, 0)
    assert "capture is measured again, and what follows it: it failed." in told
    assert any(line.startswith("stages (rung 1): taken over") for line in told)
