"""The report of a run that did not end well."""

import subprocess
import sys

from perfladder.report import build_report, render_summary
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
