"""What ncu prints, as seen of its versions 2022 to 2025."""

import pytest
from fake_ncu import IN_USE, NO_LIBRARY, NOTHING, PERMISSION, UNSUPPORTED

from perfladder.nsight.output import read_output

BEGIN = [
    "==WARNING== Note: Running with unmodified GPU clocks. If not controlled otherwise, profiling results may be "
    "inconsistent.",
    "==PROF== Connected to process 162 (/usr/bin/python3.13)",
]
END = ["==PROF== Trying to shutdown target application", "==ERROR== The application returned an error code (9)."]


@pytest.fixture
def read(tmp_path):
    def read(*lines, printed=(), has_report=False):
        log, other = tmp_path / "ncu.log", tmp_path / "printed.log"
        if lines:
            log.write_text("\n".join(lines) + "\n")
        other.write_text("\n".join(printed) + "\n")
        return read_output(log, other, has_report=has_report)

    return read


@pytest.mark.parametrize(
    ("line", "obstacle"),
    [
        (PERMISSION, "no_permission"),
        (IN_USE, "counters_in_use"),
        (UNSUPPORTED, "unsupported_gpu"),
        (NO_LIBRARY, "no_profiling_library"),
        ("==ERROR== Failed to open/create lock file /tmp/nsight-compute-lock.", "lock_file"),
    ],
)
def test_each_known_message_is_its_obstacle_whatever_follows(read, line, obstacle):
    told = read(*BEGIN, line, *END, NOTHING)
    assert told.obstacle == obstacle
    assert told.errors[0] == line.removeprefix("==ERROR== ")


def test_the_note_about_clocks_is_no_obstacle(read):
    told = read(*BEGIN)
    assert (told.obstacle, told.errors, told.matched_nothing, told.has_application_failed) == (None, [], False, False)


def test_kernels_that_were_seen_are_listed_though_the_program_prints_between(read):
    printed = [*BEGIN, NOTHING, "Available Kernels:", "  1. wmma_kernel(float const*, int)", "step 3 of 4", "2. fill"]
    told = read(printed=printed)
    assert told.matched_nothing
    assert told.seen == ["wmma_kernel(float const*, int)", "fill"]


def test_numbered_lines_of_a_program_are_no_kernels(read):
    assert read(*BEGIN, printed=["1. download", "2. run"]).seen == []


def test_what_a_program_prints_is_not_taken_for_ncu(read):
    printed = ["ERR_NVGPUCTRPERM", "the log said: ==ERROR== ERR_NVGPUCTRPERM", "No kernels were profiled"]
    told = read(*BEGIN, printed=printed)
    assert (told.obstacle, told.matched_nothing) == (None, False)
    told = read(*BEGIN, printed=[PERMISSION, NOTHING], has_report=True)
    assert (told.obstacle, told.errors, told.matched_nothing) == (None, [], False)


def test_without_a_report_that_the_log_explains_what_was_printed_counts(read):
    assert read(*BEGIN, printed=[PERMISSION]).obstacle == "no_permission"
    told = read(*BEGIN, NOTHING, printed=["Available Kernels:", "1. fill"])
    assert (told.matched_nothing, told.seen) == (True, ["fill"])


def test_a_program_that_ends_with_an_error_is_told(read):
    assert read(*BEGIN, "==ERROR== The application returned an error code (2).", NOTHING).has_application_failed
    early = "==ERROR== Target process 99 terminated before first instrumented API call."
    assert read(early, NOTHING).has_application_failed
