"""Reports read by NVIDIA's own package: written for the purpose, and recorded on a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
from ncu_reports import Launch, write_report

from perfladder.errors import RungError
from perfladder.nsight import thresholds as t
from perfladder.nsight.diagnosis import diagnose
from perfladder.nsight.names import function_name
from perfladder.nsight.report import read_report

pytest.importorskip("ncu_report", reason="NVIDIA's reader is the extra `ncu`")
RECORDED = sorted((Path(__file__).parents[1] / "data" / "ncu").glob("*.ncu-rep"))


@pytest.fixture
def two_launches(tmp_path, streaming):
    text = {"launch__grid_size": 1, "device__attribute_display_name": "NVIDIA H200"}
    other = Launch("gemm", sections={"LaunchStats": text, "": {"a__metric_of_no_section.sum": 3}})
    return write_report(tmp_path / "two.ncu-rep", [streaming, other])


def test_launches_come_with_both_names_and_their_range(two_launches):
    first, second = read_report(two_launches).launches
    assert (first.index, first.name, first.nvtx_ranges) == (0, "vectorized_elementwise_kernel", ["replay_stage"])
    assert first.demangled_name.startswith("void at::native::vectorized_elementwise_kernel<(int)4")
    assert (second.index, second.name, second.nvtx_ranges) == (1, "gemm", [])


def test_numbers_are_keyed_by_launch_section_and_metric_and_texts_are_left_out(two_launches):
    report = read_report(two_launches)
    values = {(row.launch, row.section, row.metric): row.value for row in report.values}
    assert values[0, "SpeedOfLight", t.DRAM] == 92.0
    assert values[0, "LaunchStats", t.WAVES] == 40.0
    assert values[1, "LaunchStats", t.GRID] == 1.0
    assert values[1, "", "a__metric_of_no_section.sum"] == 3.0
    assert not [metric for _, _, metric in values if metric == "device__attribute_display_name"]
    assert report.metrics_of(1)[t.GRID] == 1.0
    assert diagnose(report.metrics_of(0)).level == "dram"


def test_what_is_no_report_is_an_error_with_its_path(tmp_path):
    path = tmp_path / "broken.ncu-rep"
    path.write_bytes(b"no report at all")
    with pytest.raises(RungError, match=r"broken\.ncu-rep cannot be read"):
        read_report(path)


@pytest.mark.slow
def test_the_reader_runs_in_a_process_of_its_own(two_launches, tmp_path):
    output = tmp_path / "values.json"
    command = [sys.executable, "-P", "-m", "perfladder.nsight.report"]
    subprocess.run([*command, str(two_launches), str(output)], check=True, timeout=60)
    assert '"vectorized_elementwise_kernel"' in output.read_text()
    done = subprocess.run([*command, "/no/such", str(output)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "/no/such cannot be read" in done.stderr


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_reports_have_every_metric_and_their_known_character(path):
    report = read_report(path)
    assert report.launches
    for launch in report.launches:
        metrics = report.metrics_of(launch.index)
        wanted = {t.COMPUTE, t.MEMORY, t.DRAM, t.L2, t.L1, t.L1_HITS, t.L2_HITS, t.WAVES, t.GRID, t.ISSUE}
        wanted |= {t.WARP_LATENCY, t.ACHIEVED_OCCUPANCY, t.POSSIBLE_OCCUPANCY, *list(t.OCCUPANCY_LIMITS)[:4]}
        assert wanted - set(metrics) == set()
        found = diagnose(metrics)
        assert found.verdict == path.stem.partition("_")[0], found.model_dump_json(indent=1)
        assert found.busiest_pipe is not None
        assert sum(stall.share for stall in found.stalls) == pytest.approx(1, abs=0.05)
        assert found.roofline is None or 0 < found.roofline.bandwidth_frac <= 1.05
        assert function_name(launch.demangled_name) == launch.name
        assert launch.nvtx_ranges == ["replay_stage"]
    units = {row.metric: row.unit for row in report.values}
    assert (units[t.COMPUTE], units[t.DRAM]) == ("%", "%")


def test_a_reader_that_tells_no_sections_gives_the_same_numbers():
    """As that of Nsight Compute 2025.3, which is used where NVIDIA's package is not installed."""
    import ncu_report

    from perfladder.nsight.report import _rows

    class Older:
        def __init__(self, action):
            self._action = action

        def __getattr__(self, name):
            if name == "sections":
                raise AttributeError(name)
            return getattr(self._action, name)

    path = next(iter(RECORDED))
    action = next(action for scope in ncu_report.load_report(str(path)) for action in scope)
    older = {row.metric: row.value for row in _rows(0, Older(action))}
    assert older == read_report(path).metrics_of(0)
    assert {row.section for row in _rows(0, Older(action))} == {""}
