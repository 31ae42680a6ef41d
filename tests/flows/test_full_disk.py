"""The flow on a file system that gets full, or read-only, while it runs, with both databases on it."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perfladder.ladder import RUNGS
from perfladder.rundir import RunDirectory

pytestmark = pytest.mark.slow

BeginFlow = Callable[..., Any]


def mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 MiB, of which a run wants 256."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or not mount("-t", "tmpfs", "-o", "size=300m", "tmpfs", str(folder)):
        pytest.skip("only the superuser mounts a file system, outside of containers")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_or_read_only_disk_ends_the_run_with_a_reason_and_costs_nothing_that_was_finished(
    begin_flow: BeginFlow, toy: dict[str, Any], disk: Path
) -> None:
    runs_dir, ballast = disk / "runs", disk / "ballast"
    fill = {RUNGS[1].question: str(ballast)}
    flow = begin_flow(toy, hooks={"fill": fill}, runs_dir=str(runs_dir), until="capture")
    full = flow.answer()
    assert full["exit_code"] == 4, full
    assert "cannot be written" in full["error"]
    assert ballast.exists(), full
    ballast.unlink()
    (run_dir,) = (runs_dir / "toy").iterdir()
    assert [entry.name for entry in RunDirectory.open(run_dir).record.rungs] == ["stages"]

    assert mount("-o", "remount,ro", str(disk))
    flow = begin_flow(toy, runs_dir=str(runs_dir), until="capture", resume="latest")
    read_only = flow.answer()
    assert (read_only["exit_code"], "Read-only file system" in read_only["error"]) == (4, True), read_only

    assert mount("-o", "remount,rw", str(disk))
    flow = begin_flow(toy, runs_dir=str(runs_dir), until="capture", resume="latest")
    done = flow.answer()
    assert (done["status"], done["run_dir"]) == ("done", str(run_dir)), done
    assert "stages (rung 1): taken over" in flow.log.read_text()
