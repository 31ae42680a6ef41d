"""Commits of the user's repository, checked out for the length of a block; their own files stay as they are."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from perfladder.errors import InputError, NotPossibleHereError

_GIT_LIMIT_S = 300.0
_ENDING = (signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Checkout:
    """A commit in a folder of its own.

    Attributes:
        commit: Its full name.
        path: The folder.
        root: The user's own work tree.
    """

    commit: str
    path: Path
    root: Path

    def at(self, folder: Path) -> Path:
        """The folder of the checkout that stands for one of the work tree.

        Raises:
            InputError: The commit has none.
        """
        place = folder.resolve().relative_to(self.root)
        found = self.path / place
        if not found.is_dir():
            raise InputError(
                f"Commit {self.commit[:12]} has no folder {place}, where the workload is now. Name a commit that has "
                "it, or copy the workload to a folder that both commits have."
            )
        return found

    def standing_for(self, folder: Path) -> Path:
        """What a process that would work in `folder` works in: the same folder of the commit, or its root."""
        folder = folder.resolve()
        if not folder.is_relative_to(self.root):
            return self.path
        found = self.path / folder.relative_to(self.root)
        return found if found.is_dir() else self.path


@contextmanager
def commits_checked_out(folder: Path, commits: Sequence[str]) -> Iterator[list[Checkout]]:
    """Check commits out, and remove the checkouts however the block ends, by SIGTERM too.

    Args:
        folder: In the repository.
        commits: Commits, branches or tags, as git takes them.

    Raises:
        InputError: There is no repository, or no such commit.
        NotPossibleHereError: git is missing, or cannot check it out.
    """
    root = _root_of(folder)
    names = [_commit_named(root, commit) for commit in commits]
    with _ended_in_order():
        base = Path(tempfile.mkdtemp(prefix="perfladder-commits-")).resolve()
        found = [Checkout(name, base / f"{place}-{name[:12]}", root) for place, name in enumerate(names)]
        try:
            for checkout in found:
                _check_out(checkout)
            yield found
        finally:
            _remove(found, base)


def _root_of(folder: Path) -> Path:
    done = _git(folder, "rev-parse", "--show-toplevel")
    if done.returncode != 0:
        raise InputError(
            f"{folder} is in no git repository with a work tree, so no commit of it can be measured: "
            f"{done.stderr.strip()}"
        )
    return Path(done.stdout.strip()).resolve()


def _commit_named(root: Path, commit: str) -> str:
    done = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}")
    if done.returncode != 0:
        raise InputError(f"The repository {root} has no commit {commit!r}. Give a commit, a branch or a tag of it.")
    return done.stdout.strip()


def _check_out(checkout: Checkout) -> None:
    # A hook of the user's would run for a checkout that they did not ask for.
    done = _git(
        checkout.root,
        "-c",
        "core.hooksPath=/dev/null",
        "worktree",
        "add",
        "--detach",
        "--quiet",
        str(checkout.path),
        checkout.commit,
    )
    if done.returncode != 0:
        raise NotPossibleHereError(f"git cannot check out {checkout.commit[:12]}: {done.stderr.strip()}")


def _remove(checkouts: list[Checkout], base: Path) -> None:
    """Remove the checkouts, and what the repository knows of them; nothing may cut that short."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_ENDING, signal.SIGINT})
    try:
        for checkout in checkouts:
            # Twice --force: also one that git has locked while it was adding it.
            _git(checkout.root, "worktree", "remove", "--force", "--force", str(checkout.path))
        shutil.rmtree(base, ignore_errors=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Where nobody handles SIGTERM, it would end the process before any `finally`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(folder), *arguments]
    try:
        # In a session of its own, so that Ctrl-C reaches this process only.
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_LIMIT_S, check=False, start_new_session=True
        )
    except FileNotFoundError:
        raise NotPossibleHereError("git is not installed, so that no commit can be checked out.") from None
    except subprocess.TimeoutExpired:
        raise NotPossibleHereError(f"git {arguments[0]} did not end within {_GIT_LIMIT_S:g} s.") from None
