"""The tuning report: what it holds comes back from its file, and it can always be written."""

import json
import math
import os
import subprocess
import sys

import pytest

from perfladder.environment import collect_environment
from perfladder.errors import InputError, NotPossibleHereError
from perfladder.rundir import read_model
from perfladder.stats import Interval
from perfladder.tuning import report as report_module
from perfladder.tuning.config import TuningSettings
from perfladder.tuning.observe import HardwareSummary, MeanMax
from perfladder.tuning.report import (
    CandidateReport,
    CorrectnessReport,
    ErrorReport,
    GraphReport,
    MeasurementReport,
    ModuleReport,
    StrategyReport,
    TensorRow,
    TuningReport,
    ValueRow,
    current_report,
    snapshot_tuning_data,
    write_report,
)


@pytest.fixture(autouse=True)
def _nothing_tuned_yet(monkeypatch):
    monkeypatch.setattr(report_module, "_current", None)


@pytest.fixture(scope="module")
def environment():
    return collect_environment({})


@pytest.fixture
def make(environment, tmp_path):
    def report(**fields):
        return TuningReport(
            perfladder_version="0.1.0",
            created_at="2026-01-02T03:04:05+00:00",
            environment=environment,
            config=TuningSettings(cache_dir=tmp_path),
            **fields,
        )

    return report


def full_module():
    row = TensorRow(
        access_path="options['mask']",
        semantic_path="('options', 'mask')",
        shape=["batch0", 224],
        min_shape=[1, 224],
        max_shape=[8, 224],
        dtype="float32",
    )
    candidate = CandidateReport(
        backend="inductor",
        config={"mode": None, "options": {"max_autotune": True}},
        status="kept",
        reason="1.5 times as fast as eager, and equal within the tolerance.",
        build_s=12.5,
        log_file="build.log",
        details={"num_kernels": 7, "files": ["model.pt2"]},
        measurements=[
            MeasurementReport(
                batch_size=8,
                speedup=1.5,
                interval=Interval(low=1.4, high=1.6),
                candidate_p50_ms=2.0,
                baseline_p50_ms=3.0,
                throughput_items_per_s=4000.0,
                num_pairs=20,
                verdict="faster",
            )
        ],
        correctness=CorrectnessReport(
            is_correct=True,
            num_samples=4,
            max_abs_error=1e-6,
            max_rel_error=1e-5,
            tolerance=1e-4,
            checked_shapes=["min", "opt", "max"],
        ),
    )
    graph = GraphReport(
        name="0",
        inputs=[row],
        others=[ValueRow(access_path="return_dict", semantic_path="return_dict", value="False")],
        outputs=[row],
        num_samples=4,
        strategy=StrategyReport(name="first wins", description="The first that is faster.", backends=["inductor"]),
        candidates=[candidate],
        selected="inductor",
        reason="The first candidate that was kept.",
    )
    return ModuleReport(
        path="unet",
        module_type="torch.nn.modules.container.Sequential",
        num_parameters=1000,
        num_layers=3,
        precisions=["float32"],
        device="cpu",
        state="tuned",
        graphs=[graph],
    )


def test_report_comes_back_from_its_file(make, tmp_path):
    hardware = HardwareSummary(
        num_samples=10,
        period_s=0.1,
        duration_s=0.9,
        host_cpu_frac=MeanMax(mean=0.5, max=1.0),
        host_rss_bytes=None,
        devices=[],
        reason="no NVIDIA device",
    )
    error = ErrorReport.of(ValueError("no such thing"))
    report = make(duration_s=3.5, modules=[full_module()], hardware=hardware, error=error)
    write_report(tmp_path / "new" / "report.json", report)
    assert read_model(tmp_path / "new" / "report.json", TuningReport) == report
    written = json.loads((tmp_path / "new" / "report.json").read_text())
    assert written["schema_version"] == 1
    assert written["config"]["cache_dir"] == str(tmp_path)
    assert written["error"] == {"type": "ValueError", "message": "no such thing"}
    assert written["modules"][0]["graphs"][0]["candidates"][0]["measurements"][0]["interval"] == {
        "low": 1.4,
        "high": 1.6,
    }


def test_newer_report_is_refused(make, tmp_path):
    write_report(tmp_path / "report.json", make(schema_version=99))
    with pytest.raises(InputError, match="has schema version 99: a newer perfladder wrote it"):
        read_model(tmp_path / "report.json", TuningReport)


@pytest.mark.parametrize("text", ["x" * 5000, "é" * 5000, "🙂" * 5000])
def test_messages_are_at_most_one_kibibyte(text):
    message = ErrorReport.of(RuntimeError(text)).message
    assert 1000 < len(message.encode()) <= 1024
    assert message.endswith(" ...")
    assert text.startswith(message.removesuffix(" ..."))


def test_short_message_stays_as_it_is():
    assert ErrorReport.of(RuntimeError("é" * 512)).message == "é" * 512


def test_text_that_is_no_unicode_can_be_written(make, tmp_path):
    error = ErrorReport.of(RuntimeError("no file " + os.fsdecode(b"a\xff")))
    write_report(tmp_path / "report.json", make(error=error))
    assert read_model(tmp_path / "report.json", TuningReport).error.message == r"no file a\udcff"


def test_numbers_that_json_does_not_know_are_unknown(make, tmp_path):
    wrong = CorrectnessReport(is_correct=False, num_samples=1, max_abs_error=math.nan, reason="The output holds NaN.")
    candidate = CandidateReport(
        backend="zeros",
        status="rejected",
        reason="wrong",
        correctness=wrong,
        details={"scales": [1.0, math.inf], "range": {"low": -math.inf}},
    )
    graph = full_module().graphs[0].model_copy(update={"candidates": [candidate]})
    write_report(tmp_path / "r.json", make(modules=[full_module().model_copy(update={"graphs": [graph]})]))

    def refuse(text):
        raise AssertionError(text)

    json.loads((tmp_path / "r.json").read_text(), parse_constant=refuse)
    back = read_model(tmp_path / "r.json", TuningReport).modules[0].graphs[0].candidates[0]
    assert back == candidate
    assert back.correctness.max_abs_error is None
    assert back.details == {"scales": [1.0, None], "range": {"low": None}}


def test_current_report_is_the_last_one_written(make, tmp_path):
    with pytest.raises(InputError, match=r"Nothing was tuned in this process.*call tune\(\)"):
        current_report()
    with pytest.raises(InputError, match="Nothing was tuned"):
        snapshot_tuning_data(tmp_path / "copy.json")
    assert not (tmp_path / "copy.json").exists()
    write_report(tmp_path / "report.json", make(duration_s=1.0))
    write_report(tmp_path / "report.json", make(duration_s=2.0))
    assert current_report().duration_s == 2.0
    assert snapshot_tuning_data() == current_report()
    assert snapshot_tuning_data(str(tmp_path / "copy.json")) == current_report()
    assert (tmp_path / "copy.json").read_bytes() == (tmp_path / "report.json").read_bytes()


def test_report_that_cannot_be_written_is_not_lost(make, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotPossibleHereError, match=r"cannot be written.*config\.tuning_data_output_path"):
        write_report(tmp_path / "file" / "report.json", make(duration_s=7.0))
    assert current_report().duration_s == 7.0


def test_reading_reports_needs_no_torch():
    source = "import sys, perfladder.tuning.report; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
