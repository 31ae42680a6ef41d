"""How often the nightly verdict is right on series with known noise, and how long it takes.

    python tests/benchmarks/bench_nightly.py                    # all of it; about 20 minutes on one slow core
    python tests/benchmarks/bench_nightly.py --only speed       # 200 nights x 20 workloads
    python tests/benchmarks/bench_nightly.py --only step --trials 1000
    python tests/benchmarks/bench_nightly.py --only quiet --nights 200000 --noise gaussian drift

`quiet`: series of 400 nights of one workload in which nothing changes, judged night by night; a second measurement is
taken when one is asked for. Counted are second measurements, false alarms (a regression that was not there the night
before), and nights that say regression. `step`: a step of 3 % after 20, 45 and 90 nights of history, and whether it is
reported in the first, by the second, and by the third night. `changes`: whole series of 200 nights without a change and
with a step of 3 %, cut at once as the trend page does. The standard deviation of a night is 1 % everywhere; series
`number` of a kind of noise has the seed [number, 1] (quiet), [number, 2] (step), [number, 3] (changes).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from scipy.stats import chi2

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from night_series import NOISES, judge_series, judge_step
from nights import make_nights

from perfladder.nightly.changes import find_changes
from perfladder.nightly.judge import judge_night
from perfladder.nightly.model import Rules
from perfladder.nightly.trend import trend_data

LENGTH = 400
STEP = 0.03


def main() -> None:
    """Run what was asked for, and print one Markdown row for each kind of noise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["speed", "quiet", "step", "changes"])
    parser.add_argument("--nights", type=int, default=200_000, help="of each kind of noise, for quiet series")
    parser.add_argument("--trials", type=int, default=1000, help="of each kind of noise, for steps and changes")
    parser.add_argument("--noise", nargs="+", choices=list(NOISES), default=list(NOISES))
    parser.add_argument("--nights-to-confirm", type=int, default=1)
    options = parser.parse_args()
    rules = Rules(nights_to_confirm=options.nights_to_confirm)
    if options.only in (None, "speed"):
        measure_speed(rules)
    for name in options.noise:
        if options.only in (None, "quiet"):
            judge_quiet(name, options.nights, rules)
        if options.only in (None, "step"):
            judge_steps(name, options.trials, rules)
        if options.only in (None, "changes"):
            cut_series(name, options.trials)


def measure_speed(rules: Rules, num_workloads: int = 20, num_nights: int = 200) -> None:
    """Judge the last night of each workload and make its trend; then judge every night of every workload."""
    histories = [make_nights(num_nights, seed=seed) for seed in range(num_workloads)]
    start = time.perf_counter()
    for nights in histories:
        judge_night(nights[-1], nights[:-1], rules)
        trend_data(nights, rules)
    last_s = time.perf_counter() - start
    start = time.perf_counter()
    for nights in histories:
        for place in range(num_nights):
            judge_night(nights[place], nights[:place], rules)
    all_s = time.perf_counter() - start
    print(f"{num_workloads} workloads x {num_nights} nights: the last night and the trend {last_s:.2f} s", flush=True)
    print(
        f"{num_workloads} workloads x {num_nights} nights: every night, one after the other {all_s:.1f} s", flush=True
    )


def judge_quiet(name: str, num_nights: int, rules: Rules) -> None:
    """False alarms."""
    totals = np.zeros(4, np.int64)
    number = 0
    while totals[0] < num_nights:
        series = NOISES[name](np.random.default_rng([number, 1]), LENGTH)
        totals += judge_series(series, rules)[:4]
        number += 1
    nights, suspected, alarms, alarm_nights = (int(total) for total in totals)
    high = float(chi2.ppf(0.975, 2 * alarms + 2)) / 2 / nights
    print(
        f"| quiet, {name} | {nights} nights | measured again {1000 * suspected / nights:.2f} in 1000 | false alarms "
        f"{alarms}: {1000 * alarms / nights:.2f} in 1000 (at most {1000 * high:.2f}) | nights that say regression "
        f"{1000 * alarm_nights / nights:.2f} in 1000 |",
        flush=True,
    )


def judge_steps(name: str, trials: int, rules: Rules) -> None:
    """How soon a step is reported."""
    for history in (20, 45, 90):
        found = [
            judge_step(NOISES[name], rules, history=history, step=STEP, seed=[number, 2]) for number in range(trials)
        ]
        shares = [sum(night is not None and night <= within for night in found) / trials for within in (1, 2, 3)]
        told = ", ".join(f"{100 * share:.1f} %" for share in shares)
        print(f"| step of 3 % after {history} nights, {name} | {trials} steps | by night 1, 2, 3: {told} |", flush=True)


def cut_series(name: str, trials: int) -> None:
    """Changes of the trend page."""
    false = right = 0
    for number in range(trials):
        levels = NOISES[name](np.random.default_rng([number, 3]), 200).levels
        false += len(find_changes(levels))
        levels[120:] += STEP
        changes = find_changes(levels)
        right += len(changes) == 1 and abs(changes[0] - 120) <= 1
    print(
        f"| trend, {name} | {trials} series | changes in quiet ones {1000 * false / (200 * trials):.3f} in 1000 nights "
        f"| one change, within a night of the step {100 * right / trials:.1f} % |",
        flush=True,
    )


if __name__ == "__main__":
    main()
