"""ncu on the replay script of a capture, with every way in which that can fail."""

import json
import re
import signal

import pytest
from backgrounds import make_background
from fake_ncu import IN_USE, NO_LIBRARY, NOTHING, PERMISSION, UNSUPPORTED
from ncu_reports import Launch
from processes import MARK, marked, wait_until

from perfladder.errors import CaptureError, InputError, RungError, WorkloadError
from perfladder.findings.nsight import kernel_diagnosis
from perfladder.nsight.diagnosis import Diagnosis
from perfladder.report import render_ncu
from perfladder.rungs.ncu import NcuResult, overall, profile_kernel, request_for


def test_the_result_has_the_kernel_the_command_the_values_and_the_diagnosis(
    install_ncu, called, make_request, preflight, streaming, captured
):
    path = install_ncu(streaming)
    result = profile_kernel(make_request(), preflight())
    assert (result.status, result.verdict) == ("done", "memory")
    assert "device memory is at 92 %" in result.statement
    assert result.chosen.function == "vectorized_elementwise_kernel"
    assert result.command == [str(path), *called()]
    text = " ".join(called())
    for words in (
        "--nvtx --nvtx-include replay_stage/",
        "--kernel-name-base function --kernel-name vectorized_elementwise_kernel",
        "--launch-skip 0 --launch-count 1",
        "--section SpeedOfLight --section",
        "--clock-control none --cache-control all",
        "--target-processes application-only",
        f"{captured[1]}/replay.py --nvtx --calls 1 --json",
    ):
        assert words in text
    (launch,) = result.launches
    assert (launch.is_asked_kernel, launch.nvtx_ranges) == (True, ["replay_stage"])
    assert ("SpeedOfLight", 92.0) in {(row.section, row.value) for row in result.values}
    assert result.warnings == []
    assert result.artifacts == {"report": "kernel.ncu-rep", "log": "ncu.log", "printed": "ncu-replay.log"}
    assert NcuResult.model_validate_json(result.model_dump_json()) == result


def test_finding_and_page_say_what_it_rests_on(install_ncu, make_request, preflight, streaming):
    install_ncu(streaming)
    result = profile_kernel(make_request(), preflight())
    (finding,) = kernel_diagnosis(result, make_background())
    assert (finding.kind, finding.stage) == ("kernel_diagnosis", "stage")
    assert finding.claim.startswith("Kernel vectorized_elementwise_kernel: Memory limits it")
    assert "emptied caches and clocks as they were" in finding.uncertainty
    assert "fewer bytes" in finding.next_experiment
    text = render_ncu(result)
    for words in ("memory (dram)", "Compute at 20 %: its throughput is no limit.", "ncu 2025.3.1.0", "kernel.ncu-rep"):
        assert words in text


@pytest.mark.parametrize(
    ("line", "obstacle", "remedy"),
    [
        (PERMISSION, "no_permission", "NVreg_RestrictProfilingToAdminUsers=0"),
        (IN_USE, "counters_in_use", "dcgmi profile --pause"),
        (UNSUPPORTED, "unsupported_gpu", "--list-chips"),
        (NO_LIBRARY, "no_profiling_library", "container runtime"),
    ],
)
def test_counters_that_cannot_be_read_are_not_applicable(install_ncu, make_request, preflight, line, obstacle, remedy):
    install_ncu(log=["==PROF== Connected to process 7", line, NOTHING], exit_code=1)
    result = profile_kernel(make_request(), preflight())
    assert (result.status, result.preflight.obstacle) == ("not_applicable", obstacle)
    assert line.removeprefix("==ERROR== ")[:40] in result.reason
    assert remedy in result.reason
    assert remedy in render_ncu(result)


def test_whoever_may_hold_the_counters_is_named(install_ncu, make_request, preflight):
    install_ncu(log=[IN_USE], exit_code=1)
    found = preflight().model_copy(update={"holders": ["nv-hostengine (pid 5)"]})
    assert "nv-hostengine (pid 5)" in profile_kernel(make_request(), found).reason


def test_an_obstacle_that_is_known_before_starts_nothing(install_ncu, make_request, preflight, tmp_path):
    install_ncu()
    stopped = preflight().stopped_by("no_permission", "Not you.")
    result = profile_kernel(make_request(), stopped)
    assert (result.status, result.command) == ("not_applicable", [])
    assert not (tmp_path / "bin" / "called.json").exists()


def test_no_matching_kernel_names_the_nearest_ones_that_were_seen(install_ncu, make_request, preflight):
    seen = ["1. vectorized_elementwise_kernels(int)", "2. void gemm<(int)3>(float *)"]
    install_ncu(log=["==PROF== Connected to process 7", NOTHING, "Available Kernels:", *seen])
    request = make_request(chosen={"launch_skip": 2}, known_kernels=["void reduce_kernel<512>(int)"])
    with pytest.raises(InputError) as failure:
        profile_kernel(request, preflight())
    message = str(failure.value)
    assert "no launch of 'vectorized_elementwise_kernel' after the first 2 in call 1" in message
    assert "Did you mean 'vectorized_elementwise_kernels'" in message
    assert "vectorized_elementwise_kernels, gemm, reduce_kernel" in message


def test_a_crash_of_ncu_is_told_with_its_signal_and_last_words(install_ncu, make_request, preflight):
    install_ncu(log=["==PROF== Connected to process 7"], signal=signal.SIGSEGV)
    with pytest.raises(RungError, match=r"ncu was ended by signal 11 and wrote no report.*Connected to process 7"):
        profile_kernel(make_request(), preflight())
    install_ncu(log=["==ERROR== Option '--bogus' is unrecognised."], exit_code=1)
    with pytest.raises(RungError, match=r"ended with code 1 and wrote no report. It says: Option '--bogus'"):
        profile_kernel(make_request(), preflight())


def test_a_hang_is_ended_with_everything_that_was_started(install_ncu, make_request, preflight, monkeypatch, tmp_path):
    monkeypatch.setenv(MARK, tmp_path.name)
    install_ncu(log=["==PROF== Connected to process 7"], hangs=True)
    with pytest.raises(RungError, match=r"did not finish within 1.5 s and was ended.*Connected to process 7"):
        profile_kernel(make_request(limit_s=1.5), preflight())
    wait_until(lambda: not marked(tmp_path.name), 10)


def test_output_of_the_replay_between_ncus_lines_changes_nothing(install_ncu, make_request, preflight, streaming):
    noise = ["1. step", "==ERROR== ERR_NVGPUCTRPERM as my model prints it", NOTHING, "\x1b[31mred\x1b[0m"]
    install_ncu(streaming, printed=noise, log=["==PROF== Connected to process 7", "==PROF== Report: x"])
    result = profile_kernel(make_request(), preflight())
    assert (result.status, result.verdict, result.warnings) == ("done", "memory", [])


def test_a_damaged_report_costs_the_rung_only(install_ncu, make_request, preflight, tmp_path):
    broken = tmp_path / "broken"
    broken.write_bytes(b"NVR\0" + bytes(1000))
    install_ncu(report=str(broken))
    with pytest.raises(RungError, match=r"The reader of .*kernel\.ncu-rep ended with code"):
        profile_kernel(make_request(), preflight())
    assert not [path for path in (tmp_path / "5-ncu").iterdir() if path.name.startswith(".")]


def test_fewer_launches_and_other_instantiations_are_warnings(install_ncu, make_request, preflight, streaming):
    other = Launch("vectorized_elementwise_kernel", "void vectorized_elementwise_kernel<(int)2, half>(int)", {})
    install_ncu(streaming, other, log=['==ERROR== Failed to profile "x" in process 7'], exit_code=1)
    result = profile_kernel(make_request(chosen={"launch_count": 3}), preflight())
    codes = {warning.code: warning.message for warning in result.warnings}
    assert "2 of 3 launches" in codes["NCU_INCOMPLETE"]
    assert "Failed to profile" in codes["NCU_INCOMPLETE"]
    assert "1 of 2 profiled launches may be another instantiation" in codes["NCU_OTHER_INSTANTIATION"]
    assert [launch.is_asked_kernel for launch in result.launches] == [True, None]
    assert result.verdict == "memory"


@pytest.mark.slow
def test_the_real_script_is_what_runs_and_its_failure_is_the_workloads(install_ncu, make_request, preflight):
    install_ncu(runs_program=True, log=["==PROF== Connected to process 7"], exit_code=1)
    with pytest.raises(WorkloadError, match=r"The replay failed under ncu.*replay\.py: "):
        profile_kernel(make_request(), preflight())


def test_a_script_that_is_not_ours_is_not_run(install_ncu, make_request, preflight, copied, called):
    install_ncu()
    script = copied / "replay.py"
    text = script.read_text()
    for changed, message in (
        (text.replace("WARMUPS = 3", "WARMUPS = 4"), "is not the script"),
        (text.replace("SEED = 0", "SEED = print('here') or 0"), "more than values"),
        (text.replace("SEED = 0", "import os"), "more than values"),
    ):
        assert changed != text
        script.write_text(changed)
        with pytest.raises(CaptureError, match=message):
            profile_kernel(make_request(copied), preflight())
    script.unlink()
    with pytest.raises(CaptureError, match=r"has no replay\.py"):
        profile_kernel(make_request(copied), preflight())
    with pytest.raises(FileNotFoundError):
        called()


def test_a_capture_of_a_cpu_is_not_applicable(install_ncu, make_request, preflight, copied):
    manifest = copied / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"device": "cpu"}))
    result = profile_kernel(make_request(copied), preflight())
    assert result.status == "not_applicable"
    assert "made on cpu" in result.reason


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kernel": "ncclDevKernel_AllReduce"}, "waits for other devices"),
        ({"call_index": 7}, r"there is no call 7; captured are 0, 1, 2"),
        ({"options": {"clock_control": "fast"}}, "clock_control"),
        ({"options": {"launch_count": 99}}, "launch_count"),
    ],
)
def test_a_wrong_question_is_refused_before_anything_runs(captured, tmp_path, fields, message):
    fields = {"kernel": "k", **fields}
    with pytest.raises(InputError, match=message):
        request_for(None, fields.pop("kernel"), capture=captured[1], folder=tmp_path, **fields)


def test_launches_that_differ_are_undecided():
    memory, latency = (Diagnosis(verdict=verdict, statement="-") for verdict in ("memory", "latency"))
    assert overall([memory, memory]) == ("memory", "-")
    verdict, statement = overall([memory, latency, memory])
    assert verdict == "undecided"
    assert re.search(r"latency 1, memory 2", statement)
