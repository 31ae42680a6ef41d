"""Candidates that somebody else writes: their source is compiled, checked and timed in a process of its own."""

from __future__ import annotations

import json
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from pydantic import Field, ValidationError

from perfladder.child import ChildLimits, ask_child
from perfladder.errors import InputError
from perfladder.kernels.export import TASK, KernelTask
from perfladder.models import Model
from perfladder.stats import Comparison, Samples, compare_samples, summarize

_BENCH = Path(__file__).with_name("standalone_bench.py")


class CandidateSample(Model):
    """One form of call: is the candidate right, and is it faster?"""

    label: str
    num_calls: int
    max_rel_error: float
    reason: str | None = Field(description="Why it is wrong; None: it is right.")
    baseline_p50_ms: float | None = None
    candidate_p50_ms: float | None = None
    comparison: Comparison | None = None


class KernelGenerationResult(Model):
    """What became of one candidate.

    `compile`: its file could not be imported, or its process ended. `validation`: it raised, or is wrong. `benchmark`:
    it is right, and timed where `error` is None.
    """

    stage: Literal["compile", "validation", "benchmark"]
    error: str | None
    samples: list[CandidateSample] = []

    @property
    def is_right(self) -> bool:
        """Whether its output is right for all samples."""
        return self.stage == "benchmark" and self.error is None

    @property
    def speedup(self) -> float | None:
        """Of all calls together, each form by its number of calls; None where it was not timed."""
        sides = [(one.baseline_p50_ms, one.candidate_p50_ms, one.num_calls) for one in self.samples]
        if not self.is_right or not sides:
            return None
        before = sum((baseline or 0.0) * count for baseline, _, count in sides)
        after = sum((candidate or 0.0) * count for _, candidate, count in sides)
        return before / after if after else None

    @property
    def is_faster(self) -> bool:
        """Whether some form of call is faster for certain, and none slower."""
        verdicts = [one.comparison.verdict for one in self.samples if one.comparison is not None]
        return self.is_right and "faster" in verdicts and "slower" not in verdicts


class KernelGenerator:
    """Takes candidates for the function of a benchmark folder, one after the other.

    Whoever writes them, a script, a person or a coding agent, gets back why one does not compile, where it is wrong, or
    how fast it is. A candidate runs in a process of its own, with your rights: it is ended at the limits with all that
    it started, and nothing more is kept from it. Candidates wait for one another, so that none disturbs the times of
    another.

    Args:
        folder: From `export_benchmark` or `perfladder kernels`.
        timeout_s: For all that one candidate does.
        max_memory_bytes: That its processes may take together; None: what the machine has.

    Raises:
        InputError: The folder is none, or an argument is wrong.
    """

    def __init__(self, folder: str | Path, *, timeout_s: float = 300.0, max_memory_bytes: int | None = None) -> None:
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
            raise InputError(f"timeout_s: expected seconds above 0, got {timeout_s!r}.")
        if max_memory_bytes is not None and (type(max_memory_bytes) is not int or max_memory_bytes <= 0):
            raise InputError(f"max_memory_bytes: expected a number of bytes above 0 or None, got {max_memory_bytes!r}.")
        self.folder = Path(folder).absolute()
        try:
            self.task = KernelTask.model_validate_json((self.folder / TASK).read_bytes())
        except OSError:
            raise InputError(
                f"folder: {folder} has no {TASK}; expected one that `perfladder kernels --export` wrote."
            ) from None
        except ValidationError as error:
            raise InputError(f"folder: {self.folder / TASK} is damaged: {error.errors()[0]['msg']}.") from None
        self._limits = ChildLimits(float(timeout_s), max_memory_bytes, "timeout_s")
        self._is_closed = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="perfladder-candidate")

    def submit(self, source: str | Path) -> Future[KernelGenerationResult]:
        """Queue a candidate: its text, or the path of its file; it has a function `kernel`, as `candidate.py` shows.

        Raises:
            InputError: It is neither, there is no such file, it is no text, or the generator is closed.
        """
        if isinstance(source, Path):
            if not source.is_file():
                raise InputError(f"source: there is no file {source}.")
            code = source.read_bytes()
        elif isinstance(source, str):
            code = source.encode("utf-8", "surrogatepass")
        else:
            raise InputError(f"source: expected Python code or the path of a file, not a {type(source).__name__}.")
        try:
            code.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"source: expected text in UTF-8, but byte {error.start} of it is none.") from None
        if self._is_closed:
            raise InputError("submit: the generator is closed, and takes no more candidates. Make another one.")
        return self._pool.submit(self._evaluate, code)

    def evaluate(self, source: str | Path) -> KernelGenerationResult:
        """`submit`, and wait for the result."""
        return self.submit(source).result()

    def close(self) -> None:
        """Drop candidates that wait, and wait for the one that runs."""
        self._is_closed = True
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _evaluate(self, source: bytes) -> KernelGenerationResult:
        with tempfile.TemporaryDirectory(prefix="perfladder-") as scratch, tempfile.TemporaryFile() as output:
            candidate = Path(scratch) / "candidate.py"
            candidate.write_bytes(source)
            # Not the folder's own copy of the script, which may have been edited.
            command = ["-P", "-X", "faulthandler", str(_BENCH), str(candidate), "--folder", str(self.folder)]
            found = ask_child(lambda answer_fd: [*command, "--answer-fd", str(answer_fd)], self._limits, output)
        if found.error is not None:
            return KernelGenerationResult(stage="compile", error=found.error)
        try:
            return _result_of(json.loads(found.answer))
        except (ValueError, KeyError, TypeError, AttributeError):  # the candidate wrote there as well
            return KernelGenerationResult(stage="compile", error="what its process answered cannot be read")


def _result_of(answer: dict[str, object]) -> KernelGenerationResult:
    samples = []
    for one in answer["samples"]:  # type: ignore[attr-defined]
        baseline, candidate = one.pop("baseline_ms", None), one.pop("candidate_ms", None)
        facts = {}
        if baseline is not None:
            sides = [Samples(launches=[side]) for side in (baseline, candidate)]
            facts = {
                "baseline_p50_ms": summarize(baseline).p50,
                "candidate_p50_ms": summarize(candidate).p50,
                "comparison": compare_samples(*sides, interleaved=True),
            }
        samples.append(CandidateSample(**one, **facts))
    return KernelGenerationResult.model_validate({**answer, "samples": samples})
