"""What builds print is kept in a file of their folder: of a child all of it, of this process what can be told apart."""

import io
import json
import logging
import threading
import warnings
from importlib.metadata import version
from pathlib import Path

import hostile
import pytest
import toys

import perfladder as pl
from perfladder.tuning import cache as cache_module
from perfladder.tuning.build_log import LOG_FILE, MAX_BYTES, collected, head_and_tail, tell

EAGER = pl.backend.TorchEagerBackend()


def tried(backend, clock):
    """What is known of a backend that was tried before the plain module, and the log of its builds."""
    wrapper = pl.Module(toys.Toy(), strategy=pl.FirstWinsStrategy([backend, EAGER]))
    report = pl.tune(wrapper, toys.samples(), clock=clock)
    assert report.modules[0].error is None
    record = report.modules[0].graphs[0].decision.candidates[0]
    return record, Path(record.log_file).read_text() if record.log_file else None, report


def header_of(log):
    """The header of the last build in a log."""
    section = log[log.rindex("build in: ") :]
    return dict(line.split(": ", 1) for line in section.partition("\n\n")[0].splitlines())


class Speaks(toys.Faster):
    """Built in this process, while another thread speaks too."""

    name = "toy_speaks"

    def compile(self, request):
        print("on stdout")
        logging.getLogger("toy.exporter").warning("a record of %s", "the build")
        warnings.warn("a warning of the build", UserWarning, stacklevel=1)
        tell("told by an exporter")
        other = threading.Thread(target=logging.getLogger("toy.user").warning, args=("of another thread",))
        other.start()
        other.join()
        return super().compile(request)


def test_a_build_in_this_process_leaves_its_warnings_and_records(clock, caplog, capsys):
    with pytest.warns(UserWarning, match="a warning of the build"):
        record, log, _ = tried(Speaks(ms=2.0), clock)
    assert Path(record.log_file).parent.parent.is_relative_to(pl.config.cache_dir)
    header = header_of(log)
    assert header["build in"].startswith("this process")
    assert header["backend"] == "toy_speaks, Speaks(ms=2.0)"
    assert json.loads(header["options"])["ms"] == 2.0
    assert f"torch {version('torch')}" in header["versions"]
    assert float(header["duration_s"]) >= 0
    assert header["outcome"] == "built"
    body = log.partition("outcome: built")[2]
    for said in ("WARNING toy.exporter: a record of the build", "UserWarning: a warning of", "told by an exporter"):
        assert said in body
    assert "of another thread" not in log
    assert "of another thread" in caplog.text, "it is shown as ever"
    assert "a record of the build" in caplog.text
    assert "on stdout" not in log
    assert capsys.readouterr().out == "on stdout\n", "what a process prints goes where it goes"
    assert tell("nobody listens") is None


def test_builds_of_two_threads_that_overlap_leave_warnings_as_they_were():
    first, second = [], []
    inner_may_end, outer_ended = threading.Event(), threading.Event()

    def other():
        with collected(second.append):
            inner_may_end.set()
            outer_ended.wait(10)
            warnings.warn("of the second", UserWarning, stacklevel=1)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with collected(first.append):
            thread = threading.Thread(target=other)
            thread.start()
            assert inner_may_end.wait(10)
            warnings.warn("of the first", UserWarning, stacklevel=1)
        outer_ended.set()
        thread.join()
        warnings.warn("after both", UserWarning, stacklevel=1)
    assert [str(one.message) for one in shown] == ["of the first", "of the second", "after both"]
    assert ["of the first" in line for line in first] == [True]
    assert ["of the second" in line for line in second] == [True]


class Fails(toys.Faster):
    name = "toy_fails"

    def compile(self, request):
        tell("before it failed")
        raise RuntimeError("no such operator")


def test_a_failure_names_its_log_beside_the_reason(clock):
    record, log, report = tried(Fails(), clock)
    assert (record.status, record.reason) == ("failed", "RuntimeError: no such operator")
    assert header_of(log)["outcome"] == "failed: RuntimeError: no such operator"
    assert log.endswith("before it failed\n")
    assert f"Fails() failed; its log: {record.log_file}" in report.describe()


def test_what_is_not_built_has_no_log(clock):
    class NotHere(toys.Faster):
        name = "toy_not_here"

        def why_not(self, device):
            return "its library is missing"

    record, _, _ = tried(NotHere(), clock)
    assert (record.status, record.log_file) == ("not_applicable", None)


class Reports(toys.Faster):
    """Writes a file of that name itself, as an exporter's report."""

    name = "toy_reports"

    def compile(self, request):
        (request.folder / LOG_FILE).write_text("# The exporter's report\nall operators are there\n")
        return super().compile(request)


def test_a_report_that_the_backend_writes_there_is_kept(clock):
    _, log, _ = tried(Reports(), clock)
    assert header_of(log)["outcome"] == "built"
    assert log.endswith(f"The backend's own {LOG_FILE}:\n\n# The exporter's report\nall operators are there\n")


def test_a_log_that_cannot_be_written_costs_the_log_only(clock, caplog):
    class Blocks(toys.Faster):
        name = "toy_blocks"

        def compile(self, request):
            (request.folder / LOG_FILE).mkdir()
            return super().compile(request)

    record, log, _ = tried(Blocks(), clock)
    assert log is None
    assert record.correctness.num_cases > 0
    assert "build.log cannot be written" in caplog.text


@pytest.mark.slow
def test_all_that_a_child_prints_is_kept_up_to_a_size(clock):
    _record, log, _ = tried(hostile.Talks(), clock)
    assert len(log.encode()) <= MAX_BYTES + 100
    assert "build in: a process of its own" in log
    assert "outcome: built, and run on all samples" in log
    said = ("to stdout", "past Python", "to stderr", "of a process that it started")
    for line in (*said, "WARNING toy.exporter: a log record", "RuntimeWarning: a warning", "told by an exporter"):
        assert line in log, line
    assert "bytes are left out]" in log
    assert "the end\n" in log
    assert header_of(log)["build in"].startswith("this process"), "the build here comes after it"
    assert log.index("the end\n") < log.rindex("build in: ")


@pytest.mark.slow
def test_a_crash_leaves_what_was_printed_before_it(clock):
    record, log, _ = tried(hostile.Segfaults(), clock)
    assert record.status == "failed"
    assert "outcome: failed: its process ended: killed by SIGSEGV" in log
    assert "Fatal Python error: Segmentation fault" in log
    assert "hostile.py" in log, "where it was is told by its stack"


def test_of_a_long_file_both_ends_are_kept():
    text = head_and_tail(io.BytesIO(b"first" + b"." * 1000 + b"last"), 20)
    assert text == "first.....\n[989 bytes are left out]\n......last"
    assert head_and_tail(io.BytesIO(b"short"), 20) == "short"


class Needs(toys.Faster):
    name = "toy_needs"
    libraries = ("a-compiler",)


def test_another_version_of_its_library_is_another_build(clock, monkeypatch):
    known = cache_module.version_of
    toy = toys.Toy()

    def tune(version):
        monkeypatch.setattr(cache_module, "version_of", lambda name: version if name == "a-compiler" else known(name))
        strategy = pl.FirstWinsStrategy([Needs(ms=1.0), toys.Faster(label="other", ms=2.0), EAGER])
        strategy.enable_performance_validation("diagnostic")
        report = pl.tune(pl.Module(toy, strategy=strategy), toys.samples(), clock=clock)
        return report.modules[0].graphs[0].decision.candidates[0]

    first = tune("1.0")
    assert "a-compiler 1.0" in Path(first.log_file).read_text()
    assert tune("1.0").is_reused
    second = tune("1.1")
    assert not second.is_reused
    assert second.log_file != first.log_file
    assert tune("1.0").is_reused, "the earlier build is still there"


def test_a_saved_module_has_no_logs_of_the_machine_that_built_it(tmp_path, tuned_toy):
    import zipfile

    wrapper = tuned_toy()
    pl.save(wrapper, tmp_path / "toy.ait")
    with zipfile.ZipFile(tmp_path / "toy.ait") as archive:
        assert not [name for name in archive.namelist() if name.endswith(LOG_FILE)]
        assert str(pl.config.cache_dir) not in archive.read("manifest.json").decode()
