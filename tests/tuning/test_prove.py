"""A tuning that is to be proven: what is rejected and why, what goes on where it was ended, and what is refused."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import perfladder as pl
from perfladder.content_key import weight_files
from perfladder.errors import ArchiveError, InputError, NotPossibleHereError
from perfladder.ladder import load_results
from perfladder.retention import all_runs
from perfladder.rundir import RunDirectory
from perfladder.stats import Interval
from perfladder.target import LoadedTarget
from perfladder.tuning.proof_model import CompareStep, ModuleReplay, ProofOutcome, ProofSettings, ReplayStep
from perfladder.tuning.prove import STEPS, Proof, judge, prove
from perfladder.tuning.replay_tuned import TunedReplay
from perfladder.tuning.tune_request import BackendChoice, TuneRequest
from perfladder.workload import WorkloadFile, parse_workload

SUPPORT = Path(__file__).parents[1] / "support"
FIELDS = {"name": "proof", "target": "proof_toy.py:build", "device": "cpu", "inputs": {"x": {"$tensor": [4, 64]}}}
FEW = {"warmup_runs": 1, "measured_runs": 3}


def file_of(**fields):
    return WorkloadFile(parse_workload({**FIELDS, **FEW, **fields}), SUPPORT)


def settings_of(backend, tmp_path, **fields):
    tune = TuneRequest(
        modules=["net"], backends=[BackendChoice(name=backend)], pairs=10, cache_dir=str(tmp_path / "cache"), **fields
    )
    return ProofSettings(until="capture", tune=tune, pairs=5, launches=3)


def proof_of(file, settings, tmp_path, **options):
    return Proof(file, settings, source="proof.yaml", runs_dir=tmp_path / "runs", **options)


@pytest.mark.slow
def test_what_is_wrong_when_it_is_replayed_is_rejected_and_an_interrupted_run_goes_on(tmp_path):
    file, settings = file_of(), settings_of("proof_wrong_later", tmp_path, save=str(tmp_path / "kept.ait"))
    proof = proof_of(file, settings, tmp_path)
    with contextlib.suppress(KeyboardInterrupt), proof:
        proof.do(STEPS[0])
        proof.do(STEPS[1])
        raise KeyboardInterrupt
    assert (proof.run.record.status, proof.run.record.exit_code) == ("interrupted", 130)
    assert proof.results["tune"].tuning.status == "kept"

    outcome = prove(proof_of(file, settings, tmp_path, resume="latest"))
    assert outcome.run_dir == str(proof.run.path)
    assert (outcome.verdict, outcome.exit_code, outcome.archive, outcome.saved_to) == ("rejected", 0, None, None)
    assert "The replay of net is wrong: call 0: output: largest error" in outcome.reason
    assert [(step.name, step.status, step.is_reused) for step in outcome.steps] == [
        ("profile", "done", True),
        ("tune", "done", True),
        ("replay", "done", False),
        ("profile-tuned", "skipped", False),
        ("compare", "skipped", False),
    ]
    assert not (tmp_path / "kept.ait").exists()

    run = RunDirectory.open(Path(outcome.run_dir))
    assert (run.record.kind, run.record.status, len(run.record.resumed_at)) == ("tuning", "done", 1)
    (module,) = ReplayStep.model_validate_json((run.path / "3-replay" / "replay.json").read_bytes()).modules
    assert (module.is_from_profile, module.replay.is_right, module.replay.comparison) == (True, False, None)
    assert module.replay.calls[0].plain_reason is None
    assert Path(outcome.plain_run) in all_runs(tmp_path / "runs")
    assert run.path in all_runs(tmp_path / "runs")
    assert "| 3 replay | done |" in (run.path / "report.md").read_text()
    assert ProofOutcome.model_validate_json((run.path / "proof.json").read_bytes()) == outcome
    with pytest.raises(InputError, match="is a tuning run, not a profile"):
        load_results(run)
    with pytest.raises(InputError, match="is finished"):
        proof_of(file, settings, tmp_path, resume="latest")


@pytest.mark.slow
def test_the_command_rejects_what_is_no_faster(tmp_path):
    (tmp_path / "proof.yaml").write_text(json.dumps({**FIELDS, **FEW, "target": f"{SUPPORT}/proof_toy.py:build"}))
    words = "proof.yaml --prove --plain --module net --backend proof_slower --pairs 10 --until stages --json"
    command = [sys.executable, "-P", "-m", "perfladder.cli", "tune", *words.split(), "--fail-if-not-faster"]
    done = subprocess.run([*command, "--cache-dir", "cache"], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (1, "")
    outcome = ProofOutcome.model_validate(json.loads(done.stdout))
    assert (outcome.verdict, outcome.exit_code, outcome.speedup, outcome.modules) == ("rejected", 0, None, {})
    assert "all stay as they are. net: no backend can be taken: Slower() (rejected: no faster" in outcome.reason
    assert [step.status for step in outcome.steps] == ["done", "done", "skipped", "skipped", "skipped"]
    assert Path(outcome.run_dir).parent == tmp_path / "runs" / "tunings" / "proof"


@pytest.mark.parametrize(
    ("keep", "verdict", "interval", "expected"),
    [
        ("faster", "faster", (1.2, 1.5), "kept"),
        ("faster", "undecided", (0.9, 1.5), "rejected"),
        ("faster", "same", (0.99, 1.01), "rejected"),
        ("right", "slower", (0.8, 0.9), "kept"),
        (1.1, "faster", (1.2, 1.5), "kept"),
        (1.3, "faster", (1.2, 1.5), "rejected"),
        (1.0, "undecided", None, "rejected"),
    ],
)
def test_a_right_tuning_is_kept_where_the_whole_is_as_fast_as_asked(keep, verdict, interval, expected):
    ends = Interval(low=interval[0], high=interval[1]) if interval else None
    compared = CompareStep(verdict=verdict, verdict_reason="so it is", speedup=1.3, interval=ends)
    found, reason = judge(keep, compared)
    assert found == expected
    assert "so it is" in reason


def test_a_replay_that_proves_nothing_keeps_nothing():
    for is_right, word in ((None, "cannot be judged"), (False, "is wrong")):
        replay = TunedReplay(path="net", is_right=is_right, reason="two differ")
        step = ReplayStep(modules=[ModuleReplay(module="net", capture=None, is_from_profile=False, replay=replay)])
        assert step.why_not_right == f"The replay of net {word}: two differ."


@pytest.mark.parametrize(
    ("fields", "changes", "error", "message"),
    [
        ({"compile": {"mode": "default"}}, {}, InputError, "--set compile=null"),
        ({"tuned": {"archive": "tuned.ait"}}, {}, InputError, "--set tuned=null"),
        ({"nproc": 2}, {}, NotPossibleHereError, "--set nproc=1"),
        ({}, {"until": "kernel"}, InputError, "Did you mean 'kernels'"),
        ({}, {"launches": 1, "pairs": 2}, InputError, "at least 10 pairs of runs"),
        ({}, {"tune": TuneRequest(dry_run=True)}, InputError, "--dry-run builds nothing"),
    ],
)
def test_what_cannot_be_proven_is_refused_before_anything_is_made(tmp_path, fields, changes, error, message):
    settings = ProofSettings().model_copy(update=changes)
    with pytest.raises(error, match=message):
        proof_of(file_of(**fields), settings, tmp_path)
    assert not (tmp_path / "runs").exists()


def test_options_of_a_proof_need_one(tmp_path):
    from typer.testing import CliRunner

    from perfladder.cli import app

    result = CliRunner().invoke(app, ["tune", "diffusion", "--launches", "3"])
    assert result.exit_code == 2
    assert "--launches belongs to --prove" in result.stderr


@pytest.fixture
def archive(tmp_path):
    """An archive of the toy's tuned module."""
    from perfladder.tuning.config import config
    from perfladder.tuning.tune_workload import measure

    before = config.snapshot()
    config.cache_dir = tmp_path / "cache"
    loaded = LoadedTarget(file_of().workload, SUPPORT)
    loaded.load()
    request = settings_of("proof_quick", tmp_path, save=str(tmp_path / "tuned.ait")).tune
    assert measure(loaded, request).status == "kept"
    yield tmp_path / "tuned.ait"
    config.cache_dir = before.cache_dir


@pytest.mark.parametrize("folder", [".", "checkpoints"])
def test_an_archive_is_loaded_by_its_name_beside_the_workload_and_in_python(archive, folder, tmp_path, monkeypatch):
    (tmp_path / folder).mkdir(exist_ok=True)
    moved = archive.rename(tmp_path / folder / archive.name)
    target = f"{SUPPORT / 'proof_toy.py'}:build"
    workload = file_of(target=target, tuned={"archive": "tuned.ait"}).workload
    loaded = LoadedTarget(workload, tmp_path)
    loaded.load()
    assert loaded.tuned_modules == ["net"]
    assert str(moved.resolve()) in weight_files(workload, tmp_path)
    monkeypatch.chdir(tmp_path)
    plain = LoadedTarget(file_of(target=target).workload, tmp_path)
    plain.load()
    assert pl.load(plain.obj, "tuned.ait").net.state == "tuned"


def test_a_workload_loads_an_archive_as_part_of_its_configuration(archive):
    plain, tuned = file_of().workload, file_of(tuned={"archive": str(archive)}).workload
    prints = plain.fingerprints, tuned.fingerprints
    assert prints[0].work == prints[1].work
    assert prints[0].configuration.digest != prints[1].configuration.digest

    loaded = LoadedTarget(tuned, SUPPORT)
    seconds = loaded.load()
    assert seconds["tuned"] > 0
    assert loaded.info(seconds).tuned_modules == ["net"]
    assert loaded.obj.net.state == "tuned"
    loaded.run()
    assert loaded.obj.net.num_unseen_calls == {}

    alone = LoadedTarget(tuned, SUPPORT)
    alone.load(only="head")
    assert alone.tuned_modules == []
    other = file_of(tuned={"archive": str(archive), "sha256": "0" * 64}).workload
    with pytest.raises(InputError, match=r"tuned.sha256: .* is another archive"):
        LoadedTarget(other, SUPPORT).load()
    with pytest.raises(
        ArchiveError, match=f"tuned.archive: .*neither {SUPPORT}/no.ait nor {SUPPORT}/checkpoints/no.ait"
    ):
        LoadedTarget(file_of(tuned={"archive": "no"}).workload, SUPPORT).load()
    # A module that holds the one that was saved is not taken for it.
    whole = LoadedTarget(file_of(target="proof_toy.py:build_module").workload, SUPPORT)
    whole.load(only="")
    assert pl.load(whole.obj, archive).net.state == "tuned"
