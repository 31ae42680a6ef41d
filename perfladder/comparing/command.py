"""What `perfladder compare` does with its options: which sides, how they are measured, what is saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from perfladder.changes import with_changes
from perfladder.comparing.interleave import PAIRS, OnProgress, Tell, Version, compare_interleaved
from perfladder.comparing.model import RunComparison
from perfladder.comparing.page import render_comparison_page
from perfladder.comparing.runs import MIN_EFFECT, compare_read
from perfladder.comparing.sides import read_side
from perfladder.comparing.views import check_folder, write_comparison
from perfladder.errors import InputError
from perfladder.report.html import check_page, write_page
from perfladder.workload import load_workload

FindRuns = Callable[[str], list[Path]]


@dataclass(frozen=True)
class CompareOptions:
    """The options as they were typed.

    Attributes:
        baseline: A run, or with `interleave` a workload.
        candidate: Likewise; with `interleave` it may be left out: the same workload.
        interleave: Measure both sides now.
        commits: Of baseline and candidate; None: the files as they are.
        changes: For both sides, for the baseline, and for the candidate.
        pairs: None: the default.
        check_noise: Measure the baseline against itself first.
        min_effect: Relative change below which none counts.
        to: Folder for the comparison; None: it is not kept.
        html: File for its page; None: none is written.
    """

    baseline: str
    candidate: str | None = None
    interleave: bool = False
    commits: tuple[str | None, str | None] = (None, None)
    changes: tuple[Sequence[str], Sequence[str], Sequence[str]] = ((), (), ())
    pairs: int | None = None
    check_noise: bool = False
    min_effect: float = MIN_EFFECT
    to: Path | None = None
    html: Path | None = None


def compare(options: CompareOptions, *, find: FindRuns, tell: Tell, on_progress: OnProgress) -> RunComparison:
    """Compare as the options say, and save it if they ask for that.

    Args:
        options: What the user typed.
        find: Finds run directories by a name.
        tell: Receives lines of progress.
        on_progress: Receives how many pairs are done.

    Raises:
        PerfladderError: An option is wrong, or a side cannot be measured.
    """
    if options.to is not None:
        check_folder(options.to)
    if options.html is not None:
        check_page(options.html)
    if options.interleave:
        comparison = _interleaved(options, tell, on_progress)
    else:
        comparison = _sequential(options, find)
    if options.to is not None:
        write_comparison(comparison, options.to)
    if options.html is not None:
        write_page(render_comparison_page(comparison), options.html)
    return comparison


def _sequential(options: CompareOptions, find: FindRuns) -> RunComparison:
    if options.candidate is None:
        raise InputError(
            "compare: two runs are needed, BASELINE and CANDIDATE; or a workload with --interleave, to measure now."
        )
    if stray := _options_of_interleaving(options):
        raise InputError(f"{stray} belongs to --interleave, which measures both sides now. Add it, or leave this out.")
    baseline, candidate = (read_side(find(name), name) for name in (options.baseline, options.candidate))
    return compare_read(baseline, candidate, min_effect=options.min_effect)


def _options_of_interleaving(options: CompareOptions) -> str | None:
    given = {
        "--baseline-commit": options.commits[0],
        "--candidate-commit": options.commits[1],
        "--set": options.changes[0],
        "--baseline-set": options.changes[1],
        "--candidate-set": options.changes[2],
        "--pairs": options.pairs,
        "--check-noise": options.check_noise,
    }
    return next((name for name, value in given.items() if value), None)


def _interleaved(options: CompareOptions, tell: Tell, on_progress: OnProgress) -> RunComparison:
    both, of_baseline, of_candidate = options.changes
    sources = options.baseline, options.candidate or options.baseline
    versions = []
    for source, commit, changes, option in zip(
        sources, options.commits, (of_baseline, of_candidate), ("--baseline-set", "--candidate-set"), strict=True
    ):
        file = with_changes(load_workload(source), both, source=source)
        file = with_changes(file, changes, source=source, option=option)
        label = " ".join([source, *([f"at {commit}"] if commit else []), *changes])
        versions.append(Version(file, label, commit))
    return compare_interleaved(
        versions[0],
        versions[1],
        pairs=PAIRS if options.pairs is None else options.pairs,
        check_noise=options.check_noise,
        min_effect=options.min_effect,
        tell=tell,
        on_progress=on_progress,
        log_folder=options.to,
    )
