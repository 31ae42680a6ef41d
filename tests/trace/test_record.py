import gc
import json
import subprocess
import sys
import textwrap
import threading
import warnings

import pytest
import torch

from perfladder import _torch_private
from perfladder.errors import InputError, NotPossibleHereError, RungError
from perfladder.trace import record
from perfladder.trace.labels import RUN_KIND, encode_label
from perfladder.trace.model import Trace
from perfladder.trace.record import open_span, record_window, span
from perfladder.trace.regions import report_regions
from perfladder.trace.warnings import WarningCode

NASTY = ['unet["mid"]', "back\\slash", "new\nline", "tab\t", "日本", "", "{}"]


def labels(trace: Trace) -> set[str]:
    return {label.name for label in trace.labels if label}


def test_window_becomes_a_valid_trace(tmp_path) -> None:
    """R24: whatever the names, what torch writes is valid JSON and the names come back."""
    path = tmp_path / "trace.json"
    with record_window(path) as window:
        for index in range(2):
            with window.span(RUN_KIND, str(index)):
                for name in NASTY:
                    with span("untuned_module", name):
                        torch.ones(3).add(1)
    json.loads(path.read_text())
    assert window.trace_path == path
    assert window.trace_bytes == path.stat().st_size
    assert window.activities == record.find_activities()
    trace = window.read()
    assert set(NASTY) <= labels(trace)
    report = report_regions(trace)
    assert [row.name for row in report.runs[0].regions] == NASTY
    assert record.has_profiled_before
    assert list(tmp_path.iterdir()) == [path]


def test_second_window_knows_that_it_is_not_the_first(tmp_path) -> None:
    for name in ("a.json", "b.json.gz"):
        with record_window(tmp_path / name) as window:
            torch.ones(3)
    assert not window.is_first
    assert (tmp_path / "b.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert window.read().num_events > 0


def test_hooks_can_open_and_close_spans(tmp_path) -> None:
    with record_window(tmp_path / "a.json") as window:
        close = open_span(encode_label("stage", "s"))
        torch.ones(3)
        close()
    assert labels(window.read()) == {"s"}


def test_public_fallback_gives_the_same_regions(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(_torch_private, "_RecordFunctionFast", None)
    with record_window(tmp_path / "a.json") as window, span(RUN_KIND, "0"), span("stage", "s"):
        torch.ones(3)
    assert report_regions(window.read()).runs[0].regions[0].region_id == "stage:s"


def test_body_that_raises_leaves_a_trace_and_no_profiler(tmp_path) -> None:
    """R25: stop in any case; the next window works."""
    with pytest.raises(KeyError, match="mine"), record_window(tmp_path / "a.json"):
        {str(torch.ones(3)): 0}["mine"]
    assert Trace.read(tmp_path / "a.json").num_events > 0
    assert not _torch_private.is_profiler_active()
    with record_window(tmp_path / "b.json") as window:
        torch.ones(3)
    assert window.read().num_events > 0


def test_active_profiler_is_refused_and_survives(tmp_path) -> None:
    """R28: torch would silently end the outer one with no event."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as outer:
        torch.ones(3)
        with pytest.raises(RungError, match="another torch profiler is active"), record_window(tmp_path / "a.json"):
            pass
    outer.export_chrome_trace(str(tmp_path / "outer.json"))
    assert Trace.read(tmp_path / "outer.json").num_events > 0
    assert not (tmp_path / "a.json").exists()


def test_profiler_inside_the_window_is_named(tmp_path) -> None:
    def work() -> None:
        torch.ones(3)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            torch.ones(3)

    with pytest.raises(RungError, match="profiler of its own"), record_window(tmp_path / "a.json"):
        work()
    assert list(tmp_path.iterdir()) == []


def test_empty_window_is_named(tmp_path) -> None:
    with pytest.raises(RungError, match="holds no event"), record_window(tmp_path / "a.json"):
        pass


def test_threads_are_recorded_when_asked(tmp_path) -> None:
    """R30: operators of other threads are absent by default."""

    def work() -> None:
        thread = threading.Thread(target=lambda: torch.ones(3).add(1))
        thread.start()
        thread.join()

    with record_window(tmp_path / "a.json", all_threads=True) as window:
        work()
    assert "aten::add" in window.read().names
    with pytest.raises(RungError, match="all_threads"), record_window(tmp_path / "b.json"):
        work()


def test_all_threads_and_a_profiler_inside_end_with_an_error_and_no_crash(tmp_path) -> None:
    """Its own process: a window of all threads that is lost must not take the process with it."""
    source = """
        import threading, torch
        from perfladder.errors import RungError
        from perfladder.trace.record import record_window, span

        def work():
            with span("stage", "s"):
                torch.ones(3).add(1)

        def lose():
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                torch.ones(3)

        for index in range(2):
            with record_window(f"{index}.json", all_threads=True) as window:
                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
            print("stage" in {label.kind for label in window.read().labels if label})
        try:
            with record_window("2.json", all_threads=True):
                lose()
        except RungError as error:
            print("own" in str(error))
        with record_window("3.json", all_threads=True) as window:
            work()
        print(window.read().num_events > 1)
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(source)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split("\n")[:4]) == (0, ["True"] * 4), done.stderr


def test_export_that_never_ends_is_given_up(tmp_path, monkeypatch) -> None:
    """R21: what was measured before is kept; nothing waits for ever."""
    let_go = threading.Event()
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda *_: let_go.wait())
    with (
        pytest.raises(RungError, match=r"Trace export timed out after 0.01 s"),
        record_window(tmp_path / "a.json", export_timeout_s=0.01),
    ):
        torch.ones(3)
    let_go.set()
    assert list(tmp_path.iterdir()) == []
    assert not _torch_private.is_profiler_active()


def test_export_that_fails_is_named(tmp_path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", fail)
    with pytest.raises(RungError, match="no space left"), record_window(tmp_path / "a.json"):
        torch.ones(3)
    assert list(tmp_path.iterdir()) == []


def test_notice_about_kept_events_is_silenced_and_other_warnings_are_not(tmp_path, monkeypatch) -> None:
    start = torch.profiler.profile.start

    def start_with(profiler: torch.profiler.profile, message: str) -> None:
        warnings.warn(message, UserWarning, stacklevel=1)
        start(profiler)

    monkeypatch.setattr(torch.profiler.profile, "start", lambda self: start_with(self, "old\nset acc_events=True."))
    with record_window(tmp_path / "a.json"):
        torch.ones(3)
    monkeypatch.setattr(torch.profiler.profile, "start", lambda self: start_with(self, "something else"))
    with pytest.raises(UserWarning, match="something else"), record_window(tmp_path / "b.json"):
        torch.ones(3)


def test_garbage_collection_is_marked_when_asked(tmp_path) -> None:
    before = list(gc.callbacks)
    with record_window(tmp_path / "a.json", mark_garbage_collection=True) as window, span(RUN_KIND, "0"):
        gc.collect()
    run = report_regions(window.read()).runs[0]
    assert run.residual.host.garbage_collection_us > 0
    assert gc.callbacks == before


def test_missing_device_is_named_and_nothing_runs(tmp_path, monkeypatch) -> None:
    """R01: a device that was asked for and is not here is an error, not a host-only trace."""
    monkeypatch.setattr(record, "find_activities", lambda: ("cpu",))
    for options in ({"activities": ["cpu", "cuda"]}, {"device": "cuda:0"}):
        with pytest.raises(NotPossibleHereError, match="'cuda'"), record_window(tmp_path / "a.json", **options):
            raise AssertionError("the body ran")
    with record_window(tmp_path / "a.json", device="cpu") as window:
        torch.ones(3)
    assert window.activities == ("cpu",)


def test_silent_device_is_a_warning(tmp_path) -> None:
    with record_window(tmp_path / "a.json") as window:
        torch.ones(3)
    window.activities = ("cpu", "cuda")
    assert WarningCode.NO_DEVICE_EVENTS in {warning.code for warning in window.read().warnings}


def test_unwritable_place_is_found_before_anything_runs(tmp_path) -> None:
    with pytest.raises(InputError, match="Cannot write"), record_window(tmp_path / "none" / "a.json"):
        raise AssertionError("the body ran")


def test_shapes_are_there_when_asked(tmp_path) -> None:
    with record_window(tmp_path / "a.json", with_shapes=True) as window:
        torch.ones(2, 3).mm(torch.ones(3, 4))
    trace = window.read(with_arguments=True)
    event = next(i for i in range(trace.num_events) if trace.names[trace.name_id[i]] == "aten::mm")
    assert trace.arguments(event)["Input Dims"][:2] == [[2, 3], [3, 4]]


def test_codes_are_all_explained() -> None:
    assert all(code.value == code.name and len(code.explanation) > 40 for code in WarningCode)
