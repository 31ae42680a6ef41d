"""`perfladder compare`: two versions measured in turns by real processes, and options that make no sense."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import pytest
from clocked_runs import clocked_run
from processes import MARK, marked, wait_until

from perfladder.comparing.command import CompareOptions, compare
from perfladder.comparing.model import RunComparison
from perfladder.errors import InputError, NotPossibleHereError
from perfladder.find_runs import find_runs

PIPE = """
    import time, torch
    from pathlib import Path

    LOADS = Path("LOADS_FILE")

    class Part(torch.nn.Module):
        def __init__(self, ms):
            super().__init__()
            self.ms = ms

        def forward(self, x):
            time.sleep(self.ms / 1000)
            return x

    class Pipe:
        def __init__(self):
            self.encoder, self.decoder = Part(2), Part(DECODER_MS)

        def __call__(self):
            return self.decoder(self.encoder(torch.ones(1, 4)))

    def build():
        LOADS.open("a").write("x")
        if DECODER_MS == 16 and len(LOADS.read_text()) == 7:
            raise OSError("not a fourth time")
        return Pipe()
"""
WORKLOAD = {"name": "turns", "target": "pipe.py:build", "device": "cpu", "warmup_runs": 1, "timeout_s": 60}


def git(folder, *arguments):
    settings = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", folder, *settings, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def write(folder, decoder_ms, **fields):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pipe.py").write_text(
        textwrap.dedent(PIPE)
        .replace("DECODER_MS", str(decoder_ms))
        .replace("LOADS_FILE", str(folder.parents[1] / "loads"))
    )
    (folder / "work.yaml").write_text(json.dumps({**WORKLOAD, **fields}))
    return folder / "work.yaml"


@pytest.fixture
def repository(tmp_path):
    """Two commits, of which the second is slower, and a third version that is not committed."""
    root = tmp_path / "repository"
    for decoder_ms in (4, 16):
        write(root / "work", decoder_ms)
        if not (root / ".git").exists():
            git(root, "init", "--quiet")
        git(root, "add", "--all")
        git(root, "commit", "--quiet", "--message", f"{decoder_ms} ms")
    write(root / "work", 400)
    return root


class Command:
    """The command line in a process of its own, with its own temporary folder."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.mark, self.temporary, self.log = uuid.uuid4().hex, folder / "temporary", folder / "stderr"
        self.temporary.mkdir()
        environment = {**os.environ, MARK: self.mark, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "perfladder.cli", "compare", *arguments]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=folder
            )

    def end(self) -> tuple[int, str]:
        """Exit code and what was printed; nothing is left then but the locks of devices."""
        out = self.process.communicate(timeout=200)[0]
        wait_until(lambda: marked(self.mark) == [], 30)
        assert {path.name for path in self.temporary.iterdir()} <= {"perfladder-locks"}
        assert "Traceback" not in self.log.read_text()
        return self.process.returncode, out


@pytest.mark.slow
def test_two_commits_take_turns_and_the_slower_one_is_told_though_the_last_launch_fails(repository, tmp_path):
    before = git(repository, "status", "--porcelain"), (repository / "work" / "pipe.py").read_text()
    options = [
        "--interleave",
        "--baseline-commit",
        "HEAD~1",
        "--candidate-commit",
        "HEAD",
        "--fail-if-slower",
        "--json",
    ]
    more = ["--set", "launches=4", "--pairs", "4", "--to", str(tmp_path / "to")]
    code, out = Command(tmp_path, str(repository / "work" / "work.yaml"), *options, *more).end()
    assert code == 1, out
    found = RunComparison.model_validate_json(out)
    assert (found.method, found.verdict, found.is_slower) == ("interleaved", "slower", True)
    assert found.metric.comparison.unit == "launch_pairs"
    changes = {row.name: row for row in found.scenarios[0].stages}
    assert (changes["decoder"].verdict, changes["encoder"].verdict == "slower") == ("slower", False)
    sides = [getattr(found, side) for side in ("baseline", "candidate")]
    assert [side.commit for side in sides] == [git(repository, "rev-parse", name) for name in ("HEAD~1", "HEAD")]
    assert [(side.num_launches, side.num_runs, side.is_dirty) for side in sides] == [(3, 12, False)] * 2
    assert [w.message for w in found.warnings if w.code == "LAUNCH_FAILED" and "not a fourth time" in w.message]
    measured = found.measured["candidate"].default
    assert [len(launch) for launch in measured.wall_ms.launches] == [4, 4, 4]
    assert max(measured.wall_ms.values) < 400, "the version that is not committed was measured"
    assert RunComparison.model_validate_json((tmp_path / "to" / "comparison.json").read_text()) == found
    assert "**slower**" in (tmp_path / "to" / "comparison.md").read_text()
    assert (git(repository, "status", "--porcelain"), (repository / "work" / "pipe.py").read_text()) == before
    assert len(git(repository, "worktree", "list").splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("text", ["loading the candidate", "measuring in turns"])
def test_a_comparison_that_is_terminated_leaves_no_process_and_no_checkout(repository, tmp_path, text):
    options = ["--interleave", "--baseline-commit", "HEAD~1", "--pairs", "1000"]
    command = Command(tmp_path, str(repository / "work" / "work.yaml"), *options)
    wait_until(lambda: text in command.log.read_text() or command.process.poll() is not None, 100)
    assert len(git(repository, "worktree", "list").splitlines()) == 2
    command.process.send_signal(signal.SIGTERM)
    assert command.end()[0] == 143
    assert len(git(repository, "worktree", "list").splitlines()) == 1


@pytest.mark.slow
def test_a_side_that_fails_is_named(tmp_path):
    write(tmp_path / "a", 1)
    broken = write(tmp_path / "b", 1)
    (tmp_path / "b" / "pipe.py").write_text("def build():\n    raise OSError('no weights here')\n")
    code, out = Command(tmp_path, str(tmp_path / "a" / "work.yaml"), str(broken), "--interleave", "--json").end()
    error = json.loads(out)["error"]
    assert (code, error["type"]) == (3, "WorkloadError")
    assert error["message"].startswith(f"candidate ({broken})")
    assert "no weights here" in error["message"]


def options_of(tmp_path, **options):
    return CompareOptions(baseline=str(write(tmp_path, 1, **options.pop("fields", {}))), **options)


def run(options, out=Path("runs")):
    return compare(options, find=lambda name: find_runs(name, out), tell=print, on_progress=print)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "two runs are needed"),
        ({"candidate": "x", "pairs": 3}, "--pairs belongs to --interleave"),
        ({"candidate": "x", "commits": (None, "HEAD")}, "--candidate-commit belongs to --interleave"),
        ({"candidate": "x", "changes": ((), ("dtype=null",), ())}, "--baseline-set belongs to --interleave"),
        ({"interleave": True, "pairs": 1}, "pairs is 1; a verdict needs at least 10"),
        ({"interleave": True, "min_effect": -1.0}, "min_effect is -1"),
        (
            {"interleave": True, "check_noise": True, "changes": (("launches=1",), (), ())},
            "--check-noise needs launches",
        ),
        ({"interleave": True, "commits": ("HEAD", None)}, "no git repository"),
        ({"interleave": True, "changes": ((), ("inputs.x=1",), ())}, r"same work.*inputs\.x: 1 in the baseline, None"),
        (
            {"interleave": True, "changes": ((), (), ("dtypes=null",))},
            "(?s)--candidate-set is not valid.*unknown field",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_loaded(tmp_path, options, message):
    with pytest.raises(InputError, match=rf"(?s){message}"):
        run(options_of(tmp_path, **options))


def test_ranks_cannot_take_turns(tmp_path):
    with pytest.raises(NotPossibleHereError, match="nproc"):
        run(options_of(tmp_path, interleave=True, changes=(("nproc=2",), (), ())))


def test_a_folder_that_cannot_be_written_is_found_first(tmp_path):
    with pytest.raises(NotPossibleHereError, match="Choose another with --to"):
        run(options_of(tmp_path, interleave=True, to=Path("/proc/perfladder")))


def test_finished_runs_are_compared_and_saved_where_they_were_asked_to(tmp_path):
    for seed, ms, commit in ((0, 10.0, "a"), (1, 15.0, "b")):
        clocked_run(tmp_path, {"part": ms}, seed=seed, commit=commit * 40)
    found = run(CompareOptions(baseline="aaaa", candidate="bbbb", to=tmp_path / "new" / "to"), tmp_path)
    assert found.verdict == "slower"
    assert (tmp_path / "new" / "to" / "comparison.md").read_text().startswith("# clocked: latency_p50 is slower")
