"""What a rung is thought to cost, and what a budget does about it."""

import re
from pathlib import Path

import pytest

from perfladder.ladder import RUNGS, climb
from perfladder.rundir import RunDirectory
from perfladder.rungs.cost import CostEstimate, why_skipped
from perfladder.workload import Budget, parse_workload

GIB = 1 << 30
COSTLY = CostEstimate(time_s=100.0, memory_bytes=4 * GIB, basis="a guess")


def decide(estimate, budget, ask=None, asks_always=False):
    return why_skipped(estimate, budget, name="harness", question="Alone?", ask=ask, asks_always=asks_always)


def test_what_is_not_known_is_not_over_a_budget():
    unknown = CostEstimate(basis="it has not run yet")
    assert decide(unknown, Budget(max_rung_time_s=1e-3, max_rung_disk_bytes=1)) is None
    assert str(unknown) == "cost not known (it has not run yet)"
    assert decide(COSTLY, None) is None


def test_over_budget_without_a_terminal_is_skipped_by_the_name_of_the_limit():
    reason = decide(COSTLY, Budget(max_rung_time_s=99))
    assert (
        reason
        == "Over budget: about 100 s, and budget.max_rung_time_s is 99. Raise it in the workload, or leave it out."
    )
    assert "budget.max_rung_memory_bytes" in decide(COSTLY, Budget(max_rung_memory_bytes=GIB))
    assert decide(COSTLY, Budget(max_rung_time_s=101, max_rung_memory_bytes=4 * GIB)) is None


@pytest.mark.parametrize(("answer", "is_skipped"), [(True, False), (False, True)])
def test_over_budget_at_a_terminal_is_the_users_decision(answer, is_skipped):
    asked = []

    def ask(question):
        asked.append(question)
        return answer

    reason = decide(COSTLY, Budget(max_rung_time_s=1), ask)
    assert (reason is not None) is is_skipped
    assert asked == ["Climb harness? Alone? It is over budget: about 100 s, and budget.max_rung_time_s is 1."]
    assert decide(COSTLY, Budget(max_rung_time_s=1000), ask) is None
    assert len(asked) == 1  # nothing is asked within budget


def test_each_rung_is_asked_for_when_the_user_wants_it():
    asked = []
    reason = decide(COSTLY, None, lambda question: asked.append(question), asks_always=True)
    assert reason == "Declined at the terminal."
    assert asked == ["Climb harness? Alone? Cost: about 100 s, 4.1e+03 MiB of memory (a guess)."]


@pytest.mark.slow
def test_a_climb_tells_each_cost_before_it_and_skips_what_is_over_budget(tmp_path):
    target = tmp_path / "pipe.py"
    target.write_text(
        "import torch\n"
        "class Pipe:\n"
        "    def __init__(self):\n"
        "        self.unet = torch.nn.Linear(256, 256)\n"
        "    def __call__(self):\n"
        "        return self.unet(torch.ones(512, 256))\n"
        "def build():\n"
        "    return Pipe()\n"
    )
    data = {"name": "costly", "target": f"{target}:build", "budget": {"max_rung_memory_bytes": 1}, "device": "cpu"}
    lines, asked = [], []

    def ask(question):
        asked.append(question)
        return "kernels" not in question

    outcome = climb(parse_workload(data), runs_dir=tmp_path / "runs", tell=lines.append, ask=ask)
    rungs = {entry.name: entry.status for entry in RunDirectory.open(Path(outcome.run_dir)).record.rungs}
    assert rungs == {"stages": "done", "capture": "done", "regions": "done", "harness": "done", "kernels": "skipped"}
    assert [question.partition("?")[0] for question in asked] == ["Climb harness", "Climb kernels"]
    told = [line for line in lines if re.match(r"\w+ \(rung \d\)", line)]
    assert len(told) == sum(not rung.is_optional for rung in RUNGS)
    assert all("about" in line or "cost not known" in line for line in told[:-1])
    assert "Declined at the terminal" in told[-1]
    unasked = climb(parse_workload(data), runs_dir=tmp_path / "runs", until="harness")
    run = RunDirectory.open(Path(unasked.run_dir)).record
    assert {entry.name: entry.status for entry in run.rungs}["harness"] == "skipped"
