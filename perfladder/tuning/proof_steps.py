"""The steps of a proof, each a function of the proof and of its own folder that returns what it found."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from perfladder.capturing.api import capture_request, capture_workload
from perfladder.capturing.store import MANIFEST
from perfladder.comparing.interleave import Version, compare_interleaved
from perfladder.comparing.views import write_comparison
from perfladder.content_key import ContentKey
from perfladder.errors import InputError, RungError
from perfladder.files import sha256_of, write_atomically
from perfladder.ladder import Climb, load_results, rung_named
from perfladder.measure_alone import measure_alone
from perfladder.rundir import KEY_FILE, RunDirectory, read_model
from perfladder.rungs.capture import CaptureResult
from perfladder.rungs.stages import StagesResult
from perfladder.tuning import replay_tuned, tune_workload
from perfladder.tuning.proof_model import ARCHIVE, CompareStep, ModuleReplay, ProfileStep, ReplayStep, TuneStep
from perfladder.tuning.prove import chosen_of
from perfladder.tuning.replay_tuned import TunedReplay, TunedReplayRequest, WholeOutputRequest
from perfladder.workload import WorkloadFile

if TYPE_CHECKING:
    from perfladder.tuning.prove import Proof

TUNING_REPORT = "tuning_report.json"


def profile(proof: Proof, folder: Path) -> ProfileStep:
    """Climb the ladder on the plain workload, as a run of its own."""
    return _climb(proof, "profile", proof.file)


def profile_tuned(proof: Proof, folder: Path) -> ProfileStep:
    """The same with the archive in place."""
    return _climb(proof, "profile-tuned", proof.tuned_file)


def tune(proof: Proof, folder: Path) -> TuneStep:
    """Tune as `perfladder tune` does, and write what it keeps into the step's folder."""
    request = proof.settings.tune.model_copy(update={"save": str(folder / ARCHIVE)})
    result = measure_alone(
        proof.file,
        tune_workload.measure,
        request,
        tell=proof.tell,
        what="tuning",
        log_path=folder / "tune.log",
        on_progress=proof.on_progress,
    )
    artifacts = {}
    with contextlib.suppress(OSError):
        shutil.copyfile(result.report_path, folder / TUNING_REPORT)
        artifacts["report"] = TUNING_REPORT
    if result.saved_to is None:
        return TuneStep(tuning=result, artifacts=artifacts)
    return TuneStep(
        tuning=result, archive_sha256=sha256_of(folder / ARCHIVE), artifacts={**artifacts, "archive": ARCHIVE}
    )


def replay(proof: Proof, folder: Path) -> ReplayStep:
    """Replay each tuned module on captured inputs, then compare the whole output, in processes of their own."""
    tuned = proof.results["tune"]
    assert isinstance(tuned, TuneStep)
    for old in proof.run.path.glob("*-capture"):
        shutil.rmtree(old)
    modules = []
    for number, path in enumerate(chosen_of(tuned)):
        modules.append(_replay_module(proof, folder, number, path))
        if not modules[-1].replay.is_right:
            return ReplayStep(modules=modules)
    output = measure_alone(
        proof.tuned_file,
        replay_tuned.measure_whole,
        WholeOutputRequest(quality=proof.settings.tune.quality),
        tell=proof.tell,
        what="comparing the whole output",
        log_path=folder / "replay.log",
        on_progress=proof.on_progress,
    )
    return ReplayStep(modules=modules, output=output)


def compare(proof: Proof, folder: Path) -> CompareStep:
    """Measure the whole workload tuned and plain in turns, in pairs of processes."""
    settings = proof.settings

    def version(file: WorkloadFile, label: str) -> Version:
        if settings.launches is None:
            return Version(file, label)
        workload = file.workload.model_copy(update={"launches": settings.launches})
        return Version(WorkloadFile(workload, file.base_dir), label)

    comparison = compare_interleaved(
        version(proof.file, "plain"),
        version(proof.tuned_file, "tuned"),
        pairs=settings.pairs,
        min_effect=settings.min_effect,
        tell=proof.tell,
        on_progress=proof.on_progress,
        log_folder=folder,
    )
    write_comparison(comparison, folder)
    next_step = f" {comparison.next_step}" if comparison.next_step else ""
    return CompareStep(
        metric_name=comparison.metric_name,
        verdict=comparison.verdict,
        verdict_reason=f"{comparison.reason}{next_step}",
        speedup=comparison.metric.speedup,
        interval=comparison.metric.interval,
        warnings=comparison.warnings,
        artifacts={"comparison": "comparison.json", "text": "comparison.md"},
    )


def _climb(proof: Proof, step: str, file: WorkloadFile) -> ProfileStep:
    """Climb in a new run, or go on with the one that this step had begun."""
    ladder = Climb(
        file,
        source=proof.run.record.workload_source,
        runs_dir=proof.runs_dir,
        until=proof.settings.until,
        tell=proof.tell,
        resume=_begun_run(proof, step),
    )
    record = proof.run.record
    with contextlib.closing(ladder.run), ladder:
        proof.run.update(profile_runs={**record.profile_runs, step: str(ladder.run.path)})
        flow_run = {name: getattr(record, name) for name in ("prefect_flow_run_id", "prefect_flow_run_url")}
        ladder.run.update(**flow_run)
        info = ladder.wait_until_loaded()
        # Where the devices are known already, they are taken.
        taken = contextlib.nullcontext() if proof.info is not None else proof.taking(info.lock_names)
        with taken, ladder.holding_device():
            for rung in ladder.rungs_to_climb():
                ladder.climb_rung(rung)
        outcome = ladder.finish()
    if outcome.status == "failed":
        error = ladder.error or RungError("Nothing could be measured.")
        raise type(error)(f"{error} The run is {ladder.run.path}.") from error
    if proof.info is None:
        proof.note_loaded(info, _files_of(ladder.run))
    stages = ladder.results["stages"]
    return ProfileStep(
        run_dir=str(ladder.run.path),
        run_id=ladder.run.record.run_id,
        exit_code=outcome.exit_code,
        metric=stages.metric if isinstance(stages, StagesResult) else None,
    )


def _begun_run(proof: Proof, step: str) -> str | None:
    """The run of a step that was ended on the way; a finished one is of an attempt that does not hold any more."""
    begun = proof.run.record.profile_runs.get(step)
    if begun is None:
        return None
    try:
        record = RunDirectory.open(Path(begun)).record
    except InputError:
        return None
    return None if record.status == "done" else begun


def _files_of(run: RunDirectory) -> dict[str, str]:
    """The files that the target had loaded, as the key of the first rung has them."""
    rung = rung_named("stages")
    return read_model(run.path / f"{rung.number}-{rung.name}" / KEY_FILE, ContentKey).files


def _replay_module(proof: Proof, folder: Path, number: int, path: str) -> ModuleReplay:
    capture, is_from_profile, why_not = _capture_of(proof, number, path)
    if capture is None:
        none = TunedReplay(path=path, is_right=None, reason=f"there is no capture: {why_not}")
        return ModuleReplay(module=path, capture=None, is_from_profile=False, replay=none)
    request = TunedReplayRequest(
        folder=str(capture),
        path=path,
        has_whole_gate=proof.settings.tune.quality is not None,
        pairs=proof.settings.tune.pairs,
    )
    found = measure_alone(
        proof.tuned_file,
        replay_tuned.measure,
        request,
        only=path,
        tell=proof.tell,
        what=f"replaying {path or 'the target'}",
        log_path=folder / "replay.log",
        on_progress=proof.on_progress,
    )
    return ModuleReplay(module=path, capture=proof.run.relative(capture), is_from_profile=is_from_profile, replay=found)


def _capture_of(proof: Proof, number: int, path: str) -> tuple[Path | None, bool, str | None]:
    """The folder of a module's capture, whether it is the profile run's, or why there is none."""
    profiled = _profiled_capture(proof, path)
    if profiled is not None:
        return profiled, True, None
    name = re.sub(r"[^\w.]+", "_", path) or "target"
    target = proof.run.path / f"3-{number}-{name}-capture"
    proof.tell(f"capturing {path or 'the target'}")
    try:
        result = capture_workload(proof.file, capture_request(path, target), tell=proof.tell)
    except (RungError, InputError) as error:
        return None, False, str(error)
    target.mkdir(exist_ok=True)
    write_atomically(target / "capture.json", result.model_dump_json(indent=1))
    return (target, False, None) if result.status == "done" else (None, False, result.reason)


def _profiled_capture(proof: Proof, path: str) -> Path | None:
    profiled = proof.results["profile"]
    assert isinstance(profiled, ProfileStep)
    run = RunDirectory.open(Path(str(profiled.run_dir)))
    results = load_results(run)
    found = next((r for r in results.values() if isinstance(r, CaptureResult) and r.status == "done"), None)
    if found is None or found.stage != path or found.folder is None or found.is_redacted:
        return None
    folder = run.path / found.folder
    return folder if (folder / MANIFEST).is_file() else None
