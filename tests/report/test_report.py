"""The report of a run: of one that did not end well, and of a replay that was timed in turns."""

import subprocess
import sys

import pytest
from recorded_runs import NAMES, make_run

from perfladder.report import build_report, render_html, render_markdown, render_summary
from perfladder.rundir import RunDirectory
from perfladder.workload import parse_workload


def test_run_whose_process_is_gone_is_no_running_one(tmp_path):
    workload = parse_workload({"name": "n", "target": "m:f"})
    run = RunDirectory.create(tmp_path, workload, source="n", base_dir=tmp_path)
    assert build_report(run.path).run.status == "running"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    run.update(process_id=gone.pid)
    report = build_report(run.path)
    assert report.run.status == "interrupted"
    assert "not climbed: stages, capture, regions, harness, kernels" in report.run.error
    assert "not climbed: stages" in render_summary(report)


@pytest.mark.parametrize("name", NAMES)
def test_every_recorded_run_has_a_text_too(name, tmp_path):
    report = build_report(make_run(tmp_path, name))
    text = render_markdown(report)
    assert all(finding.claim in text for finding in report.findings)
    if report.harness is not None and report.harness.timing_ratio is not None:
        assert f"duration {report.harness.timing_ratio:.3f} times that in the pipeline" in text
    assert "in turns" not in text


def test_a_replay_timed_in_turns_says_so_and_what_it_gave_alone(tmp_path):
    samples = {"launches": [[2.0, 2.1, 2.05]]}

    def decide(harness):
        harness |= {"timing_ratio": 1.01, "alone_timing_ratio": 0.712, "is_timing_faithful": True, "is_faithful": True}
        harness["in_turns"] = {"pipeline_ms": samples, "replayed_ms": samples, "caches": "warm", "ratio": 1.01}
        harness["in_turns"] |= {"interval": {"low": 0.99, "high": 1.02}, "warm_ratio": 1.01, "evicted_ratio": None}
        harness["in_turns"]["is_faithful"] = True

    run = make_run(tmp_path, changes={"harness": decide})
    report = build_report(run)
    for text in (render_markdown(report), render_html(report, run)):
        assert "in turns with runs of the pipeline; 0.712 in a process of its own" in text
