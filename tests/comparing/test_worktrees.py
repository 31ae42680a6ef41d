"""Commits checked out for a comparison: gone afterwards, and the user's own files as they were."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from processes import wait_until

from perfladder.comparing.worktrees import commits_checked_out
from perfladder.errors import InputError


def git(folder, *arguments):
    settings = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", folder, *settings, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Two commits, an uncommitted change and an untracked file."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    root = tmp_path / "repository"
    (root / "work").mkdir(parents=True)
    git(root, "init", "--quiet")
    for text in ("one", "two"):
        (root / "work" / "pipe.py").write_text(text)
        git(root, "add", "--all")
        git(root, "commit", "--quiet", "--message", text)
    (root / "work" / "pipe.py").write_text("three")
    (root / "notes").write_text("untracked")
    return root


def state(root):
    files = {
        path.relative_to(root): path.read_text()
        for path in root.rglob("*")
        if path.is_file() and ".git" not in path.parts
    }
    return files, git(root, "status", "--porcelain"), git(root, "rev-parse", "HEAD"), git(root, "worktree", "list")


def temporaries(root):
    return list((root.parent / "temporary").iterdir())


def test_each_commit_lies_in_a_folder_of_its_own_and_nothing_is_left(repository):
    before = state(repository)
    with commits_checked_out(repository / "work", ["HEAD~1", "HEAD"]) as (one, other):
        assert [c.at(repository / "work").joinpath("pipe.py").read_text() for c in (one, other)] == ["one", "two"]
        assert one.commit == git(repository, "rev-parse", "HEAD~1")
        assert git(one.path, "status", "--porcelain") == ""
        assert one.standing_for(repository / "work") == one.path / "work"
        assert one.standing_for(Path("/")) == one.path
        (one.path / "work" / "made.txt").write_text("by the run")
    assert state(repository) == before
    assert temporaries(repository) == []


def test_an_error_in_the_block_leaves_nothing_behind(repository):
    before = state(repository)
    with pytest.raises(RuntimeError, match="it failed"), commits_checked_out(repository, ["HEAD"]):
        raise RuntimeError("it failed")
    assert state(repository) == before
    assert temporaries(repository) == []


def test_hooks_of_the_user_do_not_run(repository):
    hook = repository / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {repository.parent}/ran\n")
    hook.chmod(0o755)
    with commits_checked_out(repository, ["HEAD"]):
        pass
    assert not (repository.parent / "ran").exists()


def test_what_is_no_commit_or_no_repository_is_said(repository, tmp_path):
    with pytest.raises(InputError, match="no commit 'nonsense'"), commits_checked_out(repository, ["nonsense"]):
        pass
    with pytest.raises(InputError, match="no commit '--help'"), commits_checked_out(repository, ["--help"]):
        pass
    with pytest.raises(InputError, match="no git repository"), commits_checked_out(tmp_path, ["HEAD"]):
        pass
    (repository / "new").mkdir()
    with commits_checked_out(repository, ["HEAD"]) as (checkout,), pytest.raises(InputError, match="no folder new"):
        checkout.at(repository / "new")
    assert temporaries(repository) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_program_that_is_ended_leaves_nothing_behind(repository, number):
    """Nobody handles the signal here: a plain script that uses the library."""
    before = state(repository)
    source = """
        import sys, time
        from pathlib import Path
        import signal
        from perfladder.comparing.worktrees import commits_checked_out

        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which a suite that was started by nohup ignores
        with commits_checked_out(Path(sys.argv[1]), ["HEAD~1"]):
            Path(sys.argv[2]).touch()
            time.sleep(60)
    """
    mark = repository.parent / "inside"
    command = [sys.executable, "-c", textwrap.dedent(source), str(repository), str(mark)]
    environment = {**os.environ, "TMPDIR": str(repository.parent / "temporary")}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    wait_until(mark.exists, 60)
    assert len(temporaries(repository)) == 1
    process.send_signal(number)
    assert process.wait(timeout=60) != 0
    assert state(repository) == before
    assert temporaries(repository) == []
