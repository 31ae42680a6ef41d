"""A child process that is asked for an answer, and what it may not do meanwhile."""

import os
import tempfile

import pytest

from perfladder.child import ChildLimits, ask_child

PRINTS_WITHOUT_AN_END = """
import os, sys, time
block, size = b"x" * (1 << 20), 0
os.write(1, b"the first line")
while size <= os.fstat(1).st_size:
    size = os.fstat(1).st_size
    os.write(1, block)
    if size > 70 << 20:
        time.sleep(0.05)
os.write(1, b"the last line")
os.write(int(sys.argv[1]), b"done")
"""


@pytest.mark.slow
def test_output_without_an_end_does_not_fill_the_disk():
    with tempfile.TemporaryFile() as output:
        found = ask_child(
            lambda answer_fd: ["-c", PRINTS_WITHOUT_AN_END, str(answer_fd)], ChildLimits(60.0, None, "limit"), output
        )
        assert (found.error, found.answer) == (None, b"done")
        printed = os.pread(output.fileno(), 64 << 20, 0)
    assert len(printed) < 8 << 20
    assert printed.startswith(b"the first line")
    assert printed.endswith(b"the last line")
