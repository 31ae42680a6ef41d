"""Old traces and captures go, results stay, and nothing outside the runs folder is touched."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from documents import printed

from perfladder import retention
from perfladder.errors import InputError, NotPossibleHereError
from perfladder.report import build_report
from perfladder.retention import Rule, all_runs, collect, mark
from perfladder.rundir import RunDirectory
from perfladder.rungs.capture import CaptureResult
from perfladder.rungs.stages import StagesResult

NOW = datetime(2026, 6, 30, tzinfo=UTC)
TRACE, TENSORS = "2-regions/regions.trace.json", "3-capture/tensors.safetensors"
DATA = {TRACE, TENSORS, "3-capture/manifest.json"}
MakeOld = Callable[..., RunDirectory]


@pytest.fixture
def runs_dir(tmp_path):
    return tmp_path / "runs"


@pytest.fixture
def make_old(runs_dir, make_workload) -> MakeOld:
    """Make a finished run that is so many days old, with a trace of 1000 bytes and a capture of 500."""

    def make(days: float, name: str = "test", **record: object) -> RunDirectory:
        run = RunDirectory.create(runs_dir, make_workload(name=name), source="x.yaml", base_dir=runs_dir)
        ended = NOW - timedelta(days=days)
        moved = run.path.with_name(f"{ended:%Y%m%dT%H%M%S}-{os.urandom(3).hex()}")
        run.path.rename(moved)
        run = RunDirectory(moved, run.record.model_copy(update={"run_id": moved.name}))
        for number, result in ((1, StagesResult()), (3, CaptureResult())):
            folder = run.rung_folder(number, result.rung)
            run.write_result(folder, result.rung, result, "done", None)
        (run.rung_folder(2, "regions") / "regions.trace.json").write_bytes(b"x" * 1000)
        (moved / "3-capture/manifest.json").write_bytes(b"x" * 100)
        (moved / "3-capture/tensors.safetensors").write_bytes(b"x" * 400)
        run.update(**{"status": "done", "exit_code": 0, "ended_at": ended.isoformat(), **record})
        return run

    return make


def files_of(run: RunDirectory) -> set[str]:
    return {str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_file()}


def decisions(result: retention.GcResult) -> dict[str, str]:
    return {Path(row.run).name: row.decision for row in result.runs}


def test_a_look_shows_sizes_and_changes_nothing(make_old: MakeOld, runs_dir: Path) -> None:
    run = make_old(10)
    (runs_dir / "mlflow.db").write_bytes(b"x" * 7)
    before = files_of(run)
    result = collect(runs_dir, Rule(keep=0), is_wanted=False, now=NOW)
    (row,) = result.runs
    assert (row.data_bytes, row.decision) == (1500, "would_be_deleted")
    assert row.total_bytes > 1500
    assert result.other_bytes == {"mlflow.db": 7}
    assert files_of(run) == before


def test_results_and_reports_stay(make_old: MakeOld, runs_dir: Path) -> None:
    run = make_old(10)
    before, report = files_of(run), build_report(run.path)
    result = collect(runs_dir, Rule(older_than_days=5), is_wanted=True, now=NOW)
    assert decisions(result) == {run.path.name: "deleted"}
    assert files_of(run) == before - DATA | {"removed.json"}
    assert set(json.loads((run.path / "removed.json").read_text())["files"]) == DATA
    assert build_report(run.path).rungs == report.rungs
    assert [row.why for row in collect(runs_dir, Rule(keep=0), is_wanted=True, now=NOW).runs] == ["nothing to delete"]


def test_the_newest_of_each_workload_stay_whole(make_old: MakeOld, runs_dir: Path) -> None:
    old, new, other = make_old(9), make_old(8), make_old(30, name="other")
    result = collect(runs_dir, Rule(keep=1), is_wanted=True, now=NOW)
    assert decisions(result) == {old.path.name: "deleted", new.path.name: "stays", other.path.name: "stays"}


def test_with_both_limits_a_run_is_beyond_both(make_old: MakeOld, runs_dir: Path) -> None:
    oldest, old, young = make_old(30), make_old(20), make_old(1)
    result = collect(runs_dir, Rule(keep=1, older_than_days=25), is_wanted=False, now=NOW)
    assert decisions(result) == {
        oldest.path.name: "would_be_deleted",
        old.path.name: "stays",
        young.path.name: "stays",
    }


def test_protected_and_compared_and_running_runs_stay_whole(make_old: MakeOld, runs_dir: Path) -> None:
    protected, compared, baseline, running, broken, free = (make_old(day) for day in range(10, 16))
    mark(protected.path, is_kept=True)
    (runs_dir / "comparisons/one").mkdir(parents=True)
    named = json.dumps({"candidate": {"runs": [str(compared.path)]}})
    (runs_dir / "comparisons/one/comparison.json").write_text(named)
    (runs_dir / "baseline.json").write_text(json.dumps({"run_id": baseline.path.name}))
    running.update(status="running", ended_at=None)
    (broken.path / "run.json").write_text("{")
    result = collect(runs_dir, Rule(keep=0), is_wanted=True, now=NOW)
    assert {name for name, decision in decisions(result).items() if decision != "stays"} == {free.path.name}
    assert {row.why for row in result.runs} == {
        "protected",
        "a comparison or a baseline names it",
        "it runs",
        "its record cannot be read",
        "",
    }
    mark(protected.path, is_kept=False)
    again = collect(runs_dir, Rule(keep=0), is_wanted=False, now=NOW)
    assert decisions(again)[protected.path.name] == "would_be_deleted"


def test_links_are_not_followed(make_old: MakeOld, runs_dir: Path, tmp_path: Path) -> None:
    run = make_old(10)
    outside = tmp_path / "outside"
    (outside / "run/2-regions").mkdir(parents=True)
    precious = outside / "run/2-regions/precious.trace.json"
    precious.write_text("precious")
    (outside / "run/run.json").write_text((run.path / "run.json").read_text())
    (run.path / "2-regions/link.trace.json").symlink_to(precious)
    (run.path / "4-linked").symlink_to(outside / "run/2-regions")
    (runs_dir / "test/20260101T000000-aaaaaa").symlink_to(outside / "run")
    (runs_dir / "linked").symlink_to(outside)
    assert all_runs(runs_dir) == [run.path]
    collect(runs_dir, Rule(keep=0), is_wanted=True, now=NOW)
    assert precious.read_text() == "precious"
    assert not (run.path / TRACE).exists()
    assert (run.path / "2-regions/link.trace.json").is_symlink()


def test_a_deletion_that_is_interrupted_leaves_a_valid_run_and_is_completed(
    make_old: MakeOld, runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, unlink = make_old(10), os.unlink
    gone: list[str] = []

    def interrupted(name: str, **options: int) -> None:
        if options:
            if gone:
                raise KeyboardInterrupt
            gone.append(name)
        unlink(name, **options)

    monkeypatch.setattr(os, "unlink", interrupted)
    with pytest.raises(KeyboardInterrupt):
        collect(runs_dir, Rule(keep=0), is_wanted=True, now=NOW)
    monkeypatch.undo()
    # A capture without its manifest is none: nobody replays what is left of it.
    assert gone == ["manifest.json"]
    assert build_report(run.path).rungs
    collect(runs_dir, Rule(keep=0), is_wanted=True, now=NOW)
    assert not files_of(run) & DATA
    assert set(json.loads((run.path / "removed.json").read_text())["files"]) == DATA


def test_a_folder_swapped_for_a_link_is_not_entered(make_old: MakeOld, tmp_path: Path) -> None:
    run = make_old(10)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/regions.trace.json").write_text("precious")
    (run.path / "2-regions").rename(tmp_path / "moved")
    (run.path / "2-regions").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="2-regions"):
        retention._unlink_below(run.path, TRACE)
    assert (tmp_path / "outside/regions.trace.json").read_text() == "precious"


def test_deleting_without_a_rule_or_a_folder_is_refused(make_old: MakeOld, runs_dir: Path, tmp_path: Path) -> None:
    make_old(10)
    with pytest.raises(InputError, match="--keep N, --older-than DAYS, or both"):
        collect(runs_dir, Rule(), is_wanted=True)
    with pytest.raises(InputError, match=r"no runs folder .*none.*--out"):
        collect(tmp_path / "none", Rule(), is_wanted=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may delete anywhere")
def test_a_file_that_cannot_be_deleted_is_named(make_old: MakeOld, runs_dir: Path) -> None:
    run = make_old(10)
    (run.path / "2-regions").chmod(0o500)
    try:
        with pytest.raises(NotPossibleHereError, match="all results are there"):
            collect(runs_dir, Rule(keep=0), is_wanted=True, now=NOW)
    finally:
        (run.path / "2-regions").chmod(0o700)


def test_the_command_deletes_only_when_told_to(make_old: MakeOld, runs_dir: Path) -> None:
    run, kept = make_old(10), make_old(11)
    command = [sys.executable, "-m", "perfladder.cli", "gc", "--out", str(runs_dir), "--json", "--keep", "0"]
    for more in (["--protect", kept.path.name], ["--yes", "--dry-run"]):
        done = subprocess.run([*command, *more], capture_output=True, check=True, timeout=60)
        assert not printed("gc", done.stdout)["is_done"]
        assert files_of(run) >= DATA
    done = subprocess.run(
        [*command[:-3], "--keep", "0", "--yes"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "deleted" in done.stdout
    assert "protected" in done.stdout
    assert not files_of(run) & DATA
    assert files_of(kept) >= DATA
