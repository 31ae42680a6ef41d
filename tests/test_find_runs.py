"""Runs are found by what a user calls them."""

import json
import subprocess
import sys

import pytest

from perfladder.errors import InputError
from perfladder.find_runs import find_run, find_runs
from perfladder.rundir import RunDirectory
from perfladder.rungs.base import RungResult
from perfladder.workload import parse_workload


@pytest.fixture
def make(tmp_path):
    def make(name, run_id, commit=None, **rungs):
        workload = parse_workload({"name": name, "target": "m:f"})
        run = RunDirectory.create(tmp_path, workload, source=name, base_dir=tmp_path)
        for number, (rung, status) in enumerate(rungs.items()):
            run.write_result(run.rung_folder(number, rung), rung, RungResult(rung=rung), status, None)
        path = run.path.rename(run.path.with_name(run_id))
        if commit is not None:
            (path / "environment.json").write_text(json.dumps({"git": {"commit": commit, "dirty": False}}))
        return path

    return make


def test_a_run_is_found_by_folder_id_workload_commit_and_latest(make, tmp_path):
    first = make("a", "20260101T000000-aaaaaa", commit="1234567890abcdef" + "0" * 24)
    second = make("a", "20260102T000000-bbbbbb", commit="1234fff" + "0" * 33)
    third = make("b", "20260103T000000-cccccc")
    assert find_run(str(first), tmp_path) == first
    assert find_run("20260102T000000-bbbbbb", tmp_path) == second
    assert find_run("latest", tmp_path) == third
    assert find_run("a", tmp_path) == second, "the newest of the workload"
    assert find_run("12345", tmp_path) == first
    assert find_run("1234", tmp_path) == second, "the newest of that commit"
    assert find_runs("a,latest", tmp_path) == [second, third]


def test_the_newest_run_is_the_newest_with_a_finished_rung_and_newer_ones_are_told(make, tmp_path, caplog):
    first = make("a", "20260101T000000-aaaaaa", commit="1234" + "0" * 36, stages="done", kernels="failed")
    newer = make("a", "20260102T000000-bbbbbb", commit="1234" + "0" * 36)
    failed = make("a", "20260103T000000-cccccc", stages="failed", kernels="skipped")
    other = make("b", "20260104T000000-dddddd")
    damaged = make("b", "20260105T000000-eeeeee")
    (damaged / "run.json").write_text("{")
    for name, newest in (("latest", damaged), ("a", failed), ("1234", newer)):
        caplog.clear()
        assert find_run(name, tmp_path) == first
        (told,) = caplog.messages
        assert f"The newest run, {newest.name}, has no finished rung, so {first.name} is taken" in told
        assert f"perfladder report {newest}" in told
    caplog.clear()
    assert find_run(newer.name, tmp_path) == newer, "who names it means it"
    assert find_run(str(other), tmp_path) == other
    assert find_run("b", tmp_path) == damaged, "none of them has one"
    assert find_run("latest", tmp_path, workload_name="a", needs_results=False) == failed
    assert caplog.messages == []


def test_the_command_names_a_newer_run_without_results_in_one_line_on_stderr(make, tmp_path):
    first = make("a", "20260101T000000-aaaaaa", stages="done")
    newer = make("a", "20260102T000000-bbbbbb")
    command = [sys.executable, "-m", "perfladder.cli", "show", "latest", "--json", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["run_dir"] == str(first)
    (line,) = done.stderr.splitlines()
    assert newer.name in line


def test_what_is_not_found_is_said_with_what_there_is(make, tmp_path):
    with pytest.raises(InputError, match=r"no run 'a'.*none below"):
        find_run("a", tmp_path)
    newest = make("a", "20260101T000000-aaaaaa")
    with pytest.raises(InputError, match=rf"no run 'ffff'.*a commit.*{newest}"):
        find_run("ffff", tmp_path)
    with pytest.raises(InputError, match=r"no run: it has no run\.json"):
        find_run(str(tmp_path), tmp_path)
