"""A night in run directories: what is written, what is read back, and what goes wrong without harm to the rest."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from clocked_runs import clocked_run

from perfladder.errors import InputError, WorkloadError
from perfladder.ladder import ClimbOutcome
from perfladder.nightly.config import NightlyConfig
from perfladder.nightly.model import Rules
from perfladder.nightly.plain import measured, run_night
from perfladder.nightly.records import accept, night_of, read_history, read_record, write_night
from perfladder.nightly.watch import watch_workload, workload_files
from perfladder.rundir import RunDirectory

PARTS = {"encoder": 10.0, "decoder": 30.0}


class ClockedSteps:
    """Measures parts that take what the test says, in real run directories; notes what is told."""

    def __init__(self, root: Path, *runs: dict[str, float] | Exception) -> None:
        self.root, self.runs = root, list(runs)
        self.asked: list[tuple[str, str]] = []
        self.lines: list[str] = []
        self.kept: list[str] = []

    def profile(self, file, source, until):
        self.asked.append((file.workload.name, until))
        parts = self.runs.pop(0)
        if isinstance(parts, Exception):
            raise parts
        seed = len(list(self.root.glob("*/*")))
        path = clocked_run(self.root, parts, launches=file.workload.launches, seed=seed, name=file.workload.name)
        return ClimbOutcome(run_dir=str(path), status="done", exit_code=0, stopped_because=None, findings=[])

    def history(self, workload):
        return read_history(self.root, workload, self.tell)

    def keep(self, night, verdict, page, second):
        self.kept.append(verdict.kind)

    def tell(self, text):
        self.lines.append(text)


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """Twelve good nights, copies of one that was measured, with levels 1 % apart."""
    root = tmp_path_factory.mktemp("history")
    first = clocked_run(root, PARTS, launches=3)
    night = night_of(first)
    for place in range(12):
        started_at = f"2026-01-{place + 1:02d}T02:00:00+00:00"
        folder = first.with_name(f"202601{place + 1:02d}T020000-{place:06x}")
        shutil.copytree(first, folder)
        RunDirectory.open(folder).update(run_id=folder.name, started_at=started_at)
        changes = {"run_id": folder.name, "run_dir": str(folder), "started_at": started_at, "verdict": "ok"}
        levels = {"launches": [value * (1 + 0.005 * (place % 3)) for value in night.launches]}
        write_night(night.model_copy(update=changes | levels))
    shutil.rmtree(first)
    return root


@pytest.fixture
def root(history, tmp_path):
    shutil.copytree(history, tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "clocked.yaml"
    path.write_text(yaml.safe_dump({"name": "clocked", "target": "pipe.py:build"}))
    return path


def watch(source, steps, **fields):
    config = NightlyConfig(workloads=str(source), runs_dir=str(steps.root), launches=3, **fields)
    waits: list[float] = []
    row = watch_workload(source, config, steps, sleep=waits.append)
    return row, waits


def test_a_good_night_is_one_measurement_and_becomes_history(root, source):
    steps = ClockedSteps(root, PARTS)
    row, waits = watch(source, steps)
    assert (row.status, row.verdict.kind, waits) == ("judged", "ok", [])
    assert steps.kept == ["ok"]
    record = read_record(Path(row.run_dir))
    assert record.night.stages_ms["decoder"] == pytest.approx(30, rel=0.05)
    assert len(record.night.launches) == 3
    assert record.verdict == row.verdict
    assert (Path(row.run_dir) / "night.md").read_text().startswith("# clocked: ok")
    assert steps.history("clocked")[-1] == record.night


def test_a_suspicion_is_measured_again_after_a_pause_with_the_first_rung_only(root, source):
    slow = {**PARTS, "decoder": 45.0}
    steps = ClockedSteps(root, slow, slow)
    row, waits = watch(source, steps, second_after_s=7)
    assert row.verdict.kind == "regression"
    assert waits == [7]
    assert steps.asked == [("clocked", "kernels"), ("clocked", "stages")]
    assert row.verdict.moved[0].name == "decoder"
    second = read_record(Path(row.second_run_dir)).night
    assert second.second_of == read_record(Path(row.run_dir)).night.run_id
    again, _ = watch(source, ClockedSteps(root, slow))
    assert (again.verdict.kind, again.verdict.is_new, again.second_run_dir) == ("regression", False, None)
    accept(Path(again.run_dir))
    accepted, _ = watch(source, ClockedSteps(root, slow))
    assert accepted.verdict.kind == "ok"


def test_a_night_that_was_wild_for_once_raises_no_alarm(root, source):
    row, _ = watch(source, ClockedSteps(root, {**PARTS, "decoder": 45.0}, PARTS))
    assert row.verdict.kind == "undecided"


def test_without_a_second_measurement_a_suspicion_stays_one(root, source):
    slow = {**PARTS, "decoder": 45.0}
    row, _ = watch(source, ClockedSteps(root, slow), takes_second=False)
    assert row.verdict.kind == "suspected"
    failed, _ = watch(source, ClockedSteps(root, slow, WorkloadError("it crashed")))
    assert (failed.status, failed.verdict.kind) == ("judged", "suspected")
    assert "it crashed" in failed.error


def test_a_workload_that_fails_does_not_stop_the_others_and_decides_the_exit_code(root, source, tmp_path):
    folder = tmp_path / "workloads"
    folder.mkdir()
    for name in ("a", "clocked"):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"name": name, "target": "pipe.py:build"}))
    (folder / "broken.yml").write_text("name: [")
    (folder / "notes.txt").write_text("no workload")
    config = NightlyConfig(workloads=str(folder), runs_dir=str(root), launches=3)
    steps = ClockedSteps(root, WorkloadError("no memory"), PARTS)
    outcome = run_night(config, steps, find=lambda name: [], history_from="-")
    assert [(row.workload, row.status) for row in outcome.workloads] == [
        ("a", "failed"),
        (None, "failed"),
        ("clocked", "judged"),
    ]
    assert outcome.exit_code == 5
    assert "failed: a: no memory" in outcome.message
    assert [row.exit_code for row in outcome.failures] == [3, 2]


def test_folders_without_workloads_and_names_given_twice_are_refused(tmp_path):
    with pytest.raises(InputError, match="neither a folder nor a file"):
        workload_files(tmp_path / "none")
    with pytest.raises(InputError, match="no workload file"):
        workload_files(tmp_path)
    for file in ("one.yaml", "two.yaml"):
        (tmp_path / file).write_text(yaml.safe_dump({"name": "same", "target": "pipe.py:build"}))
    config = NightlyConfig(workloads=str(tmp_path))
    with pytest.raises(InputError, match="both have the name 'same'"):
        run_night(config, ClockedSteps(tmp_path), find=lambda name: [], history_from="-")


def test_a_damaged_night_is_told_and_left_out(root, source):
    (next((root / "clocked").iterdir()) / "night.json").write_text("{")
    steps = ClockedSteps(root)
    assert len(steps.history("clocked")) == 11
    assert "damaged" in steps.lines[0]


def test_only_nights_can_be_accepted(root, tmp_path):
    plain = clocked_run(tmp_path / "other", PARTS, launches=1)
    with pytest.raises(InputError, match=r"has no night\.json"):
        accept(plain)
    night = night_of(plain, second_of="20260101T020000-000000")
    write_night(night)
    with pytest.raises(InputError, match="second measurement"):
        accept(plain)


@pytest.mark.parametrize(
    ("fields", "value"), [({"metric": "throughput", "items_per_call": 4}, 41 / 4), ({"metric": "latency_p95"}, 41)]
)
def test_the_level_is_the_workloads_own_metric_and_less_is_better(tmp_path, fields, value):
    night = night_of(clocked_run(tmp_path, PARTS, launches=3, **fields))
    assert night.value == pytest.approx(value, rel=0.05)
    assert (night.metric, night.unit, len(night.launches)) == (fields["metric"], "ms", 3)


def test_nothing_measured_is_an_error_with_the_records_reason(tmp_path):
    path = clocked_run(tmp_path, PARTS, launches=1)
    RunDirectory.open(path).update(status="failed", error="The factory raised.")
    outcome = ClimbOutcome(run_dir=str(path), status="failed", exit_code=3, stopped_because=None, findings=[])
    with pytest.raises(Exception, match=r"The factory raised\."):
        measured(outcome)


def test_every_field_of_the_configuration_is_described():
    for model in (NightlyConfig, Rules):
        assert [name for name, info in model.model_fields.items() if not info.description] == []
    assert json.loads(NightlyConfig(workloads="w").model_dump_json())["rules"]["last_good"] == 30
