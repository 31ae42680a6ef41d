import json
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from perfladder import rundir
from perfladder.errors import InputError, NotPossibleHereError
from perfladder.files import write_atomically
from perfladder.models import SCHEMA_VERSION, Model
from perfladder.rundir import RunDirectory, RunRecord, read_model

GOLDEN = Path(__file__).parent / "data" / "golden_v1"


class Small(Model):
    schema_version: int = SCHEMA_VERSION
    value: float


@pytest.fixture
def run(tmp_path, make_workload):
    return RunDirectory.create(tmp_path / "runs", make_workload(), source="test.yaml", base_dir=tmp_path)


def test_a_new_run_lies_on_disk_before_anything_is_measured(run, tmp_path):
    assert run.path.parent == tmp_path / "runs" / "test"
    assert (run.path / "workload.yaml").is_file()
    record = RunDirectory.open(run.path).record
    assert record == run.record
    assert record.status == "running"


def test_a_written_result_is_noted_in_the_record(run):
    folder = run.rung_folder(1, "stages")
    run.write_result(folder, "stages", Small(value=1.0), "failed", "it hung")
    run.write_result(folder, "stages", Small(value=2.0), "done", None)
    again = RunDirectory.open(run.path)
    assert [(e.name, e.folder, e.status, e.reason) for e in again.record.rungs] == [
        ("stages", "1-stages", "done", None)
    ]
    assert read_model(folder / "stages.json", Small).value == 2.0


def test_two_runs_of_one_second_have_folders_of_their_own(tmp_path, make_workload):
    runs = [RunDirectory.create(tmp_path, make_workload(), source="x", base_dir=tmp_path) for _ in range(3)]
    assert len({run.path for run in runs}) == 3


def test_folder_that_cannot_be_made_is_found_first(tmp_path, make_workload):
    (tmp_path / "runs").write_text("a file where the folder should be")
    with pytest.raises(NotPossibleHereError, match=r"cannot be written.*--out") as caught:
        RunDirectory.create(tmp_path / "runs", make_workload(), source="x", base_dir=tmp_path)
    assert caught.value.exit_code == 4


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_read_only_folder_is_found_first(tmp_path, make_workload):
    tmp_path.chmod(0o500)
    with pytest.raises(NotPossibleHereError, match="cannot be written"):
        RunDirectory.create(tmp_path, make_workload(), source="x", base_dir=tmp_path)


def test_read_only_file_system_is_found_first(make_workload, tmp_path):
    with pytest.raises(NotPossibleHereError, match="cannot be written"):
        RunDirectory.create(Path("/proc/perfladder"), make_workload(), source="x", base_dir=tmp_path)


def test_full_disk_is_found_first(tmp_path, make_workload, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 99, 1 << 20))
    with pytest.raises(NotPossibleHereError, match="only 1 MiB are free"):
        RunDirectory.create(tmp_path, make_workload(), source="x", base_dir=tmp_path)


def test_disk_that_fills_while_the_record_is_written_is_found_first(tmp_path, make_workload, monkeypatch):
    def fail(path, text):
        if path.name == "run.json":
            raise OSError(28, "No space left on device")
        write_atomically(path, text)

    monkeypatch.setattr(rundir, "write_atomically", fail)
    with pytest.raises(NotPossibleHereError, match="No space left"):
        RunDirectory.create(tmp_path, make_workload(), source="x", base_dir=tmp_path)


def test_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    write_atomically(path, "old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_what_is_no_file_is_written_to_and_stays(tmp_path):
    """As `/dev/null` has to, which root could replace."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(path, "text")
        assert os.read(reader, 16) == b"text"
    finally:
        os.close(reader)
    assert path.is_fifo()


def test_opening_what_is_no_run_says_what_a_run_is(tmp_path):
    with pytest.raises(InputError, match=r"is no run: it has no run\.json"):
        RunDirectory.open(tmp_path)


def test_damaged_record_is_refused_with_its_path(run):
    path = run.path / "run.json"
    path.write_text(path.read_text()[:40])
    with pytest.raises(InputError, match=r"run\.json is damaged"):
        RunDirectory.open(run.path)


@pytest.mark.parametrize("extra", [{}, {"a_field_of_the_future": 1}])
def test_newer_schema_is_refused_and_says_to_update(run, extra):
    path = run.path / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": SCHEMA_VERSION + 1, **extra}))
    with pytest.raises(InputError, match=rf"schema version {SCHEMA_VERSION + 1}: a newer perfladder wrote it.*Update"):
        RunDirectory.open(run.path)


def test_run_of_schema_version_1_stays_readable():
    record = RunDirectory.open(GOLDEN).record
    assert record.schema_version == 1
    assert record.status == "done"
    assert [entry.name for entry in record.rungs] == ["stages", "capture", "regions", "harness", "kernels"]


def test_golden_results_of_schema_version_1_stay_readable():
    from perfladder.capturing.decode import Decoder
    from perfladder.capturing.store import read_manifest, read_storages
    from perfladder.rungs.capture import CaptureResult
    from perfladder.rungs.stages import StagesResult

    stages = read_model(GOLDEN / "1-stages" / "stages.json", StagesResult)
    assert stages.dominating == "first"
    assert stages.default.stages[0].self_ms.summary.n == stages.default.wall_ms.summary.n
    assert read_model(GOLDEN / "3-capture" / "capture.json", CaptureResult).stage == "first"
    manifest = read_manifest(GOLDEN / "3-capture")
    storages = read_storages(GOLDEN / "3-capture", manifest)
    (given,) = Decoder(storages).decode(manifest.calls[0].inputs)["args"]
    assert given.tolist() == [[1.0] * 64]


def test_golden_run_gives_its_report_again():
    from perfladder.report import build_report, render_markdown, render_summary

    report = build_report(GOLDEN)
    assert [table.scenario for table in report.stages] == ["default"]
    assert report.stages[0].stages[0].name == "first"
    assert report.regions is not None
    assert report.harness is not None
    assert report.harness.parity == "exact"
    assert report.kernels is not None
    assert report.kernels.by_operator[0].name == "aten::linear"
    assert "## Findings" in render_markdown(report)
    assert "first" in render_summary(report)


def test_workload_of_a_run_can_be_run_again(run):
    from perfladder.workload import load_workload

    assert load_workload(run.path / "workload.yaml").workload.name == "test"


def test_record_has_no_field_that_cannot_be_read_back(run):
    assert RunRecord.model_validate_json((run.path / "run.json").read_bytes()) == run.record
