"""The verdict on one pair of sample sets, in the words of a comparison: faster, slower, same within X %, undecided."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Final, Literal

from perfladder.comparing.model import Change, Verdict
from perfladder.launch_pairs import compare_launch_pairs
from perfladder.stats import MIN_LAUNCHES, Comparison, Samples, compare_samples

WIDEST_SAME: Final = 0.05
"""An interval that reaches further from 1 is too wide to call two sides the same, unless `min_effect` is larger."""


@dataclass(frozen=True)
class Judge:
    """How samples of the two sides are compared.

    Attributes:
        interleaved: The sides took turns, run by run.
        min_effect: Relative change below which none counts.
        aa_noise_floor: How far the baseline was from itself, relative; None where that was not measured.
    """

    interleaved: bool
    min_effect: float
    aa_noise_floor: float | None = None

    def change(
        self, name: str, baseline: Samples, candidate: Samples, unit: Literal["ms", "us", "bytes"] = "ms"
    ) -> Change:
        """Compare one time on both sides."""
        values = median(baseline.values), median(candidate.values)
        found = self._obstacle(baseline, candidate)
        comparison = None
        if found is None:
            comparison = self._compare(baseline, candidate)
        verdict, reason, same_within = self._verdict(comparison, baseline, candidate, found)
        plain_ratio = values[0] / values[1] if min(values) > 0 else None
        return Change(
            name=name,
            unit=unit,
            baseline=values[0],
            candidate=values[1],
            speedup=plain_ratio if comparison is None else comparison.speedup,
            interval=None if comparison is None else comparison.interval,
            verdict=verdict,
            same_within=same_within,
            reason=reason,
            comparison=comparison,
        )

    def _compare(self, baseline: Samples, candidate: Samples) -> Comparison:
        if self.interleaved:
            return compare_launch_pairs(
                baseline, candidate, min_effect=self.min_effect, aa_noise_floor=self.aa_noise_floor
            )
        return compare_samples(
            baseline,
            candidate,
            interleaved=False,
            min_effect=self.min_effect,
            aa_noise_floor=self.aa_noise_floor,
        )

    def _obstacle(self, baseline: Samples, candidate: Samples) -> str | None:
        """Why there is nothing to compare at all."""
        if min(baseline.values + candidate.values) < 0:
            return "Some samples are below zero: what ran at once counts more than once there."
        counts = [[len(launch) for launch in side.launches] for side in (baseline, candidate)]
        if self.interleaved and counts[0] != counts[1]:
            return "It was not seen in every run of both sides, so that its runs are no pairs."
        return None

    def _verdict(
        self, comparison: Comparison | None, baseline: Samples, candidate: Samples, obstacle: str | None
    ) -> tuple[Verdict, str, float | None]:
        if comparison is None:
            return "undecided", str(obstacle), None
        interval = comparison.interval
        if interval is None:
            return "undecided", self._too_few(baseline, candidate) or comparison.reason, None
        if comparison.verdict in ("faster", "slower"):
            return ("faster" if comparison.verdict == "faster" else "slower"), comparison.reason, None
        furthest = max(interval.high, 1 / interval.low) - 1
        if comparison.verdict == "no_difference" and furthest <= max(WIDEST_SAME, self.min_effect):
            return "same", f"Same within {furthest:.1%}: {_lower_first(comparison.reason)}", furthest
        if comparison.verdict == "no_difference":
            reason = f"{comparison.reason} That is too wide to call the sides the same: measure more."
            return "undecided", reason, None
        return "undecided", comparison.reason, None

    def _too_few(self, baseline: Samples, candidate: Samples) -> str | None:
        """What to do where there are too few process launches."""
        counts = len(baseline.launches), len(candidate.launches)
        if self.interleaved or min(counts) >= MIN_LAUNCHES:
            return None
        return (
            f"Two runs after each other are compared by process launch: there are {counts[0]} and {counts[1]}, and a "
            f"verdict needs at least {MIN_LAUNCHES} a side."
        )


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
