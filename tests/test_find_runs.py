"""Runs are found by what a user calls them."""

import json

import pytest

from perfladder.errors import InputError
from perfladder.find_runs import find_run, find_runs
from perfladder.rundir import RunDirectory
from perfladder.workload import parse_workload


@pytest.fixture
def make(tmp_path):
    def make(name, run_id, commit=None):
        workload = parse_workload({"name": name, "target": "m:f"})
        made = RunDirectory.create(tmp_path, workload, source=name, base_dir=tmp_path).path
        path = made.rename(made.with_name(run_id))
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


def test_what_is_not_found_is_said_with_what_there_is(make, tmp_path):
    with pytest.raises(InputError, match=r"no run 'a'.*none below"):
        find_run("a", tmp_path)
    newest = make("a", "20260101T000000-aaaaaa")
    with pytest.raises(InputError, match=rf"no run 'ffff'.*a commit.*{newest}"):
        find_run("ffff", tmp_path)
    with pytest.raises(InputError, match=r"no run: it has no run\.json"):
        find_run(str(tmp_path), tmp_path)
